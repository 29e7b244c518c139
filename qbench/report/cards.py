"""The best compressed variant by each question people ask first, and what it costs."""

from __future__ import annotations

from typing import NamedTuple

from qbench.report import text
from qbench.report.table import Table


class Card(NamedTuple):
    title: str
    variant: str
    value: str
    beside: str


def cards(table: Table) -> list[Card]:
    """One card a question for which at least two compressed variants can be compared."""
    columns = {column.key: column for column in table.columns}
    quality = table.ranked("kl")
    found = []
    for key, title, unit in _questions(list(columns)):
        ranked = table.ranked(key)
        base = ranked.pop(table.reference, None) if table.reference else None
        if len(ranked) < 2:
            continue
        show, lower = columns[key].show, columns[key].better == "lower"
        best = show((min if lower else max)(ranked.values()))
        tied = [variant for variant in ranked if show(ranked[variant]) == best]
        winner = min(tied, key=lambda variant: quality.get(variant, 0.0))  # of equals the closest to the reference
        beside = []
        if key == "kl" and (top1 := table.value(winner, "top1")) is not None:
            beside.append(f"same first token {text.percent(top1)}% of the time")
        if key != "kl" and base:
            ratio = base / ranked[winner] if lower else ranked[winner] / base
            beside.append(f"{ratio:.2f}× {'smaller' if lower else 'the speed of the reference'}")
        if key != "kl" and winner in quality:
            beside.append(f"KL {text.divergence(quality[winner])}")
        found.append(Card(title, winner, f"{best} {unit}", ", ".join(beside)))
    return found


def _questions(keys: list[str]) -> list[tuple[str, str, str]]:
    """Column key, title and unit."""
    known = {"kl": ("Closest to the reference", "nats of KL a token"), "disk": ("Smallest on disk", "MB")}
    found = [(key, *known[key]) for key in known if key in keys]
    for key in keys:
        if key.startswith("speed"):
            found.append((key, f"Fastest, {key.removeprefix('speed')} in flight", "output tokens/s"))
    return found
