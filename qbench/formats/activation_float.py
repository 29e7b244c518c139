"""Activations as 8-bit and 4-bit floats: what the weight formats of the same names make of the rows of ``x``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.formats.activation import ActivationFormat, static_scale
from qbench.formats.float8 import TILE, Element
from qbench.formats.minifloat import E2M1, E4M3, ELEMENTS
from qbench.formats.mx import BLOCK as MX_BLOCK
from qbench.formats.mx import ScaleRule, mx_scale
from qbench.formats.nvfp4 import BLOCK as NVFP4_BLOCK
from qbench.formats.nvfp4 import E4M3_SMALLEST
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


@dataclass(frozen=True)
class FP8Inputs(ActivationFormat):
    """8-bit floats: a scale a token or a 1 x 128 group on the fly, or one static scale (`granularity: tensor`)."""

    name: ClassVar[str] = "fp8"

    granularity: Literal["token", "group", "tensor"] = "token"
    element: Element = "e4m3"

    @property
    def static(self) -> bool:
        return self.granularity == "tensor"

    def input_scale(self, absmax: torch.Tensor) -> torch.Tensor:
        return static_scale(absmax, ELEMENTS[self.element].largest)

    def round(self, x: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
        kind = ELEMENTS[self.element]
        blocks = _blocks(x, TILE if self.granularity == "group" else x.shape[1])
        scale = _not_zero(_absmax(blocks) / kind.largest) if input_scale is None else input_scale
        return _joined(kind.round(blocks / scale) * scale, x)


@dataclass(frozen=True)
class MXFP8Inputs(ActivationFormat):
    """8-bit floats with a power of two a 32 values, found on the fly."""

    name: ClassVar[str] = "mxfp8"

    element: Element = "e4m3"
    scale_rule: ScaleRule = "even"

    def round(self, x: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
        kind, blocks = ELEMENTS[self.element], _blocks(x, MX_BLOCK)
        scale = mx_scale(_absmax(blocks), kind.largest, self.scale_rule)
        return _joined(kind.round(blocks / scale) * scale, x)


@dataclass(frozen=True)
class NVFP4Inputs(ActivationFormat):
    """E2M1 with an E4M3 scale a 16 values on the fly, over a static float32 scale: ``absmax / (6 * 448)``."""

    name: ClassVar[str] = "nvfp4"

    @property
    def static(self) -> bool:
        return True

    def input_scale(self, absmax: torch.Tensor) -> torch.Tensor:
        return static_scale(absmax, E2M1.largest * E4M3.largest)

    def round(self, x: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
        assert input_scale is not None, "NVFP4 inputs need the calibrated scale"
        blocks = _blocks(x, NVFP4_BLOCK)
        scale = _not_zero(_absmax(blocks) / (E2M1.largest * input_scale)).clamp_(min=E4M3_SMALLEST)
        multiplier = E4M3.round(scale) * input_scale
        return _joined(E2M1.round(blocks / multiplier) * multiplier, x)


def _blocks(x: torch.Tensor, size: int) -> torch.Tensor:
    """Float32 ``[tokens, blocks, size]``; a last partial block is filled with zeros."""
    filled = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size))
    return filled.view(len(x), -1, size)


def _joined(blocks: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The inverse of `_blocks`, in the shape and dtype of `x`."""
    return blocks.flatten(1)[:, : x.shape[1]].to(x.dtype)


def _absmax(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.abs().amax(-1, keepdim=True)


def _not_zero(scale: torch.Tensor) -> torch.Tensor:
    return scale.masked_fill_(scale == 0, 1)
