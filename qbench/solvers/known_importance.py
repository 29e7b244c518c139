"""Plain rounding under an importance of the input columns that is known beforehand, from an importance matrix."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qbench.formats.base import Format, Params
from qbench.solvers import search
from qbench.solvers.base import Solution, Solver, masked
from qbench.solvers.nearest import Nearest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class KnownImportance(Solver):
    """`nearest` (one with `importance`) under `known` ``[in]``; None where nothing is known, which is reported."""

    name: ClassVar[str] = Nearest.name

    nearest: Nearest
    known: torch.Tensor | None

    def refusal(self, format: Format) -> str | None:
        return self.nearest.refusal(format)

    def solve(
        self,
        weight: torch.Tensor,
        format: Format,
        hessian: torch.Tensor | None,
        *,
        shared: Params | None = None,
        mask: torch.Tensor | None = None,
    ) -> Solution:
        known = None if self.known is None else self.known.to(weight.device)
        weight = masked(weight, format, mask)
        quantized = format.quantize(weight, known, search.fit_of(self.nearest.search, format), shared)
        return Solution(quantized, fallback="the importance matrix has no token of it" if known is None else None)
