"""The comparison table behind the terminal summary and the page: variants down, measures across."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from qbench.report import text
from qbench.result import Result, comparable


@dataclass(frozen=True)
class Column:
    """One measure. `better` is "lower" or "higher"."""

    key: str
    title: str
    metric: str
    detail: dict[str, Any]
    better: str
    show: Callable[[float], str]
    help: str


@dataclass(frozen=True)
class Cell:
    """`differs`: provenance keys in which the number is unlike the others of its column, so it is not ranked."""

    value: float
    text: str
    note: str
    best: bool
    differs: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """`cells` by variant and column key; a variant may lack some."""

    columns: list[Column]
    variants: list[str]
    reference: str | None
    cells: dict[tuple[str, str], Cell]

    def value(self, variant: str, key: str) -> float | None:
        cell = self.cells.get((variant, key))
        return cell.value if cell else None

    def ranked(self, key: str) -> dict[str, float]:
        """Values that may be compared with each other, by variant; the reference is among them."""
        found = {v: self.cells.get((v, key)) for v in self.variants}
        return {v: cell.value for v, cell in found.items() if cell and not cell.differs}


def all_columns(rows: Sequence[Result]) -> list[Column]:
    """The columns that `rows` can fill, speed at the lowest and the highest concurrency that was measured."""
    levels = sorted({row.detail["concurrency"] for row in rows if row.metric == "output_tokens_per_s"})
    low = levels[0] if levels else None
    peak = {"where": "accelerator" if any(row.detail.get("where") == "accelerator" for row in rows) else "process"}
    at_low = {"concurrency": low, "percentile": 50}
    alone = f"{low} request{'s' if low != 1 else ''} in flight"
    columns = [
        Column("bits", "bits / weight", "bits_per_weight", {}, "lower", text.fixed(2), "compressed linears, scales in"),
        Column("sparsity", "zeros %", "sparsity", {}, "higher", text.percent, "pruned linears' weights that are 0"),
        Column(
            "disk", "disk MB", "disk_bytes", {}, "lower", text.megabytes, "the variant's own folder, not its exports"
        ),
        Column("perplexity", "perplexity", "perplexity", {}, "lower", text.fixed(2), "on held-out text"),
        Column("kl", "KL mean", "kl_mean", {}, "lower", text.divergence, "KL(reference || variant), nats a token"),
        Column("top1", "top-1 %", "top1_agreement", {}, "higher", text.percent, "same first token as the reference"),
        Column("ttft", "TTFT ms", "ttft_s", at_low, "lower", text.milliseconds, f"to first token, median, {alone}"),
        Column("itl", "ITL ms", "itl_s", at_low, "lower", text.milliseconds, f"between tokens, median, {alone}"),
    ]
    for level in dict.fromkeys([*levels[:1], *levels[-1:]]):
        help_text = f"output tokens a second, {level} request{'s' if level != 1 else ''} in flight"
        at: dict[str, Any] = {"concurrency": level}
        columns.append(
            Column(f"speed{level}", f"tok/s x{level}", "output_tokens_per_s", at, "higher", text.fixed(1), help_text)
        )
    if len({row.value for row in rows if row.metric == "kv_token_bytes"}) > 1:
        columns.append(
            Column("kv", "KV B / token", "kv_token_bytes", {}, "lower", text.fixed(0), "keys and values, all layers")
        )
    columns.append(Column("memory", "peak MB", "peak_memory_bytes", peak, "lower", text.megabytes, peak["where"]))
    return [c for c in columns if any(row.metric == c.metric and row.detail == c.detail for row in rows)]


def comparison(rows: Sequence[Result], variants: Sequence[str], reference: str | None) -> Table:
    """The table of `variants`. The best of each column (the reference apart) is marked, among comparable
    rows; what reads the same counts as equal."""
    rows = [row for row in rows if row.variant in variants]
    columns = all_columns(rows)
    cells: dict[tuple[str, str], Cell] = {}
    for column in columns:
        marked = comparable([row for row in rows if row.metric == column.metric and row.detail == column.detail])
        ranked = [m.result.value for m in marked if not m.differs and m.result.variant != reference]
        best = (min if column.better == "lower" else max)(ranked, default=0.0)
        base = next((m.result.value for m in marked if m.result.variant == reference), None)
        for row, differs in marked:
            is_reference = row.variant == reference
            note = ""
            if column.key == "perplexity" and base and not is_reference and not differs:
                note = f"{100 * (row.value / base - 1):+.2f}%"
            is_best = (
                not differs and not is_reference and len(ranked) > 1 and column.show(row.value) == column.show(best)
            )
            cells[row.variant, column.key] = Cell(row.value, column.show(row.value), note, is_best, differs)
    return Table(columns, list(variants), reference, cells)
