"""E2M1, the 4-bit float of MXFP4 and NVFP4: sign in bit 3, magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 (OCP MX v1.0)."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

E2M1_MAX = 6.0
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def e2m1_codes(values: torch.Tensor) -> torch.Tensor:
    """The uint8 code (0 to 15) nearest to each float32 value: ties to the even code, beyond 6 the largest.

    A negative value that rounds to zero keeps its sign (code 8); a zero of either sign is code 0.
    """
    magnitude = torch.bucketize(values.abs(), _bounds(values.device))
    return (magnitude + 8 * (values < 0)).to(torch.uint8)


@lru_cache
def _bounds(device: torch.device) -> torch.Tensor:
    """Midpoints; a value equal to one goes down, so those whose upper code is even lie one float lower."""
    bounds = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    bounds[1::2] = torch.nextafter(bounds[1::2], torch.zeros(()))
    return bounds.to(device)
