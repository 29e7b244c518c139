"""Linears that read one tensor, solved together: their codes, decoded weights in their places, and the reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qbench.calibration.hessian import InputStatistics, relative_output_error
from qbench.errors import QbenchError
from qbench.formats.base import Format, Params, QuantizedTensor
from qbench.scheme import Scheme
from qbench.solvers.base import Solution, Solver
from qbench.solvers.nearest import Nearest
from qbench.transforms.clipping import Limits, clamped


@dataclass(frozen=True)
class LayerReport:
    """How one linear was compressed."""

    module: str
    block: int | None  # index of its decoder block; None outside the blocks
    format: dict[str, Any]
    solver: str
    transform: dict[str, Any] | None  # its name, and what its scales were folded into or why they were `skipped`
    bits_per_weight: float
    relative_error: float | None  # ||X(W-Q)^T|| / ||XW^T|| on the calibration tokens; None where no token came by
    tokens: int
    damping: float | None
    dead_columns: int
    fallback: str | None
    sparsity: float | None = None  # share of weights that decode to 0; None where nothing was pruned
    activation: dict[str, Any] | None = None


@dataclass(frozen=True)
class Target:
    """A linear to solve, by its full name. `limits` bound its weight, `transform` is what its report says of it."""

    name: str
    linear: nn.Linear
    scheme: Scheme
    limits: Limits | None = None
    transform: dict[str, Any] | None = None

    def weight(self) -> torch.Tensor:
        """The float32 weight to be rounded: the linear's own, inside the limits."""
        weight = self.linear.weight.data
        if not bool(torch.isfinite(weight).all()):
            raise QbenchError(f"{self.name}: its weight holds NaN or infinite values.")
        if self.limits is None:
            return weight
        return clamped(weight, self.limits, self.scheme.format.block_size(weight.shape[1]))


def solve(
    targets: Sequence[Target], block: int | None, statistics: InputStatistics
) -> list[tuple[LayerReport, QuantizedTensor]]:
    """Solves linears that all read what `statistics` are of, and puts the decoded weights in their places."""
    hessian = statistics.hessian(targets[0].name)
    reached = statistics.tokens > 0
    weights, masks, shared = prepared(targets, hessian.diagonal() if reached else None)
    solutions: dict[int, Solution] = {}
    for (format, solver), members in _equal(targets, reached).items():
        solved = _solve(
            [targets[i].name for i in members],
            [weights[i] for i in members],
            format,
            solver,
            hessian if solver.uses_hessian else None,
            [shared[i] for i in members],
            [masks[i] for i in members],
        )
        solutions |= zip(members, solved, strict=True)
    results = []
    for index, (target, mask) in enumerate(zip(targets, masks, strict=True)):
        solution = solutions[index]
        decoded = solution.quantized.dequantize()
        kept = weights[index] if mask is None else weights[index] * mask
        if not solution.dead_columns and bool(kept.any()) and not bool(decoded.any()):
            raise QbenchError(
                f"{target.name}: all its weights would become 0: the largest, {float(kept.abs().max()):.3g}, "
                f"is below what format {target.scheme.format.name} and its scales can hold."
            )
        unreached = "no calibration token reached it" if target.scheme.uses_statistics and not reached else None
        report = LayerReport(
            module=target.name,
            block=block,
            format=target.scheme.format.to_dict(),
            solver=target.scheme.solver.name,
            transform=target.transform,
            bits_per_weight=solution.quantized.bits_per_weight,
            relative_error=relative_output_error(target.linear.weight.data, decoded, hessian) if reached else None,
            tokens=statistics.tokens,
            damping=solution.damping,
            dead_columns=solution.dead_columns,
            fallback=solution.fallback or unreached,
            sparsity=None if mask is None else float((decoded == 0).float().mean()),
        )
        target.linear.weight.data = decoded
        results.append((report, solution.quantized))
    return results


def prepared(
    targets: Sequence[Target], mean_square: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[Params]]:
    """Weights to round, masks of what stays of them, and shared parameters, of linears that read one tensor.

    `mean_square` ``[in]`` is that tensor's; None where no calibration token came by or no scheme asks for it.
    """
    weights = [target.weight() for target in targets]
    masks = [
        prune.mask(weight, mean_square) if (prune := target.scheme.prune) else None
        for target, weight in zip(targets, weights, strict=True)
    ]
    return weights, masks, shared_parameters([target.scheme.format for target in targets], weights, masks)


def shared_parameters(
    formats: Sequence[Format], weights: Sequence[torch.Tensor], masks: Sequence[torch.Tensor | None]
) -> list[Params]:
    """`Format.shared` of each of `weights` that read one tensor, in common where equal formats have it so."""
    stay = [w if mask is None else w.masked_fill(~mask, 0) for w, mask in zip(weights, masks, strict=True)]
    found: dict[int, Params] = {}
    for format in dict.fromkeys(formats):
        members = [i for i, other in enumerate(formats) if other == format]
        found |= zip(members, format.shared_among([stay[i] for i in members]), strict=True)
    return [found[i] for i in range(len(formats))]


def _equal(targets: Sequence[Target], reached: bool) -> dict[tuple[Format, Solver], list[int]]:
    """Which targets have one format and one solver: plain rounding in a Hessian's place if no token came by."""
    found: dict[tuple[Format, Solver], list[int]] = {}
    for index, target in enumerate(targets):
        solver = target.scheme.solver
        if solver.uses_hessian and not reached:
            solver = Nearest()
        found.setdefault((target.scheme.format, solver), []).append(index)
    return found


def _solve(
    names: Sequence[str],
    weights: Sequence[torch.Tensor],
    format: Format,
    solver: Solver,
    hessian: torch.Tensor | None,
    shared: Sequence[Params],
    masks: Sequence[torch.Tensor | None],
) -> list[Solution]:
    """`Solver.solve_together`; a refusal names the linear that is refused."""
    try:
        return solver.solve_together(weights, format, hessian, shared=shared, masks=masks)
    except QbenchError as refused:
        for name, weight, own, mask in zip(names, weights, shared, masks, strict=True):
            try:
                solver.solve(weight, format, hessian, shared=own, mask=mask)
            except QbenchError as alone:
                raise QbenchError(f"{name}: {alone}") from alone
        raise QbenchError(f"{', '.join(names)}: {refused}") from refused
