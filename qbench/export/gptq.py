"""The GPTQ layout: a Hugging Face folder whose linears are ``qweight``, ``qzeros``, ``scales`` and ``g_idx``.

Read by transformers (with gptqmodel), gptqmodel and vLLM. What is stored differently from the model it was made from:

- scales are float16; a float32 scale is rounded.
- uncompressed tensors keep their dtype, but float32 matrices become float16, the dtype these engines compute in;
  float32 vectors (norms, biases) are kept bit for bit.
- one scale for a whole tensor is stored as the same scale in every row.

Zero points follow v1 (``checkpoint_format: gptq``), unless one of them is 0, which v1 cannot hold: then all follow v2.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.errors import QbenchError
from qbench.export.gptq_config import IN_BLOCK, ModuleConfig, module_config, quantization_config, refusal, refuse
from qbench.export.gptq_pack import V1, V2, pack_codes, pack_zeros
from qbench.export.gptq_source import GPTQSource
from qbench.export.layouts import Readback, tracked, verify
from qbench.export.report import ExportReport
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer
from qbench.lazy import lazy_import
from qbench.models.source import ModelSource
from qbench.scheme import Scheme

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


def check(schemes: Mapping[str, Scheme], shapes: Mapping[str, tuple[int, int]], config: Mapping[str, Any]) -> None:
    """Raises `QbenchError` naming every module (keys of `schemes`) whose format this layout cannot store.

    `shapes` gives each module's ``[out, in]``; nothing is loaded.
    """
    refuse(refusal(module, scheme.format, shapes[module]) for module, scheme in schemes.items())


def read(location: str) -> GPTQSource:
    """Opens a GPTQ folder, whoever made it. Headers are checked at once."""
    return GPTQSource(location)


def write(source: ModelSource, folder: Path) -> ExportReport:
    """Writes `source` to `folder`, reads it back and compares. An earlier export there is replaced when all is well.

    Raises `QbenchError` when the layout cannot store a tensor, or the folder holds something else.
    """
    from qbench.export.shards import folder_written_whole, write_shards

    modules, has_zero = _survey(source)
    checkpoint_format = V2 if has_zero else V1
    linears = [name.removesuffix(".weight") for name in source.tensors if _is_matrix(source, name)]
    dense = [name for name in linears if name not in modules and IN_BLOCK.fullmatch(name)]
    types: Counter[str] = Counter()
    with folder_written_whole(folder) as part:
        weights = write_shards(part, _tensors(source, modules, checkpoint_format, types))
        quantization = quantization_config(modules, dense, checkpoint_format)
        _write_config(part, source, quantization, types)
        source.write_side_files(part)
        readback = verify(source, read(str(part)))
        weight_bytes = sum(path.stat().st_size for path in weights if path.suffix == ".safetensors")
        names = sorted(path.relative_to(part) for path in part.rglob("*") if path.is_file())
    files = [folder / name for name in names]
    return ExportReport(
        layout="gptq",
        files=files,
        nbytes=sum(path.stat().st_size for path in files),
        tensor_types=dict(types),
        bits_per_weight=8 * weight_bytes / sum(math.prod(info.shape) for info in source.tensors.values()),
        max_abs_difference=readback.max_abs_difference,
        worst_tensor=readback.worst_tensor,
        quantized_max_abs_difference=readback.quantized_difference,
        notes=_notes(dense, readback),
        warnings=_warnings(quantization),
    )


def _survey(source: ModelSource) -> tuple[dict[str, ModuleConfig], bool]:
    """Every quantized module's configuration, and whether any zero point is 0. Refuses what cannot be stored."""
    modules: dict[str, ModuleConfig] = {}
    has_zero = False
    problems = []
    for name in source.tensors:
        if not _is_matrix(source, name):
            continue
        tensor = source.load(name)
        if not isinstance(tensor, QuantizedTensor):
            continue
        module = name.removesuffix(".weight")
        problem = refusal(module, tensor.format, tensor.shape)
        problems.append(problem)
        if problem is None:
            assert isinstance(tensor.format, Integer)
            modules[module] = module_config(tensor.format, act_order="g_idx" in tensor.parts)
            if not bool(torch.isfinite(tensor.parts["scale"].half()).all()):
                problems.append(f"{module}: a scale is beyond float16's 65504.")
            has_zero |= "zero_point" in tensor.parts and bool((tensor.parts["zero_point"] == 0).any())
    refuse(problems)
    if not modules:
        raise QbenchError(f"{source.location}: no linear is quantized, so there is nothing to store as GPTQ.")
    return modules, has_zero


def _is_matrix(source: ModelSource, name: str) -> bool:
    return len(source.tensors[name].shape) == 2


def _tensors(
    source: ModelSource, modules: Mapping[str, ModuleConfig], checkpoint_format: str, types: Counter[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor to store, in the source's order; counts the stored types."""
    for name in tracked(source.tensors, "Writing"):
        tensor = source.load(name)
        if isinstance(tensor, QuantizedTensor):
            module = name.removesuffix(".weight")
            types[f"gptq-int{modules[module].bits}"] += 1
            for suffix, part in _module_tensors(tensor, checkpoint_format).items():
                yield f"{module}.{suffix}", part
        else:
            stored = tensor.half() if tensor.dtype == torch.float32 and tensor.ndim > 1 else tensor
            if bool(torch.isinf(stored).any()) and not bool(torch.isinf(tensor).any()):
                raise QbenchError(f"{name}: a weight of {float(tensor.abs().max()):.6g} is beyond float16's 65504.")
            types[str(stored.dtype).removeprefix("torch.")] += 1
            yield name, stored


def _module_tensors(tensor: QuantizedTensor, checkpoint_format: str) -> dict[str, torch.Tensor]:
    format, (out, width), parts = tensor.format, tensor.shape, tensor.parts
    assert isinstance(format, Integer)
    groups = format.blocks(width)
    scales = parts["scale"].half().expand(out, groups).T.contiguous()
    middle = torch.tensor([[format.middle]], dtype=torch.uint8)
    zeros = parts.get("zero_point", middle).expand(out, groups).T.contiguous()
    g_idx = parts.get("g_idx", torch.arange(width, dtype=torch.int32) // format.block_size(width))
    return {
        "g_idx": g_idx.to(torch.int32),
        "qweight": pack_codes(parts["codes"]),
        "qzeros": pack_zeros(zeros, format.bits, checkpoint_format),
        "scales": scales,
    }


def _write_config(folder: Path, source: ModelSource, quantization: dict[str, Any], types: Counter[str]) -> None:
    """config.json: the source's, with the quantization and the dtype most matrices outside the linears have."""
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    dtype = "bfloat16" if types["bfloat16"] > types["float16"] else "float16"
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config |= dict.fromkeys(keys, dtype) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _notes(dense: list[str], readback: Readback) -> list[str]:
    notes = []
    if readback.quantized_difference:
        notes.append(
            f"Scales were rounded to float16: quantized weights differ by up to {readback.quantized_difference:.3g}."
        )
    elif readback.max_abs_difference:
        notes.append("Quantized weights read back exactly; only float32 matrices outside them were rounded to float16.")
    if dense:
        notes.append(f"{len(dense)} linears inside the blocks are stored uncompressed, such as {dense[0]}.")
    return notes


def _warnings(quantization: dict[str, Any]) -> list[str]:
    warnings = []
    if quantization["checkpoint_format"] == V2:
        warnings.append(
            "A zero point is 0, which v1 cannot hold: written as gptq_v2, which gptqmodel, transformers and vLLM read "
            "and older readers take for v1."
        )
    if any(pattern.startswith("+:") for pattern in quantization.get("dynamic", {})):
        warnings.append(
            "Modules differ in bits, group size or symmetry. gptqmodel and vLLM follow this; transformers ignores it "
            "and computes wrong results without an error."
        )
    return warnings
