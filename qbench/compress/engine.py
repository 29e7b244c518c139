"""Compression block by block: stream a block in, collect statistics, solve its linears, save it, move on.

In memory at any time: one block's weights, its statistics, and the hidden states of the calibration rows at that
block, beside them those of the uncompressed model where a solver compares with it. The hidden states come from the
blocks before as already quantized, and within a block a linear's statistics are taken after the linears before it were
quantized (true sequential), because that is what it will see when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from qbench.calibration.batches import token_batches
from qbench.calibration.hessian import InputStatistics
from qbench.compress.activations import Activations
from qbench.compress.block import BlockCompression
from qbench.compress.kv_cache import round_keys_and_values
from qbench.compress.passes import Passes
from qbench.compress.progress_state import ProgressState
from qbench.compress.skeleton import Skeleton
from qbench.compress.solve import LayerReport, Target, solve
from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.formats.kv_cache import KVCache, KVFormat
from qbench.models.compressed import CompressedModel, CompressedWriter
from qbench.models.source import ModelSource
from qbench.progress import Task, progress_bar
from qbench.scheme import Scheme

ERROR_TOKENS = 2048  # tokens the error is measured on when no solver asks for statistics


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
    kv_cache: KVFormat | None = None,
    device: torch.device | None = None,
    label: str = "compress",
) -> Compression:
    """Compresses `source` by `schemes` (module name -> scheme) over calibration `rows` into `folder`.

    `kv_cache` is how the model will keep keys and values: from each block on, the blocks after it feel them rounded.
    Work in progress lies beside it in ``FOLDER.part`` and is taken up again by a later call with the same `key`, which
    must change whenever source, schemes, `kv_cache` or rows do. The files are the same bytes whether or not a run was
    interrupted.
    Raises `QbenchError` naming the layer when an activation is not finite or a scheme names what is not a linear.
    """
    device = device or torch.device("cpu")
    skeleton = Skeleton(source, device)
    depth = len(skeleton.blocks)
    calibrated = kv_cache is not None and kv_cache.calibrated
    if not calibrated and not any(_uses_every_row(scheme) for scheme in schemes.values()):
        rows = _first_tokens(rows, ERROR_TOKENS)
    batches = token_batches(rows)
    state = ProgressState(folder.with_name(folder.name + ".part"), key)
    writer = CompressedWriter(state.folder, depth + 1)
    reports = [LayerReport(**report) for report in state.reports]
    hidden, calls = skeleton.embed(batches)
    blockwise = any(scheme.solver.blockwise for scheme in schemes.values())
    floating = list(hidden) if blockwise else []  # the uncompressed model's hidden states
    if state.blocks_done:
        loaded = [tensor.to(device) for tensor in state.load_hidden()]
        hidden, floating = loaded[: len(batches)], loaded[len(batches) :]
    with progress_bar(label, depth) as bar:
        bar.advance(state.blocks_done)
        for index in range(state.blocks_done, depth):
            block_calls = [batch[index] for batch in calls]
            with skeleton.filled(skeleton.block_name(index)) as block:
                worker = BlockCompression(skeleton, index, block, block_calls, schemes)
                if floating:
                    worker.forward_in_place(floating)
                progress = partial(_describe, bar, f"{label}: block {index + 1}")
                tensors, layers = worker.compress(hidden, floating, progress)
                bar.describe(label)
                if kv_cache is not None:
                    worker.drop_passes()
                    passes = Passes(skeleton, block, hidden, block_calls)
                    scales = round_keys_and_values(passes, skeleton.block_name(index), kv_cache)
                    state.kv_scales += [scales] if scales is not None else []
                worker.forward_in_place(hidden)
            writer.write_shard(index, tensors)
            reports += layers
            state.save(index + 1, hidden + floating, [asdict(report) for report in reports])
            bar.advance()
    outside, layers = _outside_blocks(skeleton, schemes, batches, hidden)
    writer.write_shard(depth, outside)
    config = dict(source.config)
    if "lm_head" in schemes:
        config["tie_word_embeddings"] = False
    writer.finish(source, config, KVCache(kv_cache, tuple(state.kv_scales)) if kv_cache is not None else None)
    model = CompressedModel(state.finish(folder))
    return Compression(model, reports + layers)


def _outside_blocks(
    skeleton: Skeleton, schemes: Mapping[str, Scheme], batches: list[torch.Tensor], hidden: list[torch.Tensor]
) -> tuple[dict[str, torch.Tensor | QuantizedTensor], list[LayerReport]]:
    """Embedding, norms and head: as they are, but for what a scheme names. A quantized tied head is untied."""
    source = skeleton.source
    blocks = skeleton.block_prefix + "."
    tensors: dict[str, torch.Tensor | QuantizedTensor] = {
        name: source.load_dense(name) for name in source.tensors if not name.startswith(blocks)
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
        report, quantized = solve([Target(name, linear, scheme)], None, statistics)[0]
        if scheme.activation is not None:
            activations = Activations("", {name: scheme.activation})
            activations.largest[name] = statistics.max_abs
            quantized = activations.stored(name, quantized)
            report = replace(report, activation=scheme.activation.to_dict(), bits_per_weight=quantized.bits_per_weight)
        tensors["lm_head.weight"] = quantized
        reports.append(report)
    return tensors, reports


def _embedding(skeleton: Skeleton) -> nn.Module:
    module: nn.Module = skeleton.model.get_input_embeddings()
    return module


def _describe(bar: Task, start: str, text: str) -> None:
    bar.describe(f"{start}, {text}")


def _uses_every_row(scheme: Scheme) -> bool:
    """Whether calibration decides anything of the result, or is only what errors are measured on."""
    static = scheme.activation is not None and scheme.activation.static
    return scheme.uses_statistics or scheme.transform is not None or static


def _first_tokens(rows: Sequence[Sequence[int]], tokens: int) -> list[Sequence[int]]:
    kept, count = [], 0
    for row in rows:
        if count >= tokens:
            break
        kept.append(row)
        count += len(row)
    return kept
