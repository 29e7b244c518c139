"""The bytes inside GGUF blocks: codes in bit planes, float16 fields, 6-bit scales. All tensors are ``[..., n]``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qbench.errors import QbenchError
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


def pack_planes(codes: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """uint8 codes below ``2**bits``, ``8 / bits`` in a byte: element i shares its byte with i + run, i + 2 run, ...

    Bytes of neighbouring elements lie side by side in runs of `run`; the first element has the lowest bits.
    """
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits, run).unbind(-2)
    packed = parts[0].clone()
    for place, part in enumerate(parts[1:], 1):
        packed |= part << (bits * place)
    return packed.flatten(-2)


def unpack_planes(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """The inverse of `pack_planes`."""
    runs = packed.reshape(*packed.shape[:-1], -1, run)
    return torch.stack([(runs >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)], -2).flatten(-3)


def half_bytes(values: torch.Tensor) -> torch.Tensor:
    """Float32 ``[..., 1]`` as the two bytes of a float16 each."""
    return values.half().contiguous().view(torch.uint8)


def half_field(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 at byte `start` of every block, as float32 ``[..., 1]``."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def as_half(values: torch.Tensor) -> torch.Tensor:
    """`values` rounded to float16. Raises `QbenchError` when one does not fit."""
    rounded = values.half().float()
    if not bool(torch.isfinite(rounded).all()):
        raise QbenchError(f"a scale of {float(values.abs().max()):.6g} does not fit float16 (a NaN or huge weight).")
    return rounded


def pack_scales_and_mins(scales: torch.Tensor, mins: torch.Tensor) -> torch.Tensor:
    """Eight 6-bit scales and eight 6-bit minimums (uint8 ``[..., 8]`` each) in 12 bytes, as Q4_K and Q5_K have them.

    The first four of each have a byte of their own, whose upper two bits are the upper bits of the other four.
    """
    first, second = (v[..., :4] | (v[..., 4:] >> 4 << 6) for v in (scales, mins))
    return torch.cat([first, second, (scales[..., 4:] & 15) | (mins[..., 4:] << 4)], -1)


def unpack_scales_and_mins(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of `pack_scales_and_mins`."""
    first, second, low = packed.reshape(*packed.shape[:-1], 3, 4).unbind(-2)
    scales = torch.cat([first & 63, (low & 15) | (first >> 6 << 4)], -1)
    return scales, torch.cat([second & 63, (low >> 4) | (second >> 6 << 4)], -1)


def pack_scales(scales: torch.Tensor) -> torch.Tensor:
    """Sixteen 6-bit scales (uint8 ``[..., 16]``) in 12 bytes, as Q3_K has them: low nibbles, then upper bits."""
    return torch.cat([pack_planes(scales & 15, 4, 8), pack_planes(scales >> 4, 2, 4)], -1)


def unpack_scales(packed: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_scales`."""
    return unpack_planes(packed[..., :8], 4, 8) | (unpack_planes(packed[..., 8:], 2, 4) << 4)
