"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one by one and each error is made good by the
columns still to come, as the Hessian of the layer's inputs says.

It drives any format through fit / encode / decode. What the variants of GPTQ differ in:

- `act_order: none`: columns left to right; a group's parameters are fitted when it is reached, to the weights as
  already corrected.
- `act_order: static`: columns by falling Hessian diagonal, each with the parameters of its own original group, fitted
  beforehand. The file needs no g_idx and decoding costs nothing.
- `act_order: dynamic`: the same order, groups formed of columns in that order and fitted when reached. Often the
  lowest error; every column then carries the index of its group (g_idx).

The paper works with the upper Cholesky factor ``U`` of ``H^-1``. Its inverse ``R = U^-1`` is the upper factor of H
itself, ``H = R R^T``, and is enough: when the columns S have the errors ``E`` (weight minus decoded), the best values
of the next columns B are ``W_B + E R_SB R_BB^-1``, and inside B the paper's steps use ``U_BB = R_BB^-1``. So H is
factored once, in place, and only small blocks are inverted (QuIP, arXiv 2307.13304, shows the two to be the same).

With the columns stored last to first, the transposed R is what an ordinary Cholesky factorization leaves in memory:
below, row i of every ``[in, ...]`` matrix belongs to the i-th column from the end of the order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.errors import QbenchError
from qbench.formats.base import Format, Params
from qbench.lazy import lazy_import
from qbench.solvers import search
from qbench.solvers.base import Solution, Solver, masked
from qbench.solvers.search import Search

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

BATCH = 128  # columns that take the errors of all columns before them in one product
RUN = 16  # columns inside a batch whose errors are applied to the rest of the batch in one product
MAX_DAMPING_RETRIES = 10  # the damping is doubled each time: up to 1024 times `percdamp`


@dataclass(frozen=True)
class GPTQ(Solver):
    """Second-order rounding. `percdamp` is the share of the Hessian's mean diagonal that is added to the diagonal.

    `search`: each block's range as it is, or shrunk to the least error of plain rounding.
    """

    name: ClassVar[str] = "gptq"

    percdamp: float = 0.01
    act_order: Literal["none", "static", "dynamic"] = "static"
    search: Search = "minmax"

    def __post_init__(self) -> None:
        if not 0 < self.percdamp <= 1:
            raise QbenchError(f"solver gptq: percdamp is {self.percdamp}; allowed: above 0 and up to 1.")

    @property
    def uses_hessian(self) -> bool:
        return True

    def refusal(self, format: Format) -> str | None:
        if self.act_order == "dynamic" and not format.any_order:
            return f"act_order dynamic scatters a group's columns, which format {format.name} cannot store; " \
                   "allowed: none, static."  # fmt: skip
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
        own = format.shared(masked(weight, format, mask)) if shared is None else shared
        return self.solve_together([weight], format, hessian, shared=[own], masks=[mask])[0]

    def solve_together(
        self,
        weights: Sequence[torch.Tensor],
        format: Format,
        hessian: torch.Tensor | None,
        *,
        shared: Sequence[Params],
        masks: Sequence[torch.Tensor | None],
    ) -> list[Solution]:
        """The Hessian is factored once, and weights whose rows do not share parameters are rounded as one."""
        assert hessian is not None, "GPTQ needs the Hessian of the layer's inputs"
        factored = self._factored(hessian)
        together = [range(i, i + 1) for i in range(len(weights))] if format.rows_share else [range(len(weights))]
        solutions = []
        for part in together:
            stack = _Stack([weights[i] for i in part], [shared[i] for i in part], [masks[i] for i in part])
            solutions += self._solve(stack, format, factored)
        return solutions

    def _factored(self, hessian: torch.Tensor) -> _Factored:
        diagonal = hessian.diagonal()
        dead = diagonal == 0
        diagonal = diagonal.masked_fill(dead, 1)
        order = torch.arange(len(diagonal), device=hessian.device)
        if self.act_order != "none":
            order = torch.argsort(diagonal, descending=True, stable=True)
        backwards, mean, damping = order.flip(0), diagonal.mean(), self.percdamp
        for attempt in range(MAX_DAMPING_RETRIES + 1):
            damping = self.percdamp * 2**attempt
            damped = hessian[backwards.unsqueeze(1), backwards]
            damped.diagonal().copy_(diagonal[backwards] + damping * mean)
            failed = torch.empty((), dtype=torch.int32, device=hessian.device)
            torch.linalg.cholesky_ex(damped.mT, out=(damped.mT, failed))  # in place: the transposed lower factor
            if failed == 0:
                return _Factored(order, dead, damped, damping)
        return _Factored(order, dead, None, damping)

    def _solve(self, stack: _Stack, format: Format, factored: _Factored) -> list[Solution]:
        order, dead, damping = factored.order, factored.dead, factored.damping
        weight = stack.weight.masked_fill_(dead, 0)
        kept = masked(weight, format, stack.mask)
        if factored.factor is None:
            fit = search.fit_of(self.search, format)
            why = f"Hessian not positive definite with damping up to {damping:.3g}"
            rounded = [format.quantize(part, fit=fit, shared=own) for part, own in stack.apart(kept)]
            return [Solution(quantized, damping, int(dead.sum()), fallback=why) for quantized in rounded]
        backwards = order.flip(0)
        keep = None if stack.mask is None else stack.mask.T.index_select(0, backwards)
        groups = _Groups(self, format, kept, order, stack.shared, keep)
        rest = weight.T.index_select(0, backwards)
        codes = _round_columns(rest, factored.factor, format, groups)
        inverse = torch.argsort(order)
        g_idx = None
        if self.act_order == "dynamic" and groups.count > 1:
            g_idx = (torch.arange(len(order), device=order.device) // groups.size)[inverse]
        params = [torch.split(value, stack.rows) for value in groups.params().values()]
        parts = zip(torch.split(codes[inverse].T, stack.rows), *params, strict=True)
        keys = list(groups.fitted[0])
        packed = [format.pack(own.contiguous(), dict(zip(keys, found, strict=True)), g_idx) for own, *found in parts]
        return [Solution(quantized, damping, int(dead.sum())) for quantized in packed]


@dataclass(frozen=True)
class _Factored:
    """The Hessian's transposed upper factor R with columns last to first, of which only the upper triangle is meant.

    `factor` is None if no damping made the Hessian positive definite; `damping` is the last one tried.
    """

    order: torch.Tensor  # of solving, int64 [in]
    dead: torch.Tensor  # bool [in]: columns no calibration token ever excited
    factor: torch.Tensor | None
    damping: float


class _Stack:
    """Weights one below the other (a copy), with the shared parameters of each row where weights differ in them."""

    def __init__(
        self, weights: Sequence[torch.Tensor], shared: Sequence[Params], masks: Sequence[torch.Tensor | None]
    ) -> None:
        self.rows = [len(weight) for weight in weights]
        self.weight = torch.cat([*weights])
        self.each = shared
        self.shared = shared[0]
        if len(weights) > 1:
            of_rows = [
                {k: v.expand(rows, -1) for k, v in own.items()} for own, rows in zip(shared, self.rows, strict=True)
            ]
            self.shared = {key: torch.cat([own[key] for own in of_rows]) for key in shared[0]}
        self.mask = None
        if any(mask is not None for mask in masks):
            pairs = zip(weights, masks, strict=True)
            self.mask = torch.cat([torch.ones_like(w, dtype=torch.bool) if m is None else m for w, m in pairs])

    def apart(self, weight: torch.Tensor) -> Iterator[tuple[torch.Tensor, Params]]:
        """The rows of each weight, out of a stack like `weight`, and its shared parameters."""
        return zip(torch.split(weight, self.rows), self.each, strict=True)


class _Groups:
    """The parameters of each group of columns; fitted beforehand, or when the group is reached (`refit`).

    `keep` ``[in, out]``, False for weights that become 0, has its rows last to first like all of ``[in, ...]`` here.
    """

    def __init__(
        self,
        solver: GPTQ,
        format: Format,
        weight: torch.Tensor,
        order: torch.Tensor,
        shared: Params,
        keep: torch.Tensor | None,
    ) -> None:
        width = weight.shape[1]
        self.keep = keep
        self.format = format
        self.fit = search.fit_of(solver.search, format)
        self.size = format.block_size(width)
        self.count = -(-width // self.size)
        self.refit = solver.act_order != "static" and self.count > 1
        self.shared = shared
        self.fitted: list[Params] = []
        columns = range(width) if self.refit else order.tolist()
        self.group_of = [column // self.size for column in columns]  # by position in the order of solving
        self.offset_of = [column % self.size for column in columns]
        if not self.refit:
            self.fitted = [self.fit(part, self.shared, None) for part in torch.split(weight, self.size, 1)]

    def at(self, position: int, upcoming: torch.Tensor) -> Params:
        """Parameters of the column at `position`; `upcoming` ``[n, out]`` are the batch's weights up to there."""
        group = self.group_of[position]
        if self.refit and group == len(self.fitted):
            columns = upcoming[-self.size :]
            if self.keep is not None:
                last = len(self.keep) - position
                columns = columns * self.keep[last - len(columns) : last]
            self.fitted.append(self.fit(columns.flip(0).T, self.shared, None))
        offset = self.offset_of[position]
        return self.format.spread(self.fitted[group], offset, offset + 1)

    def params(self) -> Params:
        """All parameters side by side, group after group."""
        return {key: torch.cat([params[key] for params in self.fitted], 1) for key in self.fitted[0]}


def _round_columns(rest: torch.Tensor, factor: torch.Tensor, format: Format, groups: _Groups) -> torch.Tensor:
    """Codes ``[in, out]`` in the order of solving; `rest` ``[in, out]`` holds the weights and is overwritten."""
    codes: list[torch.Tensor] = []
    for start, stop in _batches(len(rest), groups):
        block = factor[start:stop, start:stop]
        identity = torch.eye(stop - start, dtype=factor.dtype, device=factor.device)
        inverse = torch.linalg.solve_triangular(block, identity, upper=True)  # U_BB transposed
        batch = rest[start:stop]  # the errors are what stays in `rest`
        corrected = torch.addmm(batch, inverse, factor[start:stop, stop:] @ rest[stop:])
        steps = inverse.T.contiguous()
        for end in range(stop - start, 0, -RUN):
            run = range(max(end - RUN, 0), end)
            codes += _round_run(corrected, batch, steps, run, len(rest) - stop, format, groups)
    return torch.stack(codes)


def _round_run(
    corrected: torch.Tensor,
    batch: torch.Tensor,
    steps: torch.Tensor,
    run: range,
    done: int,
    format: Format,
    groups: _Groups,
) -> list[torch.Tensor]:
    """Codes of the rows `run` of a batch, last to first; the batch comes after `done` columns.

    `corrected` holds the batch's weights with all errors so far applied, `batch` the original ones, which become the
    errors. Row i of `steps` is what one unit of column i's error, over ``steps[i, i]``, takes from the rows before it.
    """
    begin, end = run.start, run.stop
    keep = None if groups.keep is None else groups.keep[-done - len(batch) :]
    codes = []
    errors = torch.empty_like(corrected[begin:end])
    for i in reversed(run):
        params = groups.at(done + len(batch) - 1 - i, corrected[: i + 1])
        column = corrected[i] if keep is None else corrected[i] * keep[i]
        code = format.encode(column.unsqueeze(1), params)
        codes.append(code.squeeze(1))
        decoded = format.decode(code, params).squeeze(1)
        batch[i].sub_(decoded)
        step = steps[i]
        error = torch.sub(corrected[i], decoded, out=errors[i - begin]).div_(step[i])
        if i > begin:
            corrected[begin:i].addr_(step[begin:i], error, alpha=-1)
    corrected[:begin].addmm_(steps[begin:end, :begin].T, errors, alpha=-1)
    return codes


def _batches(width: int, groups: _Groups) -> Iterator[tuple[int, int]]:
    """Runs of rows, last to first, of about `BATCH`. A group that is fitted when reached lies in one run."""
    size = groups.size if groups.refit else 1
    step = max(BATCH // size * size, size)
    for done in range(0, width, step):
        yield max(width - done - step, 0), width - done
