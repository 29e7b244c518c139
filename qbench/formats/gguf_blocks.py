"""The GGUF block types that we write ourselves: 32 weights a block, a float16 scale in front.

    Q8_0: d, 32 int8                  value = d * q              34 bytes
    Q4_0: d, 32 nibbles               value = d * (q - 8)        18 bytes
    Q4_1: d, m, 32 nibbles            value = d * q + m          20 bytes

A nibble byte holds element i low and element i + 16 high. Encoders take float32 ``[rows, in]`` (in a multiple of
32) and give uint8 ``[rows, bytes a row]``; decoders do the opposite. Bits agree with llama.cpp's reference quantizers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

BLOCK = 32
BLOCK_BYTES = {"Q8_0": 34, "Q4_0": 18, "Q4_1": 20}


def round_half_away(values: torch.Tensor) -> torch.Tensor:
    """C's ``roundf``: halves away from zero, and the float just below 0.5 still to 0."""
    size = values.abs()
    whole = size.floor()
    return torch.copysign(whole + (2 * (size - whole)).floor(), values)


def assemble(codes: torch.Tensor, *head: torch.Tensor) -> torch.Tensor:
    """Blocks from `codes` (int8 for Q8_0, uint8 nibble values for Q4) ``[rows, in]`` and float16 `head` values
    ``[rows, in / 32]`` (the scale, then Q4_1's minimum): uint8 ``[rows, bytes a row]``."""
    blocks = codes.reshape(codes.shape[0], -1, BLOCK)
    if codes.dtype == torch.uint8:
        blocks = blocks[..., :16] | (blocks[..., 16:] << 4)
    fields = [value.contiguous().unsqueeze(-1).view(torch.uint8) for value in head]
    return torch.cat([*fields, blocks.contiguous().view(torch.uint8)], -1).flatten(1)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, 1 / scale)


def encode_q8_0(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    codes = round_half_away(blocks * _inverse(scale)).to(torch.int8)
    return assemble(codes.flatten(1), scale.squeeze(-1).half())


def encode_q4_0(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    extreme = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))  # signed: it gets code 0, i.e. -8
    scale = extreme / -8
    codes = (blocks * _inverse(scale) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return assemble(codes.flatten(1), scale.squeeze(-1).half())


def encode_q4_1(weight: torch.Tensor) -> torch.Tensor:
    blocks = weight.reshape(weight.shape[0], -1, BLOCK)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    scale = (high - low) / 15
    codes = ((blocks - low) * _inverse(scale) + 0.5).trunc().clamp(0, 15).to(torch.uint8)
    return assemble(codes.flatten(1), scale.squeeze(-1).half(), low.squeeze(-1).half())


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """The float16 field at byte `start` of every block, as float32 ``[rows, blocks, 1]``."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    return torch.cat([packed & 15, packed >> 4], -1).float()


def decode_q8_0(data: torch.Tensor) -> torch.Tensor:
    blocks = data.reshape(data.shape[0], -1, BLOCK_BYTES["Q8_0"])
    return (_half(blocks, 0) * blocks[..., 2:].contiguous().view(torch.int8).float()).flatten(1)


def decode_q4_0(data: torch.Tensor) -> torch.Tensor:
    blocks = data.reshape(data.shape[0], -1, BLOCK_BYTES["Q4_0"])
    return (_half(blocks, 0) * (_nibbles(blocks[..., 2:]) - 8)).flatten(1)


def decode_q4_1(data: torch.Tensor) -> torch.Tensor:
    blocks = data.reshape(data.shape[0], -1, BLOCK_BYTES["Q4_1"])
    return (_half(blocks, 0) * _nibbles(blocks[..., 4:]) + _half(blocks, 2)).flatten(1)


Code = Callable[[torch.Tensor], torch.Tensor]
ENCODERS: dict[str, Code] = {"Q8_0": encode_q8_0, "Q4_0": encode_q4_0, "Q4_1": encode_q4_1}
DECODERS: dict[str, Code] = {"Q8_0": decode_q8_0, "Q4_0": decode_q4_0, "Q4_1": decode_q4_1}
