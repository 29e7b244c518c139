"""SignRound (Cheng et al., arXiv 2309.05516; the method of AutoRound): rounding and ranges are learned by signed
gradient descent. Each step moves every offset and every range by the same amount, against the sign of its gradient;
the amount falls linearly to 0.

The linears of a decoder block are learned together, so that the block's output on inputs from blocks already rounded
comes close to what the uncompressed model has there (`qbench.compress.learned`). A linear that is in no block is
learned by itself, from the Hessian of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qbench.errors import QbenchError
from qbench.formats.base import Format, Params
from qbench.lazy import lazy_import
from qbench.solvers.base import Solution, Solver, masked
from qbench.solvers.rounding import Rounding

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

NO_GAIN = "learned rounding did not lower the error"


@dataclass(frozen=True)
class SignRound(Solver):
    """Learned rounding: `iters` steps, each over `batch_rows` calibration rows in an order that `seed` decides.

    `lr` is the first step's size, in distances between levels and in shares of a range; None: ``1 / iters``.
    """

    name: ClassVar[str] = "signround"
    blockwise: ClassVar[bool] = True

    iters: int = 200
    lr: float | None = None
    batch_rows: int = 8
    ranges: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for field, found, allowed, fine in (
            ("iters", self.iters, "0 or more", self.iters >= 0),
            ("lr", self.lr, "0 or more", self.lr is None or self.lr >= 0),
            ("batch_rows", self.batch_rows, "1 or more", self.batch_rows >= 1),
        ):
            if not fine:
                raise QbenchError(f"solver signround: {field} is {found}; allowed: {allowed}.")

    @property
    def uses_hessian(self) -> bool:
        return True

    def lr_at(self, iteration: int) -> float:
        """The size of a step."""
        first = 1 / self.iters if self.lr is None else self.lr
        return first * (1 - iteration / self.iters)

    def rounding(
        self, weight: torch.Tensor, format: Format, shared: Params | None, mask: torch.Tensor | None
    ) -> Rounding:
        """The start of a float32 `weight` ``[out, in]``: plain rounding, 0 where `mask` is False."""
        return Rounding(masked(weight, format, mask), format, ranges=self.ranges, shared=shared, mask=mask)

    def solve(
        self,
        weight: torch.Tensor,
        format: Format,
        hessian: torch.Tensor | None,
        *,
        shared: Params | None = None,
        mask: torch.Tensor | None = None,
    ) -> Solution:
        assert hessian is not None, "learned rounding needs the Hessian of the layer's inputs"
        rounding = self.rounding(weight, format, shared, mask)
        least: float | None = None
        first = 0.0
        for iteration in range(self.iters):
            error = rounding.decoded() - weight
            gradient = error @ hessian
            loss = float((gradient * error).sum(dtype=torch.float64))
            if least is None or loss < least:
                first, least = (loss if least is None else first), loss
                rounding.keep()
            rounding.step(gradient, self.lr_at(iteration))
        rounding.restore()
        gained = least is not None and least < first
        return Solution(rounding.quantized(), fallback=None if gained else NO_GAIN)


@dataclass(frozen=True, eq=False)
class Learned(Solver):
    """Codes that were learned together with those of the rest of the block."""

    name: ClassVar[str] = SignRound.name

    solution: Solution

    def solve(
        self,
        weight: torch.Tensor,
        format: Format,
        hessian: torch.Tensor | None,
        *,
        shared: Params | None = None,
        mask: torch.Tensor | None = None,
    ) -> Solution:
        return self.solution
