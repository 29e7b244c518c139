"""Reading a GPTQ folder made by anyone: gptqmodel, AutoGPTQ, optimum, or the writer beside this file.

Checked when it is opened, from headers alone: every module has its parts and their shapes agree with each other and
with ``bits`` and ``group_size``. Whether a module is symmetric, and whether activation order matters, is read from its
zero points and ``g_idx``, not from the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qbench.errors import QbenchError
from qbench.export.gptq_config import BITS
from qbench.export.gptq_pack import V1, V2, unpack_codes, unpack_zeros
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer
from qbench.lazy import lazy_import
from qbench.models.huggingface import HuggingFaceSource
from qbench.models.json_file import read_json
from qbench.models.source import ModelSource, TensorInfo

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

PARTS = ("qweight", "qzeros", "scales", "g_idx")


class GPTQSource(ModelSource):
    """A GPTQ folder. Quantized linears load as `QuantizedTensor` under their dense name (``....weight``)."""

    def __init__(self, location: str) -> None:
        """Raises `QbenchError` naming the file, and the tensor or key, that is missing or wrong."""
        self.location = location
        self._files = HuggingFaceSource(Path(location), location)
        self.config = {key: value for key, value in self._files.config.items() if key != "quantization_config"}
        stored = self._files.tensors
        self.quantization = _read_quantization(Path(location), self._files.config)
        self._modules: dict[str, tuple[int, int]] = {}  # weight name -> bits, group size
        self._tensors: dict[str, TensorInfo] = {}
        for name, info in stored.items():
            module, _, last = name.rpartition(".")
            if last == "qweight":
                bits, group_size = _module_values(self.quantization, module)
                shape = _check_module(location, module, stored, bits, group_size)
                nbytes = sum(stored[f"{module}.{part}"].nbytes for part in PARTS if f"{module}.{part}" in stored)
                self._modules[f"{module}.weight"] = (bits, group_size)
                self._tensors[f"{module}.weight"] = TensorInfo(shape, Integer.name, nbytes)
            elif last not in PARTS:
                self._tensors[name] = info
            elif f"{module}.qweight" not in stored:
                raise QbenchError(f"{location}: {name} is there, but {module}.qweight is missing.")
        if "lm_head.weight" in self._modules:
            self.config["tie_word_embeddings"] = False

    @property
    def revision(self) -> str:
        return self._files.revision

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def load(self, name: str) -> torch.Tensor | QuantizedTensor:
        if name not in self._modules:
            return self._files.load(name)
        module = name.removesuffix(".weight")
        bits, group_size = self._modules[name]
        out, width = shape = self._tensors[name].shape
        qweight, qzeros, scales = (self._files.load(f"{module}.{part}") for part in PARTS[:3])
        if not bool(torch.isfinite(scales).all()):
            raise QbenchError(f"{self.location}: {module}.scales holds infinite or undefined values.")
        groups = scales.shape[0]
        zeros = unpack_zeros(qzeros, bits, self.quantization["checkpoint_format"], out)
        symmetric = bool((zeros == 2 ** (bits - 1)).all())
        parts = {"codes": unpack_codes(qweight), "scale": scales.T.contiguous()}
        if scales.dtype != torch.float16:
            parts["scale"] = parts["scale"].float()
        if not symmetric:
            parts["zero_point"] = zeros.T.contiguous()
        format = Integer(
            bits=bits,
            granularity="channel" if groups == 1 else "group",
            group_size=group_size if groups > 1 else None,
            symmetric=symmetric,
            scale_dtype="float16" if scales.dtype == torch.float16 else "float32",
        )
        g_idx = self._g_idx(module, groups)
        if g_idx is not None and not torch.equal(g_idx, torch.arange(width) // format.block_size(width)):
            parts["g_idx"] = g_idx
        return QuantizedTensor(format, (shape[0], shape[1]), parts)

    def write_side_files(self, folder: Path) -> list[str]:
        return self._files.write_side_files(folder)

    def _g_idx(self, module: str, groups: int) -> torch.Tensor | None:
        name = f"{module}.g_idx"
        if name not in self._files.tensors:
            return None
        g_idx = self._files.load(name)
        low, high = int(g_idx.min()), int(g_idx.max())
        if low < 0 or high >= groups:
            raise QbenchError(f"{self.location}: {name} points to groups {low} to {high}; there are {groups}.")
        return g_idx


def _read_quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of config.json or, in older folders, quantize_config.json, with defaults and checks."""
    where, found = folder / "config.json", config.get("quantization_config")
    if found is None and (folder / "quantize_config.json").is_file():
        where = folder / "quantize_config.json"
        found = read_json(where)
    if not isinstance(found, dict):
        raise QbenchError(f"{where}: no quantization_config, and no quantize_config.json beside it.")
    stated = found.get("checkpoint_format") or found.get("format") or V1
    if found.get("is_marlin_format"):
        stated = "marlin"
    if stated not in (V1, V2):
        raise QbenchError(f"{where}: checkpoint_format {stated!r} cannot be read; known: {V1}, {V2}.")
    if not isinstance(found.get("dynamic") or {}, dict):
        raise QbenchError(f"{where}: dynamic is {found['dynamic']!r}; expected patterns mapped to values.")
    return {**found, "checkpoint_format": stated, "where": where}


def _module_values(quantization: Mapping[str, Any], module: str) -> tuple[int, int]:
    """Bits and group size (-1: one group a row) of `module`; the first matching pattern of ``dynamic`` overrides."""
    values = {"bits": quantization.get("bits"), "group_size": quantization.get("group_size", -1)}
    for pattern, override in (quantization.get("dynamic") or {}).items():
        try:
            matched = re.match(pattern.removeprefix("+:"), module)
        except re.error as error:
            raise QbenchError(f"{quantization['where']}: dynamic pattern {pattern!r} is invalid ({error}).") from error
        if matched and isinstance(override, dict) and not pattern.startswith("-:"):
            values |= {key: override[key] for key in values if key in override}
            break
    bits, group_size = values["bits"], values["group_size"]
    if type(bits) is not int or bits not in BITS:
        raise QbenchError(f"{quantization['where']}: bits of {module} are {bits!r}; allowed: {BITS}.")
    if type(group_size) is not int or (group_size != -1 and group_size < 1):
        raise QbenchError(f"{quantization['where']}: group_size of {module} is {group_size!r}; allowed: -1 or above 0.")
    return bits, group_size


def _check_module(
    location: str, module: str, stored: Mapping[str, TensorInfo], bits: int, group_size: int
) -> tuple[int, int]:
    """The module's ``[out, in]``, from the headers of its parts. Raises `QbenchError` when they do not fit together."""
    for part in PARTS[:3]:
        if f"{module}.{part}" not in stored:
            raise QbenchError(f"{location}: {module}.{part} is missing.")
    qweight = stored[f"{module}.qweight"]
    if len(qweight.shape) != 2 or 0 in qweight.shape or qweight.shape[0] * 32 % bits:
        raise QbenchError(
            f"{location}: {module}.qweight has shape {list(qweight.shape)}, no whole codes of {bits} bits."
        )
    width, out = qweight.shape[0] * 32 // bits, qweight.shape[1]
    groups = 1 if group_size == -1 else -(-width // group_size)
    expected = {
        "qweight": (("I32",), qweight.shape),
        "qzeros": (("I32",), (groups, out * bits // 32)),
        "scales": (("F16", "BF16", "F32"), (groups, out)),
        "g_idx": (("I32",), (width,)),
    }
    for part, (dtypes, shape) in expected.items():
        info = stored.get(f"{module}.{part}")
        if info is not None and (info.dtype not in dtypes or info.shape != shape):
            raise QbenchError(
                f"{location}: {module}.{part} is {info.dtype} {list(info.shape)}; expected {' or '.join(dtypes)} "
                f"{list(shape)} ({bits} bits, group size {group_size}, {width} inputs)."
            )
    if out * bits % 32:
        raise QbenchError(f"{location}: {module} has {out} outputs, whose {bits}-bit zero points do not fill words.")
    return out, width
