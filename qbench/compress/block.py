"""One decoder block while it is compressed: transforms on the block as a whole, then its linears one by one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from qbench.calibration.hessian import InputStatistics
from qbench.compress.activations import BORROWED, Activations
from qbench.compress.held import HeldPasses
from qbench.compress.learned import Progress, learned
from qbench.compress.passes import Passes
from qbench.compress.skeleton import BlockCall, Skeleton
from qbench.compress.smoothing import Smoothed, Smoother
from qbench.compress.solve import LayerReport, Target, prepared, solve
from qbench.compress.trace import Trace, trace, with_siblings
from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.scheme import Scheme
from qbench.solvers.rounding import Rounding
from qbench.solvers.signround import SignRound


class BlockCompression:
    """The block at `index` with the weights of `block`, and how it is called for each batch."""

    def __init__(
        self, skeleton: Skeleton, index: int, block: nn.Module, calls: list[BlockCall], schemes: Mapping[str, Scheme]
    ) -> None:
        self.skeleton, self.index, self.block, self.calls = skeleton, index, block, calls
        self.prefix = skeleton.block_name(index)
        self.linears: dict[str, nn.Linear] = {}
        self.schemes: dict[str, Scheme] = {}
        for name, scheme in schemes.items():
            if name.startswith(self.prefix + "."):
                local = name[len(self.prefix) + 1 :]
                self.schemes[local] = scheme
                self.linears[local] = skeleton.linear(name)
                if not bool(torch.isfinite(self.linears[local].weight).all()):
                    raise QbenchError(f"{name}: its weight holds NaN or infinite values.")
        wanted = {name: scheme.activation for name, scheme in self.schemes.items() if scheme.activation is not None}
        self.activations = Activations(self.prefix, wanted)
        self.held: HeldPasses | None = None

    def compress(
        self, hidden: list[torch.Tensor], targets: list[torch.Tensor], progress: Progress
    ) -> tuple[dict[str, torch.Tensor | QuantizedTensor], list[LayerReport]]:
        """Solves every linear, leaving its decoded weight in the block; all of the block's tensors to store.

        `targets` are what the uncompressed model has behind this block, for solvers that are `blockwise`.
        """
        passes = Passes(self.skeleton, self.block, hidden, self.calls)
        traced = trace(self.block, lambda: passes.first(1)[1]) if self.linears else Trace()
        smoothed = Smoother(self.block, self.prefix, self.schemes, passes).apply(traced)
        groups = self._groups(traced)
        if any(scheme.solver.blockwise for scheme in self.schemes.values()):
            self._learn(groups, passes, targets, smoothed, progress)
        try:
            quantized, reports = self._solve(groups, passes, smoothed)
        except BaseException:
            self.drop_passes()
            raise
        stored: dict[str, torch.Tensor | QuantizedTensor] = {}
        for name, _ in self.block.named_parameters():
            stored[f"{self.prefix}.{name}"] = quantized[name] if name in quantized else self._dense(name, smoothed)
        return stored, reports

    def _solve(
        self, groups: list[list[str]], passes: Passes, smoothed: Smoothed
    ) -> tuple[dict[str, QuantizedTensor], list[LayerReport]]:
        """Solves group after group; each on what it is given by the ones before where statistics decide its codes."""
        quantized: dict[str, QuantizedTensor] = {}
        reports = []
        leaders = [self.linears[group[0]] for group in groups]
        sequential = any(scheme.sequential for scheme in self.schemes.values())
        if sequential and HeldPasses.fit(passes, leaders):
            self.held = HeldPasses(passes, leaders)
        source = self.held or passes
        for stage in [[group] for group in groups] if sequential else [groups]:
            leaders = [self.linears[group[0]] for group in stage]
            collected = [InputStatistics(leader.in_features, self.skeleton.device) for leader in leaders]
            source.collect(list(zip(leaders, collected, strict=True)))
            for group, statistics in zip(stage, collected, strict=True):
                solved = solve([self._target(name, smoothed) for name in group], self.index, statistics)
                for name, (report, result) in zip(group, solved, strict=True):
                    quantized[f"{name}.weight"] = result
                    reports.append(report)
                    largest = statistics.max_abs if statistics.tokens else None
                    self.activations.start(name, self.linears[name], largest)
        for name in self.activations.wanted:
            quantized[f"{name}.weight"] = self.activations.stored(name, quantized[f"{name}.weight"])
        return quantized, [self._with_activation(report, quantized) for report in reports]

    def _learn(
        self,
        groups: list[list[str]],
        passes: Passes,
        targets: list[torch.Tensor],
        smoothed: Smoothed,
        progress: Progress,
    ) -> None:
        """Gives the linears whose solver is `blockwise` their codes, learned with inputs rounded as they will be."""
        seen = self._seen(groups, passes)
        roundings: dict[SignRound, dict[str, Rounding]] = {}
        with torch.inference_mode(False):
            for group, (mean_square, largest) in zip(groups, seen, strict=True):
                ready = prepared([self._target(name, smoothed) for name in group], mean_square)
                for name, weight, mask, shared in zip(group, *ready, strict=True):
                    self.activations.start(name, self.linears[name], largest)
                    solver, format = self.schemes[name].solver, self.schemes[name].format
                    if isinstance(solver, SignRound):
                        try:
                            rounding = solver.rounding(weight, format, shared, mask)
                            rounding.decoded()  # refuses what the format cannot hold while its name is known
                            roundings.setdefault(solver, {})[name] = rounding
                        except QbenchError as refused:
                            raise QbenchError(f"{self.prefix}.{name}: {refused}") from refused
            try:
                found = learned(self.block, self.schemes, roundings, passes, targets, self.index, progress)
            except QbenchError as refused:
                raise QbenchError(f"{self.prefix}: {refused}") from refused
        self.activations.end()
        self.schemes |= found

    def _seen(self, groups: list[list[str]], passes: Passes) -> list[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Each group's input as far as pruning or rounding inputs needs it: mean square ``[in]`` and largest value."""
        if all(scheme.prune is None and scheme.activation is None for scheme in self.schemes.values()):
            return [(None, None)] * len(groups)
        leaders = [self.linears[group[0]] for group in groups]
        collected = [InputStatistics(leader.in_features, self.skeleton.device) for leader in leaders]
        passes.collect(list(zip(leaders, collected, strict=True)))
        return [
            (statistics.hessian(f"{self.prefix}.{group[0]}").diagonal(), statistics.max_abs)
            if statistics.tokens
            else (None, None)
            for group, statistics in zip(groups, collected, strict=True)
        ]

    def forward_in_place(self, hidden: list[torch.Tensor]) -> None:
        """Replaces each batch of hidden states by this block's output."""
        found = [] if self.held is None else self.held.outputs()
        self.held = None
        for i, call in enumerate(self.calls):
            hidden[i] = found[i] if found else self.skeleton.run_block(self.block, hidden[i], call)
            if not bool(torch.isfinite(hidden[i]).all()):
                raise QbenchError(f"{self.prefix}: its output is NaN or infinite on the calibration rows.")
        self.activations.end()

    def drop_passes(self) -> None:
        """Ends the passes that were held, so that `forward_in_place` starts from the block's input."""
        if self.held is not None:
            self.held.close()
            self.held = None

    def _with_activation(self, report: LayerReport, quantized: Mapping[str, QuantizedTensor]) -> LayerReport:
        """`report` with what `activations` added to the layer."""
        stored = quantized[f"{report.module[len(self.prefix) + 1 :]}.weight"]
        if stored.activation is None:
            return report
        activation, bits = stored.activation.to_dict(), stored.bits_per_weight
        fallback = report.fallback
        if report.module[len(self.prefix) + 1 :] in self.activations.borrowed:
            fallback = "; ".join([*([fallback] if fallback else []), BORROWED])
        return replace(report, activation=activation, bits_per_weight=bits, fallback=fallback)

    def _target(self, name: str, smoothed: Smoothed) -> Target:
        limits, detail = smoothed.limits.get(name), smoothed.detail.get(name)
        return Target(f"{self.prefix}.{name}", self.linears[name], self.schemes[name], limits, detail)

    def _groups(self, traced: Trace) -> list[list[str]]:
        """The compressed linears in execution order, those that read one tensor together.

        An expert that no traced token reached has the groups of the reached ones, and its place among them.
        """
        every = with_siblings([reading.readers for reading in traced.readings], self.linears)
        groups = [group for names in every if (group := [name for name in names if name in self.linears])]
        reached = {name for group in groups for name in group}
        return groups + [[name] for name in self.linears if name not in reached]

    def _dense(self, name: str, smoothed: Smoothed) -> torch.Tensor:
        """A parameter as it is stored: the source's own, or float32 vectors and matrices of its dtype if changed."""
        tensor = self.skeleton.source.load_dense(f"{self.prefix}.{name}")
        if name not in smoothed.changed:
            return tensor
        changed = self.block.get_parameter(name).data
        return changed if changed.ndim == 1 else changed.to(tensor.dtype)
