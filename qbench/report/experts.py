"""How many calibration tokens reached each expert of a mixture, and which experts none did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from qbench.result import Result


@dataclass(frozen=True)
class ExpertCounts:
    """Of one variant. `unreached`: by layer, the experts that were compressed from their weights alone."""

    variant: str
    tokens: list[int]
    unreached: dict[int, list[str]]

    @property
    def least(self) -> int:
        return min(self.tokens)

    @property
    def median(self) -> float:
        return median(self.tokens)

    @property
    def num_unreached(self) -> int:
        return sum(map(len, self.unreached.values()))

    @property
    def listed(self) -> str:
        """Every unreached expert: "layer 0: 3, 5; layer 2: 1"."""
        return "; ".join(f"layer {layer}: {', '.join(names)}" for layer, names in self.unreached.items())


def expert_counts(rows: Sequence[Result], names: Sequence[str]) -> list[ExpertCounts]:
    """One entry a variant that has experts and was calibrated, in the order of `names`."""
    found = []
    for name in names:
        mine = [row for row in rows if row.variant == name and row.metric == "expert_tokens"]
        unreached: dict[int, list[str]] = {}
        for row in mine:
            if row.value == 0:
                expert = str(row.detail["module"]).rpartition(".")[2]
                unreached.setdefault(int(row.detail["layer"]), []).append(expert)
        if mine:
            found.append(ExpertCounts(name, [int(row.value) for row in mine], unreached))
    return found
