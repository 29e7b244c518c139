"""Places for the names of points, so that they overlap neither each other nor the points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

CHAR_WIDTH, HEIGHT, GAP = 6.5, 13.0, 9.0  # of 12 px text; from the point's centre


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Shared area."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.bottom - self.top)


def place_labels(points: Sequence[tuple[float, float]], texts: Sequence[str], bounds: Box) -> list[Box]:
    """A box for each text, near its point: of a ring of candidates the one that covers least of what is there."""
    taken = [Box(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    placed = []
    for (x, y), text in zip(points, texts, strict=True):
        candidates = _around(x, y, CHAR_WIDTH * len(text))
        cost = [
            sum(box.overlap(other) for other in taken) + 3 * (box.area - box.overlap(bounds)) + 8 * rank
            for rank, box in enumerate(candidates)
        ]
        box = candidates[cost.index(min(cost))]
        placed.append(box)
        taken.append(box)
    return placed


def _around(x: float, y: float, width: float) -> list[Box]:
    """Candidate boxes, the preferred ones first: beside the point, above and below, then further away."""
    boxes = []
    for shift in (0.0, 12.0, 24.0):
        for dy in dict.fromkeys((-shift, shift)):
            for left in (x + GAP, x - GAP - width):
                boxes.append(Box(left, y + dy - HEIGHT / 2, left + width, y + dy + HEIGHT / 2))
        for top in (y - GAP - HEIGHT - shift, y + GAP + shift):
            boxes.append(Box(x - width / 2, top, x + width / 2, top + HEIGHT))
    return boxes
