"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one by one and each error is made good by the
columns still to come, weighted by the inverse Hessian of the layer's inputs.

It drives any format through fit / encode / decode. What the variants of GPTQ differ in:

- `act_order: none`: columns left to right; a group's parameters are fitted when it is reached, to the weights as
  already corrected.
- `act_order: static`: columns by falling Hessian diagonal, each with the parameters of its own original group, fitted
  beforehand. The file needs no g_idx and decoding costs nothing.
- `act_order: dynamic`: the same order, groups formed of columns in that order and fitted when reached. Often the
  lowest error; every column then carries the index of its group (g_idx).

Let ``U`` be the upper Cholesky factor of ``H^-1`` (``H^-1 = U^T U``). It is had with one factorization: if J reverses
the order and ``J H J = L L^T``, then ``U = J L^-1 J``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.errors import QbenchError
from qbench.formats.base import Format, Params
from qbench.lazy import lazy_import
from qbench.solvers.base import Solution, Solver

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

LAZY_BATCH = 128  # columns whose errors are applied to the rest of the matrix in one product
MAX_DAMPING_RETRIES = 10  # the damping is doubled each time: up to 1024 times `percdamp`


@dataclass(frozen=True)
class GPTQ(Solver):
    """Second-order rounding. `percdamp` is the share of the Hessian's mean diagonal that is added to the diagonal."""

    name: ClassVar[str] = "gptq"

    percdamp: float = 0.01
    act_order: Literal["none", "static", "dynamic"] = "static"

    def __post_init__(self) -> None:
        if not 0 < self.percdamp <= 1:
            raise QbenchError(f"solver gptq: percdamp is {self.percdamp}; allowed: above 0 and up to 1.")

    @property
    def uses_hessian(self) -> bool:
        return True

    def solve(self, weight: torch.Tensor, format: Format, hessian: torch.Tensor | None) -> Solution:
        assert hessian is not None, "GPTQ needs the Hessian of the layer's inputs"
        hessian = hessian.clone()
        diagonal = hessian.diagonal()
        dead = diagonal == 0
        diagonal[dead] = 1
        weight = weight.masked_fill(dead, 0)
        order = torch.argsort(diagonal, descending=True, stable=True) if self.act_order != "none" else None
        if order is not None:
            hessian = hessian[order][:, order]
        factor, damping = self._inverse_factor(hessian)
        if factor is None:
            quantized = format.quantize(weight)
            why = f"Hessian not positive definite with damping up to {damping:.3g}"
            return Solution(quantized, damping, int(dead.sum()), fallback=why)
        groups = _Groups(format, weight, order, refit=self.act_order != "static")
        codes = _round_columns(weight if order is None else weight[:, order], factor, format, groups)
        g_idx = None
        if order is not None:
            inverse = torch.argsort(order)
            codes = codes[:, inverse]
            if groups.refit and groups.count > 1:
                g_idx = (torch.arange(weight.shape[1], device=weight.device) // groups.size)[inverse]
        return Solution(format.pack(codes, groups.params(), g_idx), damping, int(dead.sum()))

    def _inverse_factor(self, hessian: torch.Tensor) -> tuple[torch.Tensor | None, float]:
        """The upper Cholesky factor of the damped inverse, and the damping that made it positive definite."""
        mean = hessian.diagonal().mean()
        damping = self.percdamp
        for attempt in range(MAX_DAMPING_RETRIES + 1):
            damping = self.percdamp * 2**attempt
            damped = hessian.clone()
            damped.diagonal().add_(damping * mean)
            lower, failed = torch.linalg.cholesky_ex(damped.flip(0, 1))
            if failed == 0:
                identity = torch.eye(lower.shape[0], dtype=lower.dtype, device=lower.device)
                factor = torch.linalg.solve_triangular(lower, identity, upper=False).flip(0, 1)
                if bool(torch.isfinite(factor).all()):
                    return factor.contiguous(), damping
        return None, damping


class _Groups:
    """The parameters of each group of columns; fitted beforehand, or when the group is reached (`refit`)."""

    def __init__(self, format: Format, weight: torch.Tensor, order: torch.Tensor | None, *, refit: bool) -> None:
        width = weight.shape[1]
        self.format = format
        self.size = format.block_size(width)
        self.count = -(-width // self.size)
        self.refit = refit and self.count > 1
        self.fitted: list[Params] = []
        self.shared = format.shared(weight)
        columns = range(width) if order is None or self.refit else order.tolist()
        self.group_of = [column // self.size for column in columns]  # by position in the order of solving
        self.offset_of = [column % self.size for column in columns]
        if not self.refit:
            self.fitted = [format.fit(part, self.shared) for part in torch.split(weight, self.size, 1)]

    def at(self, position: int, upcoming: torch.Tensor) -> Params:
        """Parameters of the column at `position`; `upcoming` ``[out, n]`` are the weights from there on."""
        group = self.group_of[position]
        if self.refit and group == len(self.fitted):
            self.fitted.append(self.format.fit(upcoming[:, : self.size], self.shared))
        offset = self.offset_of[position]
        return self.format.spread(self.fitted[group], offset, offset + 1)

    def params(self) -> Params:
        """All parameters side by side, group after group."""
        return {key: torch.cat([params[key] for params in self.fitted], 1) for key in self.fitted[0]}


def _round_columns(weight: torch.Tensor, factor: torch.Tensor, format: Format, groups: _Groups) -> torch.Tensor:
    """Codes ``[out, in]`` of `weight` (columns in the order of solving) under the inverse factor `factor`."""
    rest = weight.T.contiguous()  # [in, out]: a column of the weight is contiguous
    codes = []
    for start, stop in _batches(rest.shape[0], groups):
        batch = rest[start:stop]
        errors = torch.empty_like(batch)
        for i in range(stop - start):
            column = batch[i].unsqueeze(1)  # [out, 1]
            params = groups.at(start + i, batch[i:].T if groups.size <= stop - start else rest[start + i :].T)
            code = format.encode(column, params)
            codes.append(code)
            row = factor[start + i, start + i : stop]
            errors[i] = (batch[i] - format.decode(code, params).squeeze(1)) / row[0]
            batch[i:].addr_(row, errors[i], alpha=-1)
        rest[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    return torch.cat(codes, 1)


def _batches(width: int, groups: _Groups) -> Iterator[tuple[int, int]]:
    """Runs of about `LAZY_BATCH` columns. A group that is fitted when reached begins with every earlier error applied:
    it lies in one run, or starts one."""
    size = groups.size if groups.refit else LAZY_BATCH
    if size <= LAZY_BATCH:
        step = LAZY_BATCH // size * size
        yield from ((i, min(i + step, width)) for i in range(0, width, step))
        return
    for start in range(0, width, size):
        end = min(start + size, width)
        yield from ((i, min(i + LAZY_BATCH, end)) for i in range(start, end, LAZY_BATCH))
