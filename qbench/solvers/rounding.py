"""A weight whose rounding is learned: an offset for each weight and a range for each block, in any format.

What is rounded is ``w + v * step`` with v in [-0.5, 0.5], where `step` is the distance between the format's levels
around ``w``. A block's parameters are fitted to its weights times `low` (the negative ones) and `high` (the others),
both in [0, 1]. With ``v = 0, low = high = 1`` this is plain rounding.

Gradients are taken as if rounding changed nothing (straight-through), by hand: a block's levels lie between its lowest
level L and its highest H at fixed fractions T, whatever the format. A weight that falls inside has ``T - t`` for H and
``t - T`` for L with ``t = (w - L) / (H - L)``; one that is clipped follows the end it is clipped to. Where one scale
makes both ends, the end with the larger weight moves it (as autograd has it through ``max(|low|, high)``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from qbench.formats.base import Format, Params, QuantizedTensor, repeated, runs_of_blocks
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

BEYOND = 1e30  # is encoded as the lowest or highest code of any block

TIE = 1e-5  # half a step above the highest level is clipped, half a step below the lowest is not (halves to even)


class Rounding:
    """The learned rounding of a float32 `weight` ``[out, in]`` in `format`; weights outside `mask` are left at 0.

    `shared` replaces ``format.shared(weight)``. Without `ranges` only the offsets are learned.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        format: Format,
        *,
        ranges: bool = True,
        shared: Params | None = None,
        mask: torch.Tensor | None = None,
    ) -> None:
        self.format, self.shape, self.ranges = format, (weight.shape[0], weight.shape[1]), ranges
        shared = format.shared(weight) if shared is None else shared
        self.runs = [
            _Run(format, weight, start, stop, shared, mask)
            for start, stop in runs_of_blocks(weight.shape[1], format.block_size(weight.shape[1]))
        ]

    def decoded(self) -> torch.Tensor:
        """The float32 ``[out, in]`` weight under the present offsets and ranges."""
        return torch.cat([run.round(self.ranges).decoded.view(self.shape[0], -1) for run in self.runs], 1)

    def step(self, gradient: torch.Tensor, lr: float) -> None:
        """Moves everything by `lr` against the sign of its gradient, from the one of what `decoded` gave last."""
        for run in self.runs:
            run.step(gradient[:, run.start : run.stop].reshape(run.columns.shape), lr, self.ranges)

    def keep(self) -> None:
        """Remembers the present offsets and ranges as the ones to return to."""
        for run in self.runs:
            run.kept = run.state()

    def restore(self) -> None:
        """Goes back to what was kept last; to plain rounding if nothing was."""
        for run in self.runs:
            run.offset, run.low, run.high = (value.clone() for value in run.kept)

    def reset(self) -> None:
        """Goes back to plain rounding."""
        for run in self.runs:
            run.reset()

    def quantized(self) -> QuantizedTensor:
        """The stored form of the weight under the present offsets and ranges."""
        rounded = [run.round(self.ranges) for run in self.runs]
        rows = self.shape[0]
        codes = torch.cat([part.codes.reshape(rows, -1) for part in rounded], 1)
        params = {k: torch.cat([part.params[k].reshape(rows, -1) for part in rounded], 1) for k in rounded[0].params}
        return self.format.pack(codes, params)


@dataclass
class _Rounded:
    """Blocks under one choice of offsets and ranges. `lowest` and `highest` level broadcast against them."""

    params: Params
    codes: torch.Tensor
    decoded: torch.Tensor
    lowest: torch.Tensor
    highest: torch.Tensor
    step: torch.Tensor


class _Run:
    """Columns ``start..stop`` of a weight, whole blocks or the partial one, as ``[blocks, n]``."""

    def __init__(
        self, format: Format, weight: torch.Tensor, start: int, stop: int, shared: Params, mask: torch.Tensor | None
    ) -> None:
        self.format, self.start, self.stop, self.rows = format, start, stop, weight.shape[0]
        n = min(format.block_size(weight.shape[1]), stop - start)
        self.columns = weight[:, start:stop].reshape(-1, n)
        self.mask = None if mask is None else mask[:, start:stop].reshape(-1, n)
        self.shared = repeated(shared, len(self.columns) // self.rows)
        self.table, self.two_sided = _levels(format)
        self.table = self.table.to(weight.device)
        self.even = bool((self.table.diff() * (len(self.table) - 1) - 1).abs().max() < 1e-3)
        self.reset()

    def reset(self) -> None:
        self.offset = torch.zeros_like(self.columns)
        self.low = torch.ones_like(self.columns[:, :1])
        self.high = torch.ones_like(self.low)
        self.kept = self.state()

    def state(self) -> tuple[torch.Tensor, ...]:
        return self.offset.clone(), self.low.clone(), self.high.clone()

    def round(self, ranges: bool) -> _Rounded:
        columns, format = self.columns, self.format
        source = columns * torch.where(columns < 0, self.low, self.high) if ranges else columns
        params = format.fit(source, self.shared)
        spread = format.spread(params, 0, columns.shape[1])
        lowest, highest = _ends(format, columns[:, :1], spread)
        step = self._step(lowest, highest)
        codes = format.encode(columns + self.offset * step, spread)
        self.now = _Rounded(params, codes, format.decode(codes, spread), lowest, highest, step)
        return self.now

    def step(self, gradient: torch.Tensor, lr: float, ranges: bool) -> None:
        now, columns = self.now, self.columns
        shifted = columns + self.offset * now.step
        inside = (shifted > now.lowest - (0.5 + TIE) * now.step) & (shifted < now.highest + (0.5 - TIE) * now.step)
        if ranges:
            span = _positive(now.highest - now.lowest)
            if self.two_sided:
                to_high = (now.decoded - now.lowest - inside * (columns - now.lowest)) / span
                to_low = (now.highest - now.decoded - inside * (now.highest - columns)) / span
                high = self._by_block(gradient * to_high * now.highest)
                low = self._by_block(gradient * to_low * now.lowest)
            else:
                scale = self._by_block(gradient * (now.decoded - inside * columns))
                negative = -columns.amin(1, keepdim=True) * self.low > columns.amax(1, keepdim=True) * self.high
                low, high = scale * negative, scale * ~negative
            self.low = (self.low - lr * low.sign()).clamp_(0, 1)
            self.high = (self.high - lr * high.sign()).clamp_(0, 1)
        moves = gradient.sign().mul_(inside if self.mask is None else inside & self.mask)
        self.offset.sub_(moves, alpha=lr).clamp_(-0.5, 0.5)

    def _step(self, lowest: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
        """The distance of the two levels around each weight."""
        span = highest - lowest
        if self.even:
            return span / (len(self.table) - 1)
        above = torch.bucketize((self.columns - lowest) / _positive(span), self.table).clamp_(1, len(self.table) - 1)
        return span * self.table.diff()[above - 1]

    def _by_block(self, values: torch.Tensor) -> torch.Tensor:
        """The sum of each block ``[blocks, 1]``; where rows share their parameters, over all rows."""
        total = values.sum(1, keepdim=True)
        if not self.format.rows_share:
            return total
        return total.view(self.rows, -1).sum(0, keepdim=True).expand(self.rows, -1).reshape(-1, 1)


def _positive(span: torch.Tensor) -> torch.Tensor:
    return torch.where(span > 0, span, 1.0)


def _ends(format: Format, column: torch.Tensor, spread: Params) -> tuple[torch.Tensor, torch.Tensor]:
    """The lowest and the highest level of each of the blocks with a `column` ``[blocks, 1]``."""
    below, above = (format.decode(format.encode(torch.full_like(column, x), spread), spread) for x in (-BEYOND, BEYOND))
    return torch.minimum(below, above), torch.maximum(below, above)


@lru_cache
def _levels(format: Format) -> tuple[torch.Tensor, bool]:
    """The levels of a block as ascending fractions from 0 to 1, and whether its ends follow the least and the largest
    weight each by itself. Found by encoding float16's numbers, which are dense enough for 8-bit codes of any kind."""
    sweep = torch.arange(1 << 15, dtype=torch.int16).view(torch.float16).float()
    sweep = sweep[torch.isfinite(sweep)] / 20000
    sweep = torch.cat([-sweep, sweep]).unsqueeze(0)
    spans = []
    for low in (0.0, -1.0):
        columns = torch.ones(1, format.block_size(256))
        columns[:, ::2] = low
        params = format.spread(format.fit(columns, format.shared(columns)), 0, 1)
        lowest, highest = _ends(format, columns[:, :1], params)
        spans.append(float(highest - lowest))
    levels = torch.unique(format.decode(format.encode(sweep, params), params))
    return (levels - levels[0]) / (levels[-1] - levels[0]), spans[0] < 0.75 * spans[1]
