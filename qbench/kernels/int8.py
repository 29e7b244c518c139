"""Products of 8-bit integer activations with 8-bit integer weights: exact int32 sums, scaled once at the end."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from qbench.formats.activation import INPUT_SCALE
from qbench.formats.activation_int8 import Int8Inputs, LLMInt8
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer

MAX_INPUTS = 2**31 // (128 * 127)  # more could overflow an int32 sum
CUDA_ROWS, CUDA_MULTIPLE = 17, 8  # what the library behind `torch._int_mm` asks for on a GPU


def supports(weight: QuantizedTensor, device: torch.device) -> bool:
    format = weight.format
    return (
        isinstance(weight.activation, Int8Inputs | LLMInt8)
        and isinstance(format, Integer)
        and (format.bits, format.symmetric) == (8, True)
        and format.blocks(weight.shape[1]) == 1
        and weight.shape[1] < MAX_INPUTS
        and (device.type == "cpu" or all(size % CUDA_MULTIPLE == 0 for size in weight.shape))
    )


@dataclass(frozen=True)
class Int8Weight:
    """A symmetric 8-bit weight without groups, and how its input is rounded."""

    shape: tuple[int, int]
    codes: torch.Tensor  # int8 [out, in]
    scale: torch.Tensor  # float32 [1, out] or [1, 1]
    activation: Int8Inputs | LLMInt8
    input_scale: torch.Tensor | None

    @classmethod
    def repack(cls, weight: QuantizedTensor, device: torch.device) -> Int8Weight:
        assert isinstance(weight.activation, Int8Inputs | LLMInt8)
        codes = (weight.parts["codes"].to(device).to(torch.int16) - 128).to(torch.int8)
        input_scale = weight.parts.get(INPUT_SCALE)
        return cls(
            shape=weight.shape,
            codes=codes.contiguous(),
            scale=weight.parts["scale"].to(device, torch.float32).T.contiguous(),
            activation=weight.activation,
            input_scale=None if input_scale is None else input_scale.to(device),
        )

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes + (0 if self.input_scale is None else self.input_scale.nbytes)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """``x @ weight.T + bias``: `x` ``[n, in]``, result ``[n, out]`` in the dtype of `x`."""
        columns = None
        if isinstance(self.activation, LLMInt8):
            codes, scale, columns = self.activation.codes(x)
        else:
            codes, scale = self.activation.codes(x, self.input_scale)
        y = _int_product(codes, self.codes).float()
        y *= scale
        y *= self.scale
        y = y.to(x.dtype)
        if columns is not None and len(columns):
            part = (self.codes[:, columns] * self.scale.T).to(x.dtype)
            y += F.linear(x[:, columns], part)
        return y if bias is None else y.add_(bias)


def _int_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Int32 ``x @ weight.T`` of int8 `x` ``[n, in]`` and `weight` ``[out, in]``."""
    rows = len(x)
    if x.device.type != "cpu" and rows < CUDA_ROWS:
        x = F.pad(x, (0, 0, 0, CUDA_ROWS - rows))
    return torch._int_mm(x, weight.t())[:rows]
