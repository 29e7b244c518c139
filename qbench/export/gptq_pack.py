"""The bits of a GPTQ checkpoint: codes and zero points in int32 words.

Codes of one output channel form a little-endian bit stream along the input; the words of all channels stand side by
side, so ``qweight`` is ``[in * bits / 32, out]`` and 32 codes of 3 bits take exactly 3 words. Zero points are packed
the same way along the output: ``qzeros`` is ``[groups, out * bits / 32]``.

Checkpoint format ``gptq`` (v1) stores each zero point minus one, ``gptq_v2`` stores it plainly. A zero point of 0
does not fit v1: engines disagree on what -1 wraps to (a field of ones read as 2**bits, or a borrow from its neighbour).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

V1, V2 = "gptq", "gptq_v2"
_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # a one in every field of a word


def pack_codes(packed: torch.Tensor) -> torch.Tensor:
    """``qweight`` int32 ``[in * bits / 32, out]`` of bit-packed rows, uint8 ``[out, in * bits / 8]``."""
    return _reinterpreted(packed, torch.int32).T.contiguous()


def unpack_codes(qweight: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_codes`."""
    return _reinterpreted(qweight.T, torch.uint8)


def pack_zeros(zeros: torch.Tensor, bits: int, checkpoint_format: str) -> torch.Tensor:
    """``qzeros`` int32 ``[groups, out * bits / 32]`` of zero points, uint8 ``[groups, out]``."""
    from qbench.formats.bitpack import pack_bits

    assert checkpoint_format == V2 or bool((zeros > 0).all()), "v1 cannot hold a zero point of 0"
    stored = zeros if checkpoint_format == V2 else zeros - 1
    return _reinterpreted(pack_bits(stored, bits), torch.int32)


def unpack_zeros(qzeros: torch.Tensor, bits: int, checkpoint_format: str, out: int) -> torch.Tensor:
    """Zero points uint8 ``[groups, out]``. A v1 field that wrapped is read as gptqmodel reads it: one is added to
    whole words (2, 4, 8 bits), so that a borrow is undone, or to each field modulo 8 (3 bits)."""
    from qbench.formats.bitpack import unpack_bits

    if checkpoint_format == V1 and bits in _ONES:
        qzeros = qzeros + _ONES[bits]
    zeros = unpack_bits(_reinterpreted(qzeros, torch.uint8), bits, out)
    return (zeros + 1) & 7 if checkpoint_format == V1 and bits == 3 else zeros


def _reinterpreted(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of each row as values of `dtype`; by way of one dimension, whose stride is always 1."""
    return matrix.reshape(-1).view(dtype).reshape(matrix.shape[0], -1)
