"""`linear` for a weight in any form, by the fastest kernel there is, and a record of which one ran.

| weight | device | kernel |
|---|---|---|
| dense | any | `dense_<dtype>` |
| int 2, 4, 8 bit | processor | `int<bits>_bag_f32` for few rows, `int<bits>_dequant_f32` for many (see `cpu.bags`) |
| NF4, FP4, MXFP4, NVFP4 | any | `<format>_dequant_<dtype>` |
| FP8, MXFP8 | any | `<format>_dequant_f32` |
| anything else | any | `reference` |
"""

from __future__ import annotations

from collections import Counter

import torch
import torch.nn.functional as F

from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.formats.float8 import FP8
from qbench.formats.fourbit import FourBit
from qbench.formats.mx import MXFP8
from qbench.kernels import codebook, reference
from qbench.kernels.cpu import bags
from qbench.kernels.cpu.bags import BagWeight

Weight = torch.Tensor | QuantizedTensor | BagWeight

_SHORT = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


def prepare(weight: torch.Tensor | QuantizedTensor, dtype: torch.dtype, device: torch.device) -> Weight:
    """`weight` ``[out, in]`` on `device` in the layout the kernels like, in as many bytes as its stored form.

    A dense weight is cast to `dtype` and, on a processor, stored by input column (same shape, other strides): products
    of a few rows then run up to twice as fast. Raises `QbenchError` for 8-bit floats that are not finite.
    """
    if isinstance(weight, torch.Tensor):
        moved = weight.to(device, dtype)
        return moved.t().contiguous().t() if device.type == "cpu" else moved
    if device.type == "cpu" and bags.supports(weight):
        return BagWeight.repack(weight)
    if isinstance(weight.format, FP8 | MXFP8) and codebook.has_nan(weight.parts["codes"]):
        raise QbenchError("an 8-bit float weight holds NaN or infinite codes; allowed: finite values.")
    return QuantizedTensor(weight.format, weight.shape, {k: v.to(device) for k, v in weight.parts.items()})


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, ran: Counter[str] | None = None
) -> torch.Tensor:
    """``x @ weight.T + bias``: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`; counts the kernel in `ran`."""
    if isinstance(weight, torch.Tensor):
        name = f"dense_{_SHORT[x.dtype]}"
        y = F.linear(x, weight, bias)
    elif isinstance(weight, BagWeight):
        name = f"int{weight.bits}_{'bag' if weight.uses_bags(x) else 'dequant'}_f32"
        y = weight.linear(x, bias)
    elif isinstance(weight.format, FourBit):
        name = f"{weight.format.name}_dequant_{_SHORT[x.dtype]}"
        y = codebook.fourbit_linear(x, weight, bias)
    elif isinstance(weight.format, FP8 | MXFP8):
        name = f"{weight.format.name}_dequant_f32"
        y = codebook.float8_linear(x, weight, bias)
    else:
        name = "reference"
        y = reference.linear(x, weight, bias)
    if ran is not None:
        ran[name] += 1
    return y
