"""Codes of 1 to 8 bits packed along the row as a little-endian bit stream (4 bit: low nibble = even column)."""

from __future__ import annotations

import torch


def packed_width(in_features: int, bits: int) -> int:
    """Bytes one row of `in_features` codes takes."""
    return -(-in_features * bits // 8)


def pack_bits(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Packs uint8 `codes` ``[out, in]`` (each < 2**bits) into uint8 ``[out, packed_width(in, bits)]``."""
    if bits == 8:
        return codes.contiguous()
    out, width = codes.shape
    if bits == 4 and width % 2 == 0:
        return codes[:, 0::2] | codes[:, 1::2] << 4
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8)
    stream = (codes.unsqueeze(-1) >> torch.arange(bits, dtype=torch.uint8)) & 1  # [out, in, bits]
    stream = torch.nn.functional.pad(stream.reshape(out, -1), (0, -width * bits % 8))
    return (stream.reshape(out, -1, 8) * weights).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, bits: int, in_features: int) -> torch.Tensor:
    """The inverse of `pack_bits`: uint8 codes ``[out, in_features]``."""
    if bits == 8:
        return packed
    out = packed.shape[0]
    if bits == 4:
        return torch.stack((packed & 15, packed >> 4), -1).reshape(out, -1)[:, :in_features]
    stream = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1
    stream = stream.reshape(out, -1)[:, : in_features * bits].reshape(out, in_features, bits)
    weights = torch.tensor([1 << i for i in range(bits)], dtype=torch.uint8, device=packed.device)
    return (stream * weights).sum(-1, dtype=torch.uint8)
