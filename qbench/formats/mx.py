"""MXFP4 and MXFP8 (OCP Microscaling Formats v1.0): blocks of 32 weights share a power of two, stored as E8M0 (a byte:
the exponent plus 127).

How the exponent follows from the block's absmax is not settled by the specification. Three rules are in use; ``emax``
is the exponent of the largest element value (E2M1 2, E4M3 8, E5M2 15):

- ``floor``: ``floor(log2 absmax) - emax``. The specification's example. An absmax beyond the largest element value
  (7 in MXFP4 at scale 1) saturates.
- ``even``: as ``floor``, after the absmax has been rounded to one bit behind the leading one, so that from
  ``1.75 * 2^k`` on the next exponent is taken. What compressed-tensors does, for both element widths.
- ``ceil``: ``ceil(log2(absmax / largest element value))``. Nothing saturates (NVIDIA's RCEIL).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.formats.base import Format, Params, QuantizedTensor, block_absmax
from qbench.formats.e2m1 import E2M1_LEVELS, E2M1_MAX, e2m1_codes
from qbench.formats.float8 import ELEMENT_MAX, Element, float8_codes
from qbench.formats.fourbit import FourBit
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

ScaleRule = Literal["even", "floor", "ceil"]
BLOCK = 32
BIAS = 127


@dataclass(frozen=True)
class MXFP4(FourBit):
    """E2M1 codes, a power of two a block of 32."""

    name: ClassVar[str] = "mxfp4"
    levels: ClassVar[tuple[float, ...]] = E2M1_LEVELS

    scale_rule: ScaleRule = "even"

    def block_size(self, in_features: int) -> int:
        return BLOCK

    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        return {"scale": mx_scale(block_absmax(columns, self.name), E2M1_MAX, self.scale_rule)}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        return e2m1_codes(columns / params["scale"])

    def multiplier(self, params: Params) -> torch.Tensor:
        return params["scale"]

    def write_params(self, params: Params) -> Params:
        return {"scale": e8m0(params["scale"])}

    def read_params(self, parts: Params) -> Params:
        return {"scale": power_of_two(parts["scale"])}


@dataclass(frozen=True)
class MXFP8(Format):
    """8-bit float codes, a power of two a block of 32."""

    name: ClassVar[str] = "mxfp8"

    element: Element = "e4m3"
    scale_rule: ScaleRule = "even"

    def block_size(self, in_features: int) -> int:
        return BLOCK

    def fit(self, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None = None) -> Params:
        return {"scale": mx_scale(block_absmax(columns, self.name), ELEMENT_MAX[self.element], self.scale_rule)}

    def encode(self, columns: torch.Tensor, params: Params) -> torch.Tensor:
        return float8_codes(columns / params["scale"], self.element)

    def decode(self, codes: torch.Tensor, params: Params) -> torch.Tensor:
        return codes.float() * params["scale"]

    def pack(self, codes: torch.Tensor, params: Params, g_idx: torch.Tensor | None = None) -> QuantizedTensor:
        parts = {"codes": codes, "scale": e8m0(params["scale"])}
        if g_idx is not None:
            parts["g_idx"] = g_idx.to(torch.int32)
        return QuantizedTensor(self, (codes.shape[0], codes.shape[1]), parts)

    def unpack(self, parts: Params, shape: tuple[int, int]) -> tuple[torch.Tensor, Params]:
        return parts["codes"], {"scale": power_of_two(parts["scale"])}


def mx_scale(absmax: torch.Tensor, largest: float, rule: ScaleRule) -> torch.Tensor:
    """The float32 power of two, from 2^-127 to 2^127, for blocks of `absmax` and elements up to `largest`."""
    if rule == "ceil":
        mantissa, exponent = torch.frexp(absmax / largest)  # mantissa in [0.5, 1), or 0
        exponent = exponent - (mantissa == 0.5).int()
    else:
        mantissa, exponent = torch.frexp(absmax)
        up = mantissa >= 0.875 if rule == "even" else torch.zeros_like(mantissa, dtype=torch.bool)
        exponent = exponent - 1 + up.int() - (math.frexp(largest)[1] - 1)
    exponent = torch.where(absmax == 0, -BIAS, exponent).clamp(-BIAS, BIAS)
    return power_of_two((exponent + BIAS).to(torch.uint8))


def power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Float32 values of E8M0 bytes."""
    return (scale.int() << 23).clamp_(min=1 << 22).view(torch.float32)  # the exponent's bits; byte 0 is subnormal


def e8m0(scale: torch.Tensor) -> torch.Tensor:
    """The E8M0 bytes of float32 powers of two."""
    return (torch.frexp(scale).exponent - 1 + BIAS).to(torch.uint8)
