"""`linear` for a weight in any form, by the fastest kernel there is, and a record of which one ran.

| weight | device | kernel |
|---|---|---|
| dense | any | `dense_<dtype>` |
| int 2, 4, 8 bit | processor | `int<bits>_bag_f32` for few rows, `int<bits>_dequant_f32` for many (see `cpu.bags`) |
| NF4, FP4, MXFP4, NVFP4 | any | `<format>_dequant_<dtype>` |
| FP8, MXFP8 | any | `<format>_dequant_<dtype>`; float32 whatever the dtype where a row has one scale |
| GGUF block types | processor | `<format>_bag_f32` for few rows, `<format>_dequant_f32` for many (see `cpu.gguf`) |
| anything else | any | `reference` |

A weight whose input is rounded (`QuantizedTensor.activation`) has an integer product where both sides are 8-bit
integers without groups (`int8_<activation>_i32`, see `int8`). Elsewhere the rounded input is decoded again and
multiplied with the kernel above, whose name then ends in ``+`` and the activation format's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from qbench.errors import QbenchError
from qbench.formats.activation import INPUT_SCALE, ActivationFormat
from qbench.formats.base import QuantizedTensor
from qbench.formats.dense import SMOOTHING, Dense
from qbench.formats.float8 import FP8
from qbench.formats.fourbit import FourBit
from qbench.formats.mx import MXFP8
from qbench.kernels import codebook, int8, reference
from qbench.kernels.cpu import bags, gguf
from qbench.kernels.cpu.bags import BagWeight
from qbench.kernels.cpu.gguf import GGUFWeight
from qbench.kernels.int8 import Int8Weight

DirectWeight = torch.Tensor | QuantizedTensor | BagWeight | GGUFWeight | Int8Weight


@dataclass(frozen=True)
class RoundedInput:
    """A weight whose input is rounded before the product."""

    weight: DirectWeight
    activation: ActivationFormat
    input_scale: torch.Tensor | None
    smoothing: torch.Tensor | None = None  # [1, in]: what the input is multiplied by before it is rounded

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + sum(part.nbytes for part in (self.input_scale, self.smoothing) if part is not None)


Weight = DirectWeight | RoundedInput

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def prepare(weight: torch.Tensor | QuantizedTensor, dtype: torch.dtype, device: torch.device) -> Weight:
    """`weight` ``[out, in]`` on `device` in the layout the kernels like, in as many bytes as its stored form.

    A dense weight is cast to `dtype` and, on a processor, stored by input column (same shape, other strides): products
    of a few rows then run up to twice as fast. Raises `QbenchError` for 8-bit floats that are not finite.
    """
    if isinstance(weight, torch.Tensor):
        moved = weight.to(device, dtype)
        return moved.t().contiguous().t() if device.type == "cpu" else moved
    if isinstance(weight.format, Dense) and weight.activation is None:
        return prepare(weight.parts["weight"], dtype, device)
    if weight.activation is not None:
        if int8.supports(weight, device):
            return Int8Weight.repack(weight, device)
        scale = weight.parts.get(INPUT_SCALE)
        parts = {key: part for key, part in weight.parts.items() if key != INPUT_SCALE}
        inner = prepare(QuantizedTensor(weight.format, weight.shape, parts), dtype, device)
        assert not isinstance(inner, RoundedInput)
        smoothing = weight.parts.get(SMOOTHING)
        return RoundedInput(
            inner,
            weight.activation,
            None if scale is None else scale.to(device),
            None if smoothing is None else smoothing.to(device, dtype),
        )
    if device.type == "cpu" and bags.supports(weight):
        return BagWeight.repack(weight)
    if device.type == "cpu" and gguf.supports(weight):
        return GGUFWeight.repack(weight)
    if any(codebook.has_nan(part) for part in weight.parts.values() if part.dtype in codebook.FLOAT8):
        raise QbenchError("a weight's 8-bit floats hold NaN or infinite values; allowed: finite ones.")
    return QuantizedTensor(weight.format, weight.shape, {k: v.to(device) for k, v in weight.parts.items()})


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, ran: Counter[str] | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias``: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`; counts the kernel in `ran`."""
    suffix = ""
    if isinstance(weight, RoundedInput):
        suffix = f"+{weight.activation.name}"
        x = x if weight.smoothing is None else x * weight.smoothing
        x, weight = weight.activation.round(x, weight.input_scale), weight.weight
    if isinstance(weight, torch.Tensor):
        name = f"dense_{_SHORT[x.dtype]}"
        y = F.linear(x, weight, bias)
    elif isinstance(weight, BagWeight):
        name = f"int{weight.bits}_{'bag' if weight.uses_bags(x) else 'dequant'}_f32"
        y = weight.linear(x, bias)
    elif isinstance(weight, GGUFWeight):
        name = f"{weight.name}_{'bag' if weight.uses_bags(x) else 'dequant'}_f32"
        y = weight.linear(x, bias)
    elif isinstance(weight, Int8Weight):
        name = f"int8_{weight.activation.name}_i32"
        y = weight.linear(x, bias)
    elif isinstance(weight.format, FourBit):
        name = f"{weight.format.name}_dequant_{_SHORT[x.dtype]}"
        y = codebook.fourbit_linear(x, weight, bias)
    elif isinstance(weight.format, FP8 | MXFP8):
        width = weight.shape[1]
        in_float32 = x.device.type == "cpu" and weight.format.block_size(width) >= width  # see `codebook.float8_linear`
        name = f"{weight.format.name}_dequant_{'f32' if in_float32 else _SHORT[x.dtype]}"
        y = codebook.float8_linear(x, weight, bias)
    else:
        name = "reference"
        y = reference.linear(x, weight, bias)
    if ran is not None:
        ran[name + suffix] += 1
    return y
