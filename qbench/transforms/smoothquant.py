"""SmoothQuant (Xiao et al., arXiv 2211.10438): outliers of the activations move into the weights.

``s = max|x|^alpha / max|w|^(1 - alpha)`` a channel, the weights' maximum over all linears that read it. Only what a
norm produces is scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from qbench.errors import QbenchError
from qbench.lazy import lazy_import
from qbench.transforms.base import Choice, Readers, Transform, best

torch = lazy_import("torch")

SMALLEST = 1e-5  # of a maximum and of a scale
SEARCHED = [i / 10 for i in range(11)]


@dataclass(frozen=True)
class SmoothQuant(Transform):
    """Scales from the largest activations and weights. `alpha` is fixed, or searched for each group of linears."""

    name: ClassVar[str] = "smoothquant"
    divides_linears: ClassVar[bool] = False

    alpha: float | Literal["search"] = 0.5

    def __post_init__(self) -> None:
        if self.alpha != "search" and not 0 <= self.alpha <= 1:
            raise QbenchError(f"transform smoothquant: alpha is {self.alpha}; allowed: 0 to 1, or search.")

    @property
    def candidates(self) -> int:
        return len(self._alphas)

    @property
    def _alphas(self) -> list[float]:
        return SEARCHED if self.alpha == "search" else [self.alpha]

    def choose(self, readers: Readers) -> Choice | None:
        largest = torch.stack([weight.abs().amax(0) for weight in readers.weights]).amax(0).clamp(min=SMALLEST)
        act = readers.max_abs.clamp(min=SMALLEST)
        return best(
            readers,
            [Choice((act**a / largest ** (1 - a)).clamp(min=SMALLEST), {"alpha": a}) for a in self._alphas],
        )
