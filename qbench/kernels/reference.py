"""The kernel every other kernel is judged by: decode the whole weight, then multiply. Any format, any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from qbench.formats.base import QuantizedTensor


def linear(x: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias``: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
    return F.linear(x, weight.dequantize().to(x.dtype), bias)
