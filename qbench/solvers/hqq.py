"""HQQ (Badri & Shaji 2023, "Half-Quadratic Quantization of Large Machine Learning Models"): float zero points that
minimise the p-norm of the weights' own errors, p < 1, which cares little about a few outliers. No calibration.

The scale stays as fitted. The errors ``W - decode(encode(W))`` are split in turns into sparse outliers ``E``, by the
shrinkage operator ``sign(x) * max(|x| - |x|^(p-1) / beta, 0)``, and a rest that the zero point makes small:
``zero = mean(codes - (W - E) / scale)``, with `beta` growing by `kappa` each turn. The turns end when the mean error
over the weight no longer falls; the zero points with the least error are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from qbench.errors import QbenchError
from qbench.formats.base import Format, Params
from qbench.formats.integer import Integer
from qbench.lazy import lazy_import
from qbench.solvers.base import Solution, Solver, masked

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

CHUNK = 1 << 18  # weights in work at a time, so that they stay in the processor's cache


@dataclass(frozen=True)
class HQQ(Solver):
    """Half-quadratic zero points, for asymmetric integers whose `zero_point_dtype` is a float."""

    name: ClassVar[str] = "hqq"

    iterations: int = 20
    lp_norm: float = 0.7
    beta: float = 10.0
    kappa: float = 1.01

    def __post_init__(self) -> None:
        for field, found, allowed, fine in (
            ("iterations", self.iterations, "1 or more", self.iterations >= 1),
            ("lp_norm", self.lp_norm, "above 0 and up to 1", 0 < self.lp_norm <= 1),
            ("beta", self.beta, "above 0", self.beta > 0),
            ("kappa", self.kappa, "1 or more", self.kappa >= 1),
        ):
            if not fine:
                raise QbenchError(f"solver hqq: {field} is {found}; allowed: {allowed}.")

    def refusal(self, format: Format) -> str | None:
        if isinstance(format, Integer) and format.float_zero_point and format.granularity != "tensor":
            return None
        return (
            f"solver hqq moves zero points between codes, which {format} does not have; allowed: format int with "
            "symmetric false, zero_point_dtype float16 or float32, granularity channel or group."
        )

    def solve(
        self,
        weight: torch.Tensor,
        format: Format,
        hessian: torch.Tensor | None,
        *,
        shared: Params | None = None,
        mask: torch.Tensor | None = None,
    ) -> Solution:
        assert isinstance(format, Integer)

        def fit(columns: torch.Tensor, shared: Params, importance: torch.Tensor | None) -> Params:
            params = format.fit(columns, shared, importance)
            zero = self._zero_points(columns, params, format)
            return {**params, "zero_point": format.rounded_zero_point(zero)}

        return Solution(format.quantize(masked(weight, format, mask), fit=fit, shared=shared))

    def _zero_points(self, weight: torch.Tensor, params: Params, format: Integer) -> torch.Tensor:
        """Zero points ``[groups, 1]`` of `weight` ``[groups, n]``."""
        rows = max(1, CHUNK // weight.shape[1])
        zero = params["zero_point"]
        parts, scales = torch.split(weight, rows), torch.split(params["scale"], rows)
        best, least, beta = zero, float("inf"), self.beta
        for _ in range(self.iterations):
            updated, error = [], 0.0
            for columns, scale, old in zip(parts, scales, torch.split(zero, rows), strict=True):
                moved, distance = self._step(columns, scale, old, beta, format)
                updated.append(moved)
                error += distance
            if error >= least:
                return best
            best, least = zero, error
            zero = torch.cat(updated)
            beta *= self.kappa
        return zero

    def _step(
        self, columns: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, beta: float, format: Integer
    ) -> tuple[torch.Tensor, float]:
        """The next zero points, and the sum of absolute errors under the present ones."""
        steps = columns / scale
        codes = (steps + zero).round_().clamp_(0, format.max_code)
        errors = columns - (codes - zero) * scale
        size = errors.abs()
        outliers = (size - size.pow(self.lp_norm - 1).div_(beta)).clamp_(min=0).copysign_(errors)
        moved = codes.sub_(steps).add_(outliers.div_(scale)).mean(1, keepdim=True)
        return moved, float(size.sum(dtype=torch.float64))
