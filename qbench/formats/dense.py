"""Weights that are floats already, beside what a quantized tensor says of a linear's input.

What another library's codes stand for is kept in it when that library also rounds the inputs. No recipe names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qbench.formats.base import Format, Params, QuantizedTensor

if TYPE_CHECKING:
    import torch

SMOOTHING = "smoothing"


@dataclass(frozen=True)
class Dense(Format):
    """Part ``weight``: float32 ``[out, in]``. Where there is a part ``smoothing``, float32 ``[1, in]``, the input is
    multiplied by it before it is rounded."""

    name: ClassVar[str] = "dense"

    def block_size(self, in_features: int) -> int:
        return in_features

    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        return {}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        return columns

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return codes

    def pack(self, codes: torch.Tensor, params: Params, g_idx: torch.Tensor | None = None) -> QuantizedTensor:
        return QuantizedTensor(self, (codes.shape[0], codes.shape[1]), {"weight": codes})

    def unpack(self, parts: Params, shape: tuple[int, int]) -> tuple[torch.Tensor, Params]:
        return parts["weight"], {}
