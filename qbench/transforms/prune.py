"""Pruning: which weights of a linear become exactly 0 before the others are rounded.

A mask is chosen right before a linear is solved, from its weight as it then is (scaled, rotated) and from its inputs,
and the solver keeps at 0 what is masked. With GPTQ as the solver the errors of pruned weights are made good by the
columns still to come, as in SparseGPT (arXiv 2301.00774).
"""

from __future__ import annotations

import re
import reprlib
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qbench.errors import QbenchError
from qbench.lazy import lazy_import
from qbench.registry import Registry

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")


@dataclass(frozen=True)
class Pruning(ABC):
    """Base of every way of pruning: what a row loses is the same in all of them, how weights are scored is not.

    `pattern` "N:M": of each M neighbouring input columns the N with the highest score stay (2:4 is what sparse tensor
    cores multiply, arXiv 2104.08378). `sparsity` instead: the share of each row, of the lowest scores, that goes.
    """

    name: ClassVar[str]
    uses_inputs: ClassVar[bool]

    pattern: str | None = None
    sparsity: float | None = None

    def __post_init__(self) -> None:
        if (self.pattern is None) == (self.sparsity is None):
            raise QbenchError(
                f"prune {self.name}: pattern is {reprlib.repr(self.pattern)}, sparsity is {self.sparsity}; "
                'allowed: one of them, such as pattern "2:4" or sparsity 0.5, the other null.'
            )
        if self.pattern is not None:
            numbers = re.fullmatch(r"(\d{1,4}):(\d{1,4})", self.pattern)
            if numbers is None or not 0 < int(numbers[1]) < int(numbers[2]):
                raise QbenchError(
                    f'prune {self.name}: pattern is {reprlib.repr(self.pattern)}; '
                    'allowed: "N:M", of M neighbouring weights N stay, 0 < N < M < 10000.'
                )  # fmt: skip
        if self.sparsity is not None and not 0 < self.sparsity < 1:
            raise QbenchError(f"prune {self.name}: sparsity is {self.sparsity}; allowed: between 0 and 1.")

    def refusal(self, in_features: int) -> str | None:
        """Why rows of `in_features` cannot be pruned so; None when they can."""
        kept, group = self._kept(in_features)
        if in_features % group:
            return f"rows of {in_features} do not divide into groups of {group}, as pattern {self.pattern} needs"
        if kept == in_features:
            return f"sparsity {self.sparsity} takes no weight from rows of {in_features}"
        return None

    def mask(self, weight: torch.Tensor, mean_square: torch.Tensor | None) -> torch.Tensor:
        """Bool ``[out, in]``, True where a float32 `weight` stays; of equal scores the leftmost.

        `mean_square` ``[in]`` is that of each input over the calibration tokens; None where no token came by.
        """
        kept, group = self._kept(weight.shape[1])
        scores = self.scores(weight, mean_square).view(-1, group)
        stays = scores.argsort(stable=True, dim=1, descending=True)[:, :kept]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(1, stays, True).view_as(weight)

    @abstractmethod
    def scores(self, weight: torch.Tensor, mean_square: torch.Tensor | None) -> torch.Tensor:
        """Non-negative ``[out, in]``: what a row loses with each weight. As `mask`."""

    def _kept(self, in_features: int) -> tuple[int, int]:
        """How many weights stay, of how many neighbours."""
        if self.pattern is not None:
            kept, _, group = self.pattern.partition(":")
            return int(kept), int(group)
        assert self.sparsity is not None
        return in_features - int(in_features * self.sparsity), in_features

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON: ``{"name": ..., **fields}``."""
        return {"name": self.name, **asdict(self)}


@dataclass(frozen=True)
class Magnitude(Pruning):
    """The smallest weights go, whatever they are multiplied with. No calibration."""

    name: ClassVar[str] = "magnitude"
    uses_inputs: ClassVar[bool] = False

    def scores(self, weight: torch.Tensor, mean_square: torch.Tensor | None) -> torch.Tensor:
        return weight.abs()


@dataclass(frozen=True)
class Wanda(Pruning):
    """Wanda (arXiv 2306.11695): the score is ``|w_ij| * ||x_j||_2``; the magnitude where no token came by."""

    name: ClassVar[str] = "wanda"
    uses_inputs: ClassVar[bool] = True

    def scores(self, weight: torch.Tensor, mean_square: torch.Tensor | None) -> torch.Tensor:
        return weight.abs() if mean_square is None else weight.abs() * mean_square.sqrt()


PRUNERS = Registry(
    "prune",
    {
        "magnitude": "qbench.transforms.prune:Magnitude",
        "wanda": "qbench.transforms.prune:Wanda",
    },
)
