"""Parameters for a narrower range than a block's own: large weights are clipped where that helps the many small ones.

The range is shrunk by ``p = 1 - i / 100``, i = 0 .. 79, and the candidate with the least ``sum |error|^2.4`` is kept
(the search of the original GPTQ code, arXiv 2210.17323). A format fitted to ``p * columns`` has the parameters of the
shrunk range, so any format can be searched through `Format.fit`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal

from qbench.formats.base import Fit, Format, Params
from qbench.lazy import lazy_import

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

Search = Literal["minmax", "mse"]

GRID, CANDIDATES, EXPONENT = 100, 80, 2.4
CHUNK = 1 << 17  # weights in work at a time, so that they stay in the processor's cache


def fit_of(search: Search, format: Format) -> Fit:
    """How `search` finds parameters: `minmax` is the format's own way."""
    return format.fit if search == "minmax" else partial(least_error, format)


def refusal(search: Search, format: Format) -> str | None:
    """Why `format` cannot be searched; None when it can."""
    if search == "mse" and format.rows_share:
        return f"search mse finds a scale for each row or group, and rows share theirs in {format}; allowed: minmax."
    return None


def least_error(format: Format, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None) -> Params:
    """Parameters ``[out, k]`` of the best shrunk range of each row of `columns` ``[out, n]``; as `Format.fit`."""
    rows = max(1, CHUNK // columns.shape[1])
    found = []
    for start in range(0, columns.shape[0], rows):
        part = slice(start, start + rows)
        own = {k: v if v.shape[0] == 1 else v[part] for k, v in shared.items()}
        weights = importance if importance is None or importance.shape[0] == 1 else importance[part]
        found.append(_of_rows(format, columns[part], own, weights))
    return {k: torch.cat([params[k] for params in found]) for k in found[0]}


def _of_rows(format: Format, columns: torch.Tensor, shared: Params, importance: torch.Tensor | None) -> Params:
    best: Params = {}
    least = None
    for i in range(CANDIDATES):
        params = format.fit(columns * (1 - i / GRID), shared, importance)
        spread = format.spread(params, 0, columns.shape[1])
        errors = format.decode(format.encode(columns, spread), spread).sub_(columns).abs_().pow_(EXPONENT)
        if importance is not None:
            errors *= importance
        error = errors.sum(1, keepdim=True)
        if least is None:
            best, least = params, error
        else:
            better = error < least
            best = {k: torch.where(better, params[k], best[k]) for k in best}
            least = torch.minimum(error, least)
    return best
