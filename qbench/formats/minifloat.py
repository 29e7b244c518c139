"""Rounding to small floats in float32 arithmetic: the values that a cast would give, without the cast.

A processor casts to an 8-bit float one value at a time. Here a value is divided by the distance of its neighbours, a
power of two read off its own exponent, rounded to a whole number (ties to even) and multiplied back: all exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True)
class MiniFloat:
    """A small float: bits of mantissa, exponent of its smallest normal value, largest value."""

    mantissa_bits: int
    min_exponent: int
    largest: float

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """The nearest values of this kind to float32 `values`, ties to even, saturating."""
        values = values.clamp(-self.largest, self.largest)
        power = (values.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
        step = power.clamp_(min=2.0**self.min_exponent).mul_(2.0**-self.mantissa_bits)
        return values.div_(step).round_().mul_(step)


E4M3 = MiniFloat(3, -6, 448.0)
E5M2 = MiniFloat(2, -14, 57344.0)
E2M1 = MiniFloat(1, 0, 6.0)
ELEMENTS = {"e4m3": E4M3, "e5m2": E5M2}
