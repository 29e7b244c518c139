"""Products with NF4 and FP8 weights: a quick exact decoder each, then a dense product. Any device.

NF4: a byte holds two codes, so one look-up in a 256-entry table of value pairs decodes both.
FP8: moving an E4M3 byte's exponent and mantissa up into a float16 gives the value over 2**8 exactly, subnormals
included (the exponent biases are 7 and 15); a processor widens float16 to float32 in hardware, which is about ten times
faster than its scalar cast from float8. The row scale and 2**8 are applied to the product.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from qbench.formats.base import QuantizedTensor
from qbench.formats.codebook import levels


def nf4_linear(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for an NF4 weight: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
    return F.linear(x, nf4_decode(weight).to(x.dtype), bias)


def nf4_decode(weight: QuantizedTensor) -> torch.Tensor:
    """The float32 ``[out, in]`` weight; equal to `weight.dequantize()` to the last bit."""
    out, width = weight.shape
    codes, absmax = weight.parts["codes"], weight.parts["absmax"]
    pairs = torch.index_select(_level_pairs(codes.device), 0, codes.view(-1).int())
    values = pairs.view(torch.float32).view(out, 2 * codes.shape[1])
    block = weight.format.block_size(width)
    if width % block or "g_idx" in weight.parts:
        return values[:, :width].mul_(weight.expand(absmax))
    values.view(out, -1, block).mul_(absmax.unsqueeze(-1))
    return values


@lru_cache
def _level_pairs(device: torch.device) -> torch.Tensor:
    """For each byte its two float32 levels (low nibble first), seen as one int64."""
    byte = torch.arange(256)
    return torch.stack((levels()[byte & 15], levels()[byte >> 4]), 1).view(torch.int64).view(-1).to(device)


def fp8_linear(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for an FP8 weight: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
    product = F.linear(x.float(), e4m3_over_256(weight.parts["codes"]).float())
    product *= weight.parts["scale"].T * 256
    if bias is not None:
        product += bias
    return product.to(x.dtype)


def has_nan(codes: torch.Tensor) -> bool:
    """Whether float8_e4m3fn `codes` hold one of the two NaN bytes."""
    return bool((codes.view(torch.uint8) & 127 == 127).any())


def e4m3_over_256(codes: torch.Tensor) -> torch.Tensor:
    """Float16 values of finite float8_e4m3fn `codes`, each divided by 256."""
    bits = codes.view(torch.int8).to(torch.int16)  # the sign spreads over the upper byte
    bits <<= 7
    bits &= ~0x4000
    return bits.view(torch.float16)
