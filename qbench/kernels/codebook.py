"""Products with 4-bit level formats and 8-bit floats: a quick exact decoder each, then a dense product. Any device.

NF4, FP4, MXFP4, NVFP4: a byte holds two codes, so one look-up in a 256-entry table of value pairs decodes both.
FP8, MXFP8: moving an E4M3 byte's exponent and mantissa up into a float16 gives the value over 2**8 exactly, subnormals
included (the exponent biases are 7 and 15); a processor widens float16 to float32 in hardware, which is about ten times
faster than its scalar cast from float8. An E5M2 byte is the upper half of its float16. A scale a row, and 2**8, are
applied to the product.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F

from qbench.formats.base import QuantizedTensor
from qbench.formats.fourbit import FourBit


def fourbit_linear(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for a `FourBit` weight: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
    return F.linear(x, fourbit_decode(weight).to(x.dtype), bias)


def fourbit_decode(weight: QuantizedTensor) -> torch.Tensor:
    """The float32 ``[out, in]`` weight; equal to `weight.dequantize()` to the last bit."""
    format = weight.format
    assert isinstance(format, FourBit)
    out, width = weight.shape
    codes = weight.parts["codes"]
    multiplier = format.multiplier(format.read_params(weight.parts))
    pairs = torch.index_select(_level_pairs(format.levels, codes.device), 0, codes.view(-1).int())
    values = pairs.view(torch.float32).view(out, 2 * codes.shape[1])
    block = format.block_size(width)
    if width % block or "g_idx" in weight.parts:
        return values[:, :width].mul_(weight.expand(multiplier))
    values.view(out, -1, block).mul_(multiplier.unsqueeze(-1))
    return values


@lru_cache
def _level_pairs(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """For each byte its two float32 levels (low nibble first), seen as one int64."""
    byte, values = torch.arange(256), torch.tensor(levels, dtype=torch.float32)
    return torch.stack((values[byte & 15], values[byte >> 4]), 1).view(torch.int64).view(-1).to(device)


def float8_linear(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for an FP8 or MXFP8 weight: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
    if weight.format.block_size(weight.shape[1]) < weight.shape[1]:
        return F.linear(x, float8_decode(weight).to(x.dtype), bias)
    values, factor = _widened(weight.parts["codes"])
    scale = weight.format.unpack(weight.parts, weight.shape)[1]["scale"]
    product = F.linear(x.float(), values)
    product *= scale.T * factor
    if bias is not None:
        product += bias
    return product.to(x.dtype)


def float8_decode(weight: QuantizedTensor) -> torch.Tensor:
    """The float32 ``[out, in]`` weight; equal to `weight.dequantize()` to the last bit."""
    codes, params = weight.format.unpack(weight.parts, weight.shape)
    values, factor = _widened(codes)
    return values.mul_(factor).mul_(weight.expand(params["scale"]))


def has_nan(codes: torch.Tensor) -> bool:
    """Whether 8-bit float `codes` hold a NaN or an infinity."""
    bits = codes.view(torch.uint8) & 127
    return bool((bits == 127 if codes.dtype == torch.float8_e4m3fn else bits >= 0x7C).any())


def _widened(codes: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Float32 values of finite 8-bit float `codes`, and what they are still to be multiplied by."""
    if codes.dtype == torch.float8_e4m3fn:
        return e4m3_over_256(codes).float(), 256.0
    return (codes.view(torch.int8).to(torch.int16) << 8).view(torch.float16).float(), 1.0


def e4m3_over_256(codes: torch.Tensor) -> torch.Tensor:
    """Float16 values of finite float8_e4m3fn `codes`, each divided by 256."""
    bits = codes.view(torch.int8).to(torch.int16)  # the sign spreads over the upper byte
    bits <<= 7
    bits &= ~0x4000
    return bits.view(torch.float16)
