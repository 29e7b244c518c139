"""Round to nearest: every weight to the closest value its format has. Needs no calibration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qbench.formats.base import Format
from qbench.solvers.base import Solution, Solver

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Nearest(Solver):
    """Plain rounding (RTN)."""

    name: ClassVar[str] = "nearest"

    def solve(self, weight: torch.Tensor, format: Format, hessian: torch.Tensor | None) -> Solution:
        return Solution(format.quantize(weight))
