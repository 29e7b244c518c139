"""Which GGUF type a tensor is stored in, decided from its name, format and shape alone.

With ``auto`` an integer result keeps its own codes: symmetric up to 4 bits in Q4_0, symmetric 5 to 8 bits in Q8_0,
zero-point up to 4 bits in Q4_1; what is in a GGUF block type already stays as it is. What no block type can hold is
refused, never rounded in silence. A K-quant that is asked for by name is replaced where rows are no multiple of 256.
"""

from __future__ import annotations

from collections.abc import Iterable

from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, Format
from qbench.formats.gguf_blocks import KINDS, GGUFBlocks
from qbench.formats.integer import Integer
from qbench.registry import nearest

BLOCK = 32
TYPES = ("auto", "f16", *(kind.lower() for kind in KINDS))


def check_type(requested: str) -> None:
    """Raises `QbenchError` on a type that is not one of `TYPES`."""
    if requested not in TYPES:
        raise QbenchError(f"Unknown GGUF type {requested!r}. {nearest(requested, TYPES)}")


def stored_type(name: str, format: Format | None, shape: tuple[int, ...], requested: str) -> str:
    """The ggml type ("F32", "F16", or one of `gguf_blocks.KINDS`) of one tensor; `format` is None for a dense one.

    Vectors are F32. Embedding and head stay F16 unless they are quantized themselves. Rows that do not divide into
    blocks of 32 are F16, those that do not divide into a K-quant's 256 in the type that llama.cpp takes instead.
    """
    if len(shape) == 1:
        return "F32"
    dense_in_auto = format is None and (requested == "auto" or ".layers." not in name)
    if dense_in_auto or requested == "f16" or shape[-1] % BLOCK:
        return "F16"
    if requested != "auto":
        wanted: GGUFBlocks = FORMATS.get(requested)()
        fitting = wanted.for_width(shape[-1])
        assert isinstance(fitting, GGUFBlocks)
        return fitting.kind
    assert format is not None
    return _own_type(format, shape[-1])


def _own_type(format: Format, in_features: int) -> str:
    """The block type that holds `format`'s codes. Raises `QbenchError` (without the tensor's name) when none does."""
    if isinstance(format, GGUFBlocks):
        return format.kind
    if not isinstance(format, Integer):
        raise QbenchError(f"format {format.name} has no GGUF block type")
    block = format.block_size(in_features)
    if block % BLOCK and block != in_features:
        raise QbenchError(
            f"groups of {block} do not divide into blocks of {BLOCK}; group sizes that do: 32, 64, 96, ..."
        )
    if format.symmetric:
        return "Q4_0" if format.bits <= 4 else "Q8_0"
    if format.float_zero_point:
        raise QbenchError(f"zero_point_dtype {format.zero_point_dtype} has no GGUF block type; uint8 does (Q4_1)")
    if format.bits > 4:
        raise QbenchError(f"{format.bits} bits with zero points have no GGUF block type; up to 4 bits do (Q4_1)")
    return "Q4_1"


def refuse(problems: Iterable[str]) -> None:
    """Raises one `QbenchError` that lists the first problems and says what helps, if there are any."""
    found = list(problems)
    if found:
        more = f"\n- and {len(found) - 8} more like these." if len(found) > 8 else ""
        listed = "\n- ".join(found[:8])
        raise QbenchError(
            f"A GGUF file cannot hold this model as it is:\n- {listed}{more}\n"
            "`type: f16` or `type: q8_0` rounds every weight again into a type that can."
        )
