"""The record of a run: `results.jsonl`, one measured number a line, each with where it came from.

Provenance keys (all optional but `engine` and `dtype` for what was measured by running a model):

=================  =====================================================================================
recipe_hash        SHA-256 of the recipe that asked for the number
model              the source as the user named it;  model_revision: its commit or file hash
off_grid           True: a dequantized source whose channels were permuted off its storage grid
data, data_hash    the text and its SHA-256;  window: ``{seq_len, stride, bos}`` (`evaluate.windows`)
workload           ``{num_requests, prompt_tokens, output_tokens}`` of a latency measurement
prefix_cache       True or False, whether prompts could reuse cached blocks
kv_cache            how keys and values were kept: a KV-cache format's name, or the dtype of floats
seed, dtype, device, kernel, engine, engine_version
=================  =====================================================================================
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, get_origin, get_type_hints

from qbench.errors import QbenchError
from qbench.registry import nearest
from qbench.resources import written_whole


class Metric(NamedTuple):
    """What a metric is: its unit, its family (which provenance must agree to compare it), and its meaning."""

    unit: str
    family: str  # a key of CONDITIONS
    text: str


METRICS = {
    "perplexity": Metric("", "quality", "exp of the mean negative log-likelihood a scored token; lower is better"),
    "nll": Metric("nats", "quality", "mean over scored tokens; detail: statistic standard_error, or window"),
    "kl_mean": Metric("nats", "quality", "mean KL(reference || variant) a position; detail: confidence bucket"),
    "kl_median": Metric("nats", "quality", "median of the same"),
    "kl_p99": Metric("nats", "quality", "99th percentile of the same"),
    "kl_max": Metric("nats", "quality", "largest of the same"),
    "scored_tokens": Metric("tokens", "quality", "positions behind the numbers; detail: confidence bucket"),
    "top1_agreement": Metric("fraction", "quality", "positions where both put the same token first"),
    "bits_per_weight": Metric("bits", "size", "stored bits of compressed linears, scales included, over weights"),
    "sparsity": Metric("fraction", "size", "weights of pruned linears that decode to 0, over all of them"),
    "weight_bytes": Metric("bytes", "size", "all weights as the runtime holds them"),
    "disk_bytes": Metric("bytes", "size", "the variant's own folder"),
    "peak_memory_bytes": Metric("bytes", "speed", "detail: where (process, accelerator)"),
    "kv_cache_bytes": Metric("bytes", "speed", "the key-value cache pool"),
    "kv_token_bytes": Metric("bytes", "size", "keys and values of one token in all layers, scales included"),
    "ttft_s": Metric("s", "speed", "submission to first token; detail: concurrency, percentile"),
    "itl_s": Metric("s", "speed", "every gap between tokens; detail: concurrency, percentile"),
    "tpot_s": Metric("s", "speed", "(last - first) / (tokens - 1) a request; detail: concurrency, percentile"),
    "output_tokens_per_s": Metric("tokens/s", "speed", "all requests together; detail: concurrency"),
    "requests_per_s": Metric("requests/s", "speed", "detail: concurrency"),
    "wall_s": Metric("s", "speed", "first submission to last token; detail: concurrency"),
    "layer_error": Metric("ratio", "process", "||x W' - x W|| / ||x W|| over calibration; detail: layer, module"),
    "compress_seconds": Metric("s", "process", "detail: stage when split"),
    "compress_peak_bytes": Metric("bytes", "process", "largest memory of another library's process, imports included"),
    "export_bytes": Metric("bytes", "size", "detail: layout"),
    "export_max_abs_difference": Metric(
        "", "process", "weights read back against ours; detail: layout, what (all, quantized)"
    ),
    "calibration_tokens": Metric("tokens", "process", "tokens that statistics were taken from"),
    "expert_tokens": Metric("tokens", "process", "calibration tokens that reached an expert; detail: layer, module"),
    "solver_fallbacks": Metric("layers", "process", "layers that were not solved as asked; detail: reason"),
    "transforms_skipped": Metric("layers", "process", "layers whose inputs a transform did not scale; detail: reason"),
    "solver_damping": Metric("fraction", "process", "largest damping a layer needed; detail: module"),
}

CONDITIONS = {  # provenance that must agree before rows of a family are ranked together
    "quality": ("window", "data_hash", "dtype", "device", "engine", "off_grid"),
    "speed": ("workload", "dtype", "device", "engine", "prefix_cache"),
    "size": (),
    "process": (),
}


@dataclass(frozen=True)
class Result:
    """One row. Raises `QbenchError` on a metric that is not in `METRICS` or a value that is not finite."""

    variant: str
    metric: str
    value: float
    unit: str
    detail: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise QbenchError(
                f"Unknown metric {self.metric!r} of variant {self.variant!r}. {nearest(self.metric, METRICS)}"
            )
        if not math.isfinite(self.value):
            where = f" {self.detail}" if self.detail else ""
            raise QbenchError(f"{self.metric}{where} of variant {self.variant!r} is {self.value}: not a finite number.")

    @property
    def key(self) -> tuple[str, str, str]:
        """What the row measures: variant, metric and detail (as canonical JSON)."""
        return self.variant, self.metric, json.dumps(self.detail, sort_keys=True)


def make_results(
    variant: str, measured: Iterable[tuple[str, float, dict[str, Any]]], provenance: dict[str, Any]
) -> list[Result]:
    """Rows of one variant from (metric, value, detail) triples; units come from `METRICS`."""
    return [
        Result(variant, metric, float(value), METRICS[metric].unit, detail, provenance)
        for metric, value, detail in measured
    ]


def write_results(path: Path, rows: Iterable[Result]) -> None:
    """Writes a results file, whole or not at all; an earlier one is replaced."""
    with written_whole(path) as temporary:
        lines = (json.dumps(asdict(row), allow_nan=False) + "\n" for row in rows)
        temporary.write_text("".join(lines), encoding="utf-8")


def read_results(path: Path) -> list[Result]:
    """The rows of a results file in order.

    Raises `QbenchError` naming the line when the file is missing, a line is not a row, or two rows measure the same.
    """
    if not path.is_file():
        raise QbenchError(f"No results file {path}. Give the folder of a run (`qbench run` prints it).")
    rows: dict[tuple[str, str, str], Result] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = result_from_dict(json.loads(line))
        except (ValueError, RecursionError, QbenchError) as error:
            raise QbenchError(f"{path}, line {number}: not a result row ({error}).") from error
        if row.key in rows:
            raise QbenchError(f"{path}, line {number}: a second value of {row.metric} {row.detail} of {row.variant}.")
        rows[row.key] = row
    return list(rows.values())


def result_from_dict(content: Any) -> Result:
    """The row that `asdict` made `content` of. Raises `QbenchError` when a field is missing, unknown or mistyped."""
    kinds = get_type_hints(Result)
    if not isinstance(content, dict) or not set(content) <= set(kinds):
        raise QbenchError(f"expected an object with the keys {', '.join(kinds)}")
    for key, kind in kinds.items():
        expected = (int, float) if kind is float else get_origin(kind) or kind
        if not isinstance(content.get(key, {}), expected) or isinstance(content.get(key), bool):
            raise QbenchError(f"{key} is {content.get(key)!r}, expected {getattr(kind, '__name__', kind)}")
    return Result(**content)


class Compared(NamedTuple):
    """A row and the provenance keys in which it differs from most rows of the same metric and detail."""

    result: Result
    differs: tuple[str, ...]


def comparable(rows: Sequence[Result]) -> list[Compared]:
    """Marks each row, in the order given. Only rows with an empty `differs` may be ranked together.

    Like is compared with like: within rows of one metric and detail, the commonest `CONDITIONS` (the earliest of
    equally common ones) are the standard and every other row is marked with the keys it differs in.
    """
    groups: dict[tuple[str, str], Counter[tuple[str, ...]]] = {}
    for row in rows:
        groups.setdefault(row.key[1:], Counter())[_conditions(row)] += 1
    marked = []
    for row in rows:
        standard = groups[row.key[1:]].most_common(1)[0][0]
        keys = CONDITIONS[METRICS[row.metric].family]
        found = _conditions(row)
        marked.append(Compared(row, tuple(k for k, a, b in zip(keys, found, standard, strict=True) if a != b)))
    return marked


def _conditions(row: Result) -> tuple[str, ...]:
    keys = CONDITIONS[METRICS[row.metric].family]
    return tuple(json.dumps(row.provenance.get(key), sort_keys=True) for key in keys)
