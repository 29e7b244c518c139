"""Round to nearest: every weight to the closest value its format has. No calibration, unless errors are weighed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qbench.formats.base import Format, Params
from qbench.solvers import search
from qbench.solvers.base import Solution, Solver, masked
from qbench.solvers.search import Search

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Nearest(Solver):
    """Plain rounding (RTN).

    `search`: each block's range as it is, or shrunk to the least error. `importance`: where the range or the format's
    own parameters are searched, an input column's error counts by its mean square over the calibration tokens.
    """

    name: ClassVar[str] = "nearest"

    search: Search = "minmax"
    importance: bool = False

    @property
    def uses_hessian(self) -> bool:
        return self.importance

    def refusal(self, format: Format) -> str | None:
        if self.importance and self.search == "minmax" and not format.weighs_importance:
            return f"importance changes nothing where no range is searched, as in {format}; allowed: search: mse, " \
                   "or GGUF's block types."  # fmt: skip
        return search.refusal(self.search, format)

    def solve(
        self,
        weight: torch.Tensor,
        format: Format,
        hessian: torch.Tensor | None,
        *,
        shared: Params | None = None,
        mask: torch.Tensor | None = None,
    ) -> Solution:
        importance = hessian.diagonal() if hessian is not None else None
        weight = masked(weight, format, mask)
        return Solution(format.quantize(weight, importance, search.fit_of(self.search, format), shared))
