"""Products with 4-bit level formats and 8-bit floats: quick exact decoders, then dense products. Any device.

NF4, FP4, MXFP4, NVFP4: two bytes hold four codes, so one look-up in a table of 65536 value quadruples decodes them.
FP8, MXFP8: moving an E4M3 byte's exponent and mantissa up into a float16 gives the value over 2**8 exactly, subnormals
included (the exponent biases are 7 and 15); a processor widens float16 to float32 in hardware, which is about ten times
faster than its scalar cast from float8. An E5M2 byte is the upper half of its float16. A scale a row, and 2**8, are
applied to the product. A processor decodes a few rows at a time, so that their values stay in its cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F

from qbench.formats.base import QuantizedTensor
from qbench.formats.fourbit import FourBit

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
CHUNK = 1 << 17  # weights decoded at a time on a processor

Rows = Callable[[int, int], torch.Tensor]  # decodes rows `start` to `stop` as float32


def fourbit_linear(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for a `FourBit` weight: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
    y = _product(x, weight, _fourbit_rows(weight))
    return y if bias is None else y.add_(bias)


def fourbit_decode(weight: QuantizedTensor) -> torch.Tensor:
    """The float32 ``[out, in]`` weight; equal to `weight.dequantize()` to the last bit."""
    return _fourbit_rows(weight)(0, weight.shape[0])


def _fourbit_rows(weight: QuantizedTensor) -> Rows:
    format, width = weight.format, weight.shape[1]
    assert isinstance(format, FourBit)
    multiplier = format.multiplier(format.read_params({k: _widened_scale(v) for k, v in weight.parts.items()}))
    block = format.block_size(width)
    even = width % block == 0 and "g_idx" not in weight.parts
    codes, levels = weight.parts["codes"], _levels
    if codes.shape[1] % 2 == 0:
        codes, levels = codes.view(torch.uint16), _level_quadruples
    table = levels(format.levels, codes.device)

    def rows(start: int, stop: int) -> torch.Tensor:
        index = codes[start:stop].long()
        values = table.expand(len(index), -1).gather(1, index).view(torch.float32)
        if even:
            values.view(len(index), -1, block).mul_(multiplier[start:stop].unsqueeze(-1))
            return values
        return values[:, :width].mul_(weight.expand(multiplier[start:stop]))

    return rows


def _widened_scale(part: torch.Tensor) -> torch.Tensor:
    """An E4M3 scale as float32; other parts as they are."""
    return e4m3_over_256(part).float() * 256 if part.dtype == torch.float8_e4m3fn else part


@lru_cache
def _levels(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """For each byte its two float32 levels (low nibble first), seen as one int64."""
    byte, values = torch.arange(256), torch.tensor(levels, dtype=torch.float32)
    return torch.stack((values[byte & 15], values[byte >> 4]), 1).view(torch.int64).view(-1).to(device)


@lru_cache
def _level_quadruples(levels: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """For each two bytes (low byte first) their four float32 levels, seen as one complex128."""
    pairs, low = _levels(levels, device), torch.arange(65536, device=device)
    return torch.stack((pairs[low & 255], pairs[low >> 8]), 1).view(torch.complex128).view(-1)


def float8_linear(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for an FP8 or MXFP8 weight: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
    if weight.format.block_size(weight.shape[1]) < weight.shape[1]:
        y = _product(x, weight, _float8_rows(weight))
    else:
        codes, params = weight.format.unpack(weight.parts, weight.shape)
        # a processor multiplies float32 fastest; an accelerator the model's own dtype, which holds these values exactly
        values = x.float() if x.device.type == "cpu" else x
        y = _product(values, weight, lambda start, stop: _widened(codes[start:stop]))
        y = (y.float() * (params["scale"].T * _factor(codes))).to(x.dtype)
    return y if bias is None else y.add_(bias)


def float8_decode(weight: QuantizedTensor) -> torch.Tensor:
    """The float32 ``[out, in]`` weight; equal to `weight.dequantize()` to the last bit."""
    return _float8_rows(weight)(0, weight.shape[0])


def has_nan(codes: torch.Tensor) -> bool:
    """Whether 8-bit float `codes` hold a NaN or an infinity."""
    bits = codes.view(torch.uint8) & 127
    return bool((bits == 127 if codes.dtype == torch.float8_e4m3fn else bits >= 0x7C).any())


def _float8_rows(weight: QuantizedTensor) -> Rows:
    width = weight.shape[1]
    codes, params = weight.format.unpack(weight.parts, weight.shape)
    scale, block = params["scale"], weight.format.block_size(width)
    even = width % block == 0 and "g_idx" not in weight.parts and scale.shape[0] > 1

    def rows(start: int, stop: int) -> torch.Tensor:
        values = _widened(codes[start:stop]).mul_(_factor(codes))
        if even:
            values.view(stop - start, -1, block).mul_(scale[start:stop].unsqueeze(-1))
            return values
        return values.mul_(weight.expand(scale[start:stop]))

    return rows


def _widened(codes: torch.Tensor) -> torch.Tensor:
    """Float32 values of finite 8-bit float `codes`, over `_factor`."""
    if codes.dtype == torch.float8_e4m3fn:
        return e4m3_over_256(codes).float()
    return (codes.view(torch.int8).to(torch.int16) << 8).view(torch.float16).float()


def _factor(codes: torch.Tensor) -> float:
    return 256.0 if codes.dtype == torch.float8_e4m3fn else 1.0


def e4m3_over_256(codes: torch.Tensor) -> torch.Tensor:
    """Float16 values of finite float8_e4m3fn `codes`, each divided by 256."""
    bits = codes.view(torch.int8).to(torch.int16)  # the sign spreads over the upper byte
    bits <<= 7
    bits &= ~0x4000
    return bits.view(torch.float16)


def _product(x: torch.Tensor, weight: QuantizedTensor, rows: Rows) -> torch.Tensor:
    """``x @ weight.T`` in the dtype of `x`, with `rows` decoding the weight."""
    out, width = weight.shape
    step = max(CHUNK // width, 1) if x.device.type == "cpu" else out
    if step >= out:
        return F.linear(x, rows(0, out).to(x.dtype))
    y = x.new_empty(len(x), out)
    for start in range(0, out, step):
        stop = min(start + step, out)
        y[:, start:stop] = F.linear(x, rows(start, stop).to(x.dtype))
    return y
