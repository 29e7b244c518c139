"""Activations as 8-bit and 4-bit floats: the weight formats of the same names, applied to the rows of ``x``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.formats.activation import ActivationFormat, round_rows, static_scale
from qbench.formats.e2m1 import E2M1_MAX
from qbench.formats.float8 import ELEMENT_MAX, FP8, Element, float8_codes
from qbench.formats.mx import MXFP8, ScaleRule
from qbench.formats.nvfp4 import E4M3_MAX, NVFP4

if TYPE_CHECKING:
    import torch


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
        return static_scale(absmax, ELEMENT_MAX[self.element])

    def round(self, x: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
        if input_scale is not None:
            return (float8_codes(x.float() / input_scale, self.element).float() * input_scale).to(x.dtype)
        return round_rows(x, FP8("channel" if self.granularity == "token" else "group", self.element))


@dataclass(frozen=True)
class MXFP8Inputs(ActivationFormat):
    """8-bit floats with a power of two a 32 values, found on the fly."""

    name: ClassVar[str] = "mxfp8"

    element: Element = "e4m3"
    scale_rule: ScaleRule = "even"

    def round(self, x: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
        return round_rows(x, MXFP8(self.element, self.scale_rule))


@dataclass(frozen=True)
class NVFP4Inputs(ActivationFormat):
    """E2M1 with an E4M3 scale a 16 values on the fly, over a static float32 scale: ``absmax / (6 * 448)``."""

    name: ClassVar[str] = "nvfp4"

    @property
    def static(self) -> bool:
        return True

    def input_scale(self, absmax: torch.Tensor) -> torch.Tensor:
        return static_scale(absmax, E2M1_MAX * E4M3_MAX)

    def round(self, x: torch.Tensor, input_scale: torch.Tensor | None = None) -> torch.Tensor:
        assert input_scale is not None, "NVFP4 inputs need the calibrated scale"
        return round_rows(x, NVFP4(), {"scale_2": input_scale})
