"""What a GPTQ checkpoint can hold, and the ``quantization_config`` that says what it holds.

One set of values covers all modules. Where modules differ, ``dynamic`` maps patterns to other values (gptqmodel and
vLLM read it, transformers does not). Dense linears of decoder blocks are excluded twice: by negative patterns in
``dynamic``, and, for transformers, by listing the quantized ones in ``modules_in_block_to_quantize``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from qbench.errors import QbenchError
from qbench.formats.base import Format
from qbench.formats.integer import Integer

BITS = (2, 3, 4, 8)
GROUP_SIZES = (16, 32, 64, 128, 256, 512, 1024)  # what gptqmodel's kernels take, besides one group a row
IN_BLOCK = re.compile(r"(^|.*\.)layers\.\d+\..+")
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # vLLM's names


@dataclass(frozen=True)
class ModuleConfig:
    """The values of one module, named as in ``quantization_config``; `group_size` -1 is one group a row."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool


def module_config(format: Integer, act_order: bool) -> ModuleConfig:
    return ModuleConfig(format.bits, format.group_size or -1, format.symmetric, act_order)


def refusal(module: str, format: Format, shape: tuple[int, int]) -> str | None:
    """Why a module ``[out, in]`` in `format` cannot be stored, and what could; None when it can."""
    out, width = shape
    if not IN_BLOCK.fullmatch(module):
        return f"{module}: only linears of decoder blocks (...layers.N...) are stored quantized; leave it uncompressed."
    if not isinstance(format, Integer):
        return f"{module}: format {format.name} cannot be stored; allowed: int."
    if format.float_zero_point:
        return f"{module}: zero_point_dtype {format.zero_point_dtype} cannot be stored, zero points are whole codes; " \
               f"allowed: uint8."  # fmt: skip
    if format.bits not in BITS:
        return f"{module}: {format.bits} bits cannot be stored; allowed: {', '.join(map(str, BITS))}."
    for features, count in (("in", width), ("out", out)):
        if count * format.bits % 32:
            step = 32 if format.bits == 3 else 32 // format.bits
            return f"{module}: {count} {features}_features do not fill 32-bit words at {format.bits} bits; " \
                   f"multiples of {step} do."  # fmt: skip
    size = format.group_size
    if size is not None and (size not in GROUP_SIZES or width % size):
        fit = ", ".join(str(n) for n in GROUP_SIZES if width % n == 0)
        return f"{module}: groups of {size} cannot be stored for {width} in_features; " \
               f"group sizes that fit: {f'{fit}, or ' if fit else ''}granularity channel."  # fmt: skip
    return None


def refuse(problems: Iterable[str | None]) -> None:
    """Raises one `QbenchError` that lists the first problems, if there are any."""
    found = [problem for problem in problems if problem is not None]
    if found:
        more = f"\n- and {len(found) - 8} more like these." if len(found) > 8 else ""
        raise QbenchError("A GPTQ checkpoint cannot hold this model:\n- " + "\n- ".join(found[:8]) + more)


def quantization_config(
    modules: Mapping[str, ModuleConfig], dense: Iterable[str], checkpoint_format: str
) -> dict[str, Any]:
    """The ``quantization_config`` of config.json for quantized `modules` and `dense` linears inside the blocks."""
    base = Counter(modules.values()).most_common(1)[0][0]
    dynamic: dict[str, Any] = {}
    excluded = set(dense)
    if excluded:
        dynamic["-:" + _pattern(excluded)] = {}
    for other in sorted(set(modules.values()) - {base}, key=repr):
        changed = {key: value for key, value in asdict(other).items() if value != asdict(base)[key]}
        dynamic["+:" + _pattern({name for name, config in modules.items() if config == other})] = changed
    config: dict[str, Any] = {
        "quant_method": "gptq",
        **asdict(base),
        "checkpoint_format": checkpoint_format,
        "pack_dtype": "int32",
        "lm_head": False,
        "meta": {"quantizer": ["qbench"]},
    }
    if dynamic:
        config["dynamic"] = dynamic
    if excluded:
        config["modules_in_block_to_quantize"] = [sorted(modules)]
    return config


def _pattern(modules: set[str]) -> str:
    """A regular expression for exactly these modules, and for the fused ones they are loaded as together."""
    parents = {name.rpartition(".")[0] for name in modules}
    fused = {
        f"{parent}.{whole}"
        for parent in parents
        for whole, parts in FUSED.items()
        if all(f"{parent}.{part}" in modules for part in parts)
    }
    return f"^({'|'.join(re.escape(name) for name in sorted(modules | fused))})$"
