"""AWQ (Lin et al., arXiv 2306.00978): channels that carry large activations are scaled up before rounding.

The scale of a channel follows the mean of its ``|x|``; how strongly, is searched on a grid for each group of linears,
by the error of what the module around them puts out. Two forms are tried:

- `activation`: ``s = mean|x|^r`` (the paper's);
- `duo`: ``s = mean|x|^r / mean|w|^(1 - r)``, with ``|w|`` relative to the largest of its block, averaged over the rows.

Either is divided by ``sqrt(max(s) min(s))``. Then ranges are narrowed (`qbench.transforms.clipping`), but not those of
query and key projections, because their errors multiply; nor of formats whose rows share a range, or that search their
ranges themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from qbench.errors import QbenchError
from qbench.formats.base import Format
from qbench.lazy import lazy_import
from qbench.transforms.base import CLIP_RANGES, Choice, Readers, Transform, best

if TYPE_CHECKING:
    import torch
else:
    torch = lazy_import("torch")

SMALLEST = 1e-4
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

    def clips(self, module: str, format: Format) -> bool:
        last = module.rpartition(".")[2]
        return self.clip and not (last.startswith(NOT_CLIPPED) or format.rows_share or format.weighs_importance)


def _relative_mean(weights: list[torch.Tensor], block_size: int) -> torch.Tensor:
    """``[n]``: the mean over all rows of ``|w|`` relative to the largest of its block."""
    magnitude = torch.cat(weights).abs()
    parts = [part / (part.amax(1, keepdim=True) + 1e-6) for part in torch.split(magnitude, block_size, 1)]
    return torch.cat(parts, 1).mean(0)
