"""Learned rounding of a block's linears, all together: gradients come from the block's own output.

The block runs on hidden states from blocks already compressed, and its output is compared with what the uncompressed
model has at that place, row by row of the calibration data. Every step takes a few rows, all rows before any comes
again, in an order drawn from the seed and the block's index. The offsets and ranges are kept under which the rows of a
step had the least error, as a share of the error that plain rounding makes on the same rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from qbench.compress.passes import Passes
from qbench.compress.skeleton import BlockCall
from qbench.errors import QbenchError
from qbench.scheme import Scheme
from qbench.solvers.base import Solution
from qbench.solvers.rounding import Rounding
from qbench.solvers.signround import NO_GAIN, Learned, SignRound

Row = tuple[int, int]  # batch, row in the batch
Progress = Callable[[str], None]  # is told what is being done


def learned(
    block: nn.Module,
    schemes: Mapping[str, Scheme],
    roundings: Mapping[SignRound, Mapping[str, Rounding]],
    passes: Passes,
    targets: list[torch.Tensor],
    index: int,
    progress: Progress,
) -> dict[str, Scheme]:
    """The schemes of the linears whose rounding is learned, their solvers replaced by what was found.

    `roundings` are theirs by settings and name. Linears under different settings are tuned one kind after the other,
    the first ones as tuned. Linears that no row of any step reached are left out.
    """
    found: dict[str, Scheme] = {}
    done: dict[str, torch.Tensor] = {}
    for solver, members in roundings.items():
        tuning = BlockTuning(block, passes, targets, members, done)
        gained = tuning.run(solver, solver.seed + index, progress)
        for name in sorted(tuning.reached):
            solution = Solution(members[name].quantized(), fallback=None if gained else NO_GAIN)
            done[f"{name}.weight"] = solution.quantized.dequantize()
            found[name] = replace(schemes[name], solver=Learned(solution))
    return found


class BlockTuning:
    """Tunes the roundings of `block`'s linears (name -> rounding) until its output is near `targets`.

    `passes` are the block's calls and hidden states; `targets` ``[rows, n, hidden]`` belong to them batch by batch.
    `done` are parameters (by name) that take the place of the block's own.
    """

    def __init__(
        self,
        block: nn.Module,
        passes: Passes,
        targets: list[torch.Tensor],
        roundings: Mapping[str, Rounding],
        done: Mapping[str, torch.Tensor],
    ) -> None:
        self.block, self.roundings = block, roundings
        self.reached: set[str] = set()
        self.hidden, self.targets = passes.hidden, targets
        self.calls = [BlockCall(_own(call.args), _own(call.kwargs)) for call in passes.calls]
        ours = {f"{name}.weight" for name in roundings}
        self.fixed: dict[str, torch.Tensor] = {
            name: _own(tensor)
            for tensors in (block.named_parameters(), block.named_buffers())
            for name, tensor in tensors
            if name not in ours
        } | dict(done)

    def run(self, solver: SignRound, seed: int, progress: Progress) -> bool:
        """Tunes; whether that lowered the error over all rows. If not, plain rounding is back."""
        rows = [(index, row) for index, batch in enumerate(self.hidden) for row in range(len(batch))]
        before = self._errors(rows)
        if not math.isfinite(sum(before.values())):
            raise QbenchError("its output is NaN or infinite on the calibration rows.")
        order = _shuffled(rows, min(solver.batch_rows, len(rows)), torch.Generator().manual_seed(seed))
        least = 1.0
        for iteration in range(solver.iters):
            chosen = next(order)
            weights = {name: rounding.decoded().requires_grad_() for name, rounding in self.roundings.items()}
            error = self._backward(chosen, weights)
            share = error / max(sum(before[row] for row in chosen), 1e-30)
            if share < least:
                least = share
                for rounding in self.roundings.values():
                    rounding.keep()
            for name, rounding in self.roundings.items():
                gradient = weights[name].grad
                if gradient is not None:
                    self.reached.add(name)
                    rounding.step(gradient, solver.lr_at(iteration))
            progress(f"step {iteration + 1} of {solver.iters}")
        for rounding in self.roundings.values():
            rounding.restore()
        if least < 1 and sum(self._errors(rows).values()) < sum(before.values()):
            return True
        for rounding in self.roundings.values():
            rounding.reset()
        return False

    def _backward(self, rows: list[Row], weights: Mapping[str, torch.Tensor]) -> float:
        """The squared error of `rows`; its gradients are added to `weights`."""
        total = 0.0
        with torch.enable_grad():
            for index in sorted({index for index, _ in rows}):
                error = self._error(index, [row for i, row in rows if i == index], weights).sum()
                error.backward()  # type: ignore[no-untyped-call]
                total += error.item()
        return total

    def _errors(self, rows: list[Row]) -> dict[Row, float]:
        """The squared error of each row under the present rounding."""
        weights = {name: rounding.decoded() for name, rounding in self.roundings.items()}
        found: dict[Row, float] = {}
        for index in range(len(self.hidden)):
            own = [row for i, row in rows if i == index]
            found.update(zip(((index, row) for row in own), self._error(index, own, weights).tolist(), strict=True))
        return found

    def _error(self, index: int, rows: list[int], weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The squared error ``[rows]`` of some rows of a batch."""
        chosen = torch.tensor(rows, device=self.hidden[index].device)
        call = self.calls[index].rows(chosen, len(self.hidden[index]))
        tensors = self.fixed | {f"{name}.weight": weight for name, weight in weights.items()}
        result = functional_call(self.block, tensors, (self.hidden[index][chosen], *call.args), call.kwargs)
        output: torch.Tensor = result[0] if isinstance(result, tuple) else result
        return (output - self.targets[index][chosen]).square().sum((1, 2))


def _shuffled(rows: list[Row], count: int, generator: torch.Generator) -> Iterator[list[Row]]:
    """`count` rows at a time, every row before any comes again; a rest too small is left out."""
    while True:
        order = torch.randperm(len(rows), generator=generator).tolist()
        for start in range(0, len(rows) - count + 1, count):
            yield [rows[i] for i in order[start : start + count]]


def _own(value: Any) -> Any:
    """`value` with its tensors copied, so that those made in inference mode can take part in a backward pass."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, tuple):
        return tuple(map(_own, value))
    if isinstance(value, dict):
        return {key: _own(each) for key, each in value.items()}
    return value
