"""Compression block by block: stream a block in, collect statistics, solve its linears, save it, move on.

In memory at any time: one block's weights, its statistics, and the hidden states of the calibration rows at that
block. The hidden states come from the blocks before as already quantized, and within a block a linear's statistics are
taken after the linears before it were quantized (true sequential), because that is what it will see when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qbench.calibration.hessian import InputStatistics, relative_output_error
from qbench.compress.progress_state import ProgressState
from qbench.compress.skeleton import BlockCall, PassEnded, Skeleton
from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.models.compressed import CompressedModel, CompressedWriter
from qbench.models.source import ModelSource
from qbench.progress import progress_bar
from qbench.scheme import Scheme
from qbench.solvers.nearest import Nearest

BATCH_TOKENS = 4096  # calibration tokens a forward pass takes at once
ERROR_TOKENS = 2048  # tokens the error is measured on when no solver asks for statistics


@dataclass(frozen=True)
class LayerReport:
    """How one linear was compressed."""

    module: str
    block: int | None  # index of its decoder block; None outside the blocks
    format: dict[str, Any]
    solver: str
    bits_per_weight: float
    relative_error: float | None  # ||X(W-Q)^T|| / ||XW^T|| on the calibration tokens; None where no token came by
    tokens: int
    damping: float | None
    dead_columns: int
    fallback: str | None


@dataclass(frozen=True)
class Compression:
    """A finished compression."""

    model: CompressedModel
    layers: list[LayerReport]


@torch.inference_mode()
def compress(
    source: ModelSource,
    schemes: Mapping[str, Scheme],
    rows: Sequence[Sequence[int]],
    folder: Path,
    *,
    key: str,
    device: torch.device | None = None,
    label: str = "compress",
) -> Compression:
    """Compresses `source` by `schemes` (module name -> scheme) over calibration `rows` into `folder`.

    Work in progress lies beside it in ``FOLDER.part`` and is taken up again by a later call with the same `key`, which
    must change whenever source, schemes or rows do. The files are the same bytes whether or not a run was interrupted.
    Raises `QbenchError` naming the layer when an activation is not finite or a scheme names what is not a linear.
    """
    device = device or torch.device("cpu")
    skeleton = Skeleton(source, device)
    depth = len(skeleton.blocks)
    if not any(scheme.solver.uses_hessian for scheme in schemes.values()):
        rows = _first_tokens(rows, ERROR_TOKENS)
    batches = _batches(rows)
    state = ProgressState(folder.with_name(folder.name + ".part"), key)
    writer = CompressedWriter(state.folder, depth + 1)
    reports = [LayerReport(**report) for report in state.reports]
    hidden, calls = skeleton.embed(batches)
    if state.blocks_done:
        hidden = [tensor.to(device) for tensor in state.load_hidden()]
    with progress_bar(label, depth) as bar:
        bar.advance(state.blocks_done)
        for index in range(state.blocks_done, depth):
            block_calls = [batch[index] for batch in calls]
            with skeleton.filled(skeleton.block_name(index)) as block:
                worker = _Block(skeleton, index, block, block_calls, schemes)
                tensors, layers = worker.compress(hidden)
                worker.forward_in_place(hidden)
            writer.write_shard(index, tensors)
            reports += layers
            state.save(index + 1, hidden, [asdict(report) for report in reports])
            bar.advance()
    outside, layers = _outside_blocks(skeleton, schemes, batches, hidden)
    writer.write_shard(depth, outside)
    config = dict(source.config)
    if "lm_head" in schemes:
        config["tie_word_embeddings"] = False
    writer.finish(source, config)
    model = CompressedModel(state.finish(folder))
    return Compression(model, reports + layers)


class _Block:
    """One decoder block while its linears are solved."""

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
                self.linears[local] = _linear(block, local, name)

    def compress(
        self, hidden: list[torch.Tensor]
    ) -> tuple[dict[str, torch.Tensor | QuantizedTensor], list[LayerReport]]:
        """Solves every linear, leaving its decoded weight in the block; all of the block's tensors to store."""
        quantized: dict[str, QuantizedTensor] = {}
        reports = []
        groups = self._groups(hidden[0]) if self.linears else []
        sequential = any(scheme.solver.uses_hessian for scheme in self.schemes.values())
        for stage in [[group] for group in groups] if sequential else [groups]:
            collected = self._collect(stage, hidden)
            for group, statistics in zip(stage, collected, strict=True):
                for name in group:
                    full = f"{self.prefix}.{name}"
                    report, result = _solve(full, self.index, self.linears[name], self.schemes[name], statistics)
                    quantized[f"{full}.weight"] = result
                    reports.append(report)
        stored = self.skeleton.source
        dense = (f"{self.prefix}.{name}" for name, _ in self.block.named_parameters())
        return {**{name: _plain(stored, name) for name in dense if name not in quantized}, **quantized}, reports

    def forward_in_place(self, hidden: list[torch.Tensor]) -> None:
        """Replaces each batch of hidden states by this block's output."""
        for i, call in enumerate(self.calls):
            hidden[i] = self.skeleton.run_block(self.block, hidden[i], call)
            if not bool(torch.isfinite(hidden[i]).all()):
                raise QbenchError(f"{self.prefix}: its output is NaN or infinite on the calibration rows.")

    def _groups(self, hidden: torch.Tensor) -> list[list[str]]:
        """The linears in execution order, those that are given the same tensor together; unreached ones alone."""
        groups: list[tuple[torch.Tensor | None, list[str]]] = []
        hooks = []

        def note(name: str, value: torch.Tensor) -> None:
            if groups and groups[-1][0] is value:
                groups[-1][1].append(name)
            else:
                groups.append((value, [name]))

        for name, linear in self.linears.items():
            hooks.append(linear.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0])))
        self.skeleton.run_block(self.block, hidden, self.calls[0])
        for hook in hooks:
            hook.remove()
        reached = {name for _, names in groups for name in names}
        return [names for _, names in groups] + [[name] for name in self.linears if name not in reached]

    def _collect(self, stage: list[list[str]], hidden: list[torch.Tensor]) -> list[InputStatistics]:
        """The input statistics of each group of a stage, from one pass that stops when the last one was seen."""
        leaders = [self.linears[group[0]] for group in stage]
        collected = [InputStatistics(leader.in_features, self.skeleton.device) for leader in leaders]
        hooks = []
        for leader, statistics in zip(leaders, collected, strict=True):
            last = leader is leaders[-1]

            def note(_: nn.Module, args: Any, statistics: InputStatistics = statistics, last: bool = last) -> None:
                statistics.add(args[0])
                if last:
                    raise PassEnded

            hooks.append(leader.register_forward_pre_hook(note))
        for batch, call in zip(hidden, self.calls, strict=True):
            try:
                self.skeleton.run_block(self.block, batch, call)
            except PassEnded:
                pass
        for hook in hooks:
            hook.remove()
        return collected


def _solve(
    name: str, block: int | None, linear: nn.Linear, scheme: Scheme, statistics: InputStatistics
) -> tuple[LayerReport, QuantizedTensor]:
    """Solves one linear and puts the decoded weight in its place."""
    weight = linear.weight.data
    if not bool(torch.isfinite(weight).all()):
        raise QbenchError(f"{name}: its weight holds NaN or infinite values.")
    hessian = statistics.hessian(name)
    solver, fallback = scheme.solver, None
    if solver.uses_hessian and statistics.tokens == 0:
        solver, fallback = Nearest(), "no calibration token reached it"
    solution = solver.solve(weight, scheme.format, hessian if solver.uses_hessian else None)
    decoded = solution.quantized.dequantize()
    error = relative_output_error(weight, decoded, hessian) if statistics.tokens else None
    linear.weight.data = decoded
    report = LayerReport(
        module=name,
        block=block,
        format=scheme.format.to_dict(),
        solver=scheme.solver.name,
        bits_per_weight=solution.quantized.bits_per_weight,
        relative_error=error,
        tokens=statistics.tokens,
        damping=solution.damping,
        dead_columns=solution.dead_columns,
        fallback=solution.fallback or fallback,
    )
    return report, solution.quantized


def _outside_blocks(
    skeleton: Skeleton, schemes: Mapping[str, Scheme], batches: list[torch.Tensor], hidden: list[torch.Tensor]
) -> tuple[dict[str, torch.Tensor | QuantizedTensor], list[LayerReport]]:
    """Embedding, norms and head: as they are, but for what a scheme names. A quantized tied head is untied."""
    source = skeleton.source
    blocks = skeleton.block_prefix + "."
    tensors: dict[str, torch.Tensor | QuantizedTensor] = {
        name: _plain(source, name) for name in source.tensors if not name.startswith(blocks)
    }
    reports = []
    for name, scheme in schemes.items():
        if name.startswith(blocks):
            continue
        if name != "lm_head":
            raise QbenchError(f"{name}: outside the decoder blocks only lm_head can be compressed.")
        head = skeleton.model.get_output_embeddings()
        tied = "lm_head.weight" not in source.tensors
        embedding = next(n for n, module in skeleton.model.named_modules() if module is _embedding(skeleton))
        weight = skeleton.load(f"{embedding}.weight" if tied else "lm_head.weight")
        statistics = InputStatistics(weight.shape[1], skeleton.device)
        for inputs in skeleton.head_inputs(batches, hidden):
            statistics.add(inputs)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=head.bias is not None, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        report, tensors["lm_head.weight"] = _solve(name, None, linear, scheme, statistics)
        reports.append(report)
    return tensors, reports


def _embedding(skeleton: Skeleton) -> nn.Module:
    module: nn.Module = skeleton.model.get_input_embeddings()
    return module


def _plain(source: ModelSource, name: str) -> torch.Tensor:
    tensor = source.load(name)
    return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def _linear(block: nn.Module, local: str, name: str) -> nn.Linear:
    try:
        module = block.get_submodule(local)
    except AttributeError:
        raise QbenchError(f"{name}: the model's code has no such module.") from None
    if not isinstance(module, nn.Linear):
        raise QbenchError(f"{name}: a {type(module).__name__}, not a linear layer; it cannot be compressed.")
    return module


def _first_tokens(rows: Sequence[Sequence[int]], tokens: int) -> list[Sequence[int]]:
    kept, count = [], 0
    for row in rows:
        if count >= tokens:
            break
        kept.append(row)
        count += len(row)
    return kept


def _batches(rows: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Token ids ``[rows, n]``: neighbouring rows of equal length together, so that nothing is ever padded."""
    batches: list[list[Sequence[int]]] = []
    for row in rows:
        last = batches[-1] if batches else None
        if last and len(last[0]) == len(row) and (len(last) + 1) * len(row) <= BATCH_TOKENS:
            last.append(row)
        else:
            batches.append([row])
    return [torch.tensor(batch, dtype=torch.long) for batch in batches]
