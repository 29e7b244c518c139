"""AWQ (Lin et al., arXiv 2306.00978): channels that carry large activations are scaled up before rounding.

The scale of a channel follows the mean of its ``|x|``; how strongly, is searched on a grid for each group of linears,
by the error of what the module around them puts out. Two forms are tried:

- `activation`: ``s = mean|x|^r`` (the paper's);
- `duo`: ``s = mean|x|^r / mean|w|^(1 - r)``, with ``|w|`` relative to the largest of its block, averaged over the rows.

Either is divided by ``sqrt(max(s) min(s))``. Then, for each block of each weight, the range is narrowed to whatever
fraction gives the least error of the block's own output: rounding finer is worth clipping a few. Query and key
projections are not clipped, because their errors multiply; nor are formats whose rows share a range, or that search
their ranges themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.errors import QbenchError
from qbench.formats.base import Format
from qbench.formats.integer import Integer
from qbench.lazy import lazy_import
from qbench.transforms.base import Choice, Limits, Readers, Transform, best, clamped

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

SMALLEST = 1e-4
CLIP_STEPS = 20
MAX_SHRINK = 0.5  # the range is never narrowed to less than this
CLIP_RANGES = int(CLIP_STEPS * (1 - MAX_SHRINK))
NOT_CLIPPED = ("q_", "k_", "qkv", "query", "key", "Wqkv")


@dataclass(frozen=True)
class AWQ(Transform):
    """Activation-aware scales: `grid` strengths of each form are tried, and none at all. `clip` narrows ranges too."""

    name: ClassVar[str] = "awq"
    divides_linears: ClassVar[bool] = True

    grid: int = 20
    form: Literal["activation", "duo", "both"] = "duo"
    clip: bool = True

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise QbenchError(f"transform awq: grid is {self.grid}; allowed: 1 or more.")

    @property
    def candidates(self) -> int:
        return 1 + len(self._forms) * (self.grid - 1) + (CLIP_RANGES if self.clip else 0)

    @property
    def _forms(self) -> list[str]:
        return ["activation", "duo"] if self.form == "both" else [self.form]

    def choose(self, readers: Readers) -> Choice | None:
        unscaled = Choice(torch.ones_like(readers.mean_abs), {"form": "none", "ratio": 0.0})
        weight_mean = _relative_mean(readers.weights, readers.block_size)
        candidates = [unscaled]
        for form in self._forms:
            for ratio in (i / self.grid for i in range(1, self.grid)):
                scales = readers.mean_abs**ratio
                if form == "duo":
                    scales = scales / (weight_mean ** (1 - ratio) + SMALLEST)
                scales = scales.clamp(min=SMALLEST)
                scales = scales / (scales.max() * scales.min()).sqrt()
                candidates.append(Choice(scales, {"form": form, "ratio": ratio}))
        return best(readers, candidates)

    def limits(self, module: str, weight: torch.Tensor, format: Format, inputs: torch.Tensor) -> Limits | None:
        last = module.rpartition(".")[2]
        if not self.clip or last.startswith(NOT_CLIPPED) or format.rows_share or format.weighs_importance:
            return None
        return clip_search(weight, format, inputs)


def clip_search(weight: torch.Tensor, format: Format, inputs: torch.Tensor) -> Limits:
    """The bounds ``[out, blocks]`` of each block of `weight` that give the least error of its share of the output."""
    size = format.block_size(weight.shape[1])
    parts = torch.split(weight, size, 1)
    grams = [x.T @ x for x in torch.split(inputs, size, 1)]  # the error of a block is d^T (x^T x) d, d = W - Q
    if not isinstance(format, Integer) or format.symmetric:
        high = torch.stack([part.abs().amax(1) for part in parts], 1)
        low = -high
    else:
        low, high = (torch.stack([extreme(part, 1) for part in parts], 1) for extreme in (torch.amin, torch.amax))
    least = torch.full_like(high, torch.inf)
    kept = torch.ones_like(high)
    for step in range(CLIP_RANGES):
        shrink = 1 - step / CLIP_STEPS
        difference = weight - format.quantize(clamped(weight, (low * shrink, high * shrink), size)).dequantize()
        error = torch.stack(
            [((d @ gram) * d).sum(1) for d, gram in zip(torch.split(difference, size, 1), grams, strict=True)], 1
        )
        better = error < least
        least = torch.where(better, error, least)
        kept = torch.where(better, shrink, kept)
    return low * kept, high * kept


def _relative_mean(weights: list[torch.Tensor], block_size: int) -> torch.Tensor:
    """``[n]``: the mean over all rows of ``|w|`` relative to the largest of its block."""
    magnitude = torch.cat(weights).abs()
    parts = [part / (part.amax(1, keepdim=True) + 1e-6) for part in torch.split(magnitude, block_size, 1)]
    return torch.cat(parts, 1).mean(0)
