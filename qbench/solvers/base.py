"""How the codes of a weight are chosen, given its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from qbench.errors import QbenchError
from qbench.formats.base import FORMATS, Format, Params, QuantizedTensor
from qbench.registry import Registry

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Solution:
    """A solved weight and what the report should say of how it went."""

    quantized: QuantizedTensor
    damping: float | None = None  # the share of the Hessian's mean diagonal that was added, where one was used
    dead_columns: int = 0  # input columns no calibration token ever excited
    fallback: str | None = None  # why plain rounding was used instead, when it was


class Solver(ABC):
    """Base of every solver. Subclasses are frozen dataclasses whose fields are plain YAML values."""

    name: ClassVar[str]
    blockwise: ClassVar[bool] = False  # codes are chosen for all linears of a decoder block together, from its output

    @property
    def uses_hessian(self) -> bool:
        """Needs calibration statistics, taken after earlier linears were quantized."""
        return False

    def refusal(self, format: Format) -> str | None:
        """Why the solver cannot work with `format`, and with which it can; None when it can."""
        return None

    @abstractmethod
    def solve(
        self,
        weight: torch.Tensor,
        format: Format,
        hessian: torch.Tensor | None,
        *,
        shared: Params | None = None,
        mask: torch.Tensor | None = None,
    ) -> Solution:
        """Codes for a float32 `weight` ``[out, in]``.

        `hessian` is ``[in, in]`` float32, the mean of ``x x^T`` over calibration tokens; None unless `uses_hessian`.
        `shared` replaces ``format.shared(weight)``, for weights that must have it in common. Where the bool `mask`
        ``[out, in]`` is False the decoded weight is exactly 0. Raises `QbenchError` when `format` has no exact zero.
        """

    def solve_together(
        self,
        weights: Sequence[torch.Tensor],
        format: Format,
        hessian: torch.Tensor | None,
        *,
        shared: Sequence[Params],
        masks: Sequence[torch.Tensor | None],
    ) -> list[Solution]:
        """`solve` for each of `weights` that read one tensor, with their own `shared` parameters and `masks`."""
        each = zip(weights, shared, masks, strict=True)
        return [self.solve(weight, format, hessian, shared=own, mask=mask) for weight, own, mask in each]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON: ``{"name": ..., **fields}``."""
        return {"name": self.name, **asdict(self)}  # type: ignore[call-overload]


def masked(weight: torch.Tensor, format: Format, mask: torch.Tensor | None) -> torch.Tensor:
    """`weight` with 0 where `mask` is False. Raises `QbenchError` when `format` cannot hold the zeros."""
    if mask is None:
        return weight
    if (why := zero_refusal(format)) is not None:
        raise QbenchError(f"{why}.")
    return weight.masked_fill(~mask, 0)


def zero_refusal(format: Format) -> str | None:
    """Why pruned weights cannot be stored in `format`, and in which they can; None when they can."""
    if format.holds_zero:
        return None
    with_integers = {"int": "int with zero_point_dtype uint8"}
    holding = [with_integers.get(name, name) for name in FORMATS.names() if FORMATS.get(name)().holds_zero]
    return f"format {format.name} has no exact zero, so pruned weights would come back; allowed: {', '.join(holding)}"


SOLVERS = Registry(
    "solver",
    {
        "nearest": "qbench.solvers.nearest:Nearest",
        "gptq": "qbench.solvers.gptq:GPTQ",
        "hqq": "qbench.solvers.hqq:HQQ",
        "signround": "qbench.solvers.signround:SignRound",
    },
)


def solver_from_dict(fields: dict[str, Any]) -> Solver:
    """The inverse of `Solver.to_dict`. Raises `QbenchError` on an unknown name, key or value."""
    from qbench.formats.parse import build

    solver: Solver = build(SOLVERS, fields)
    return solver
