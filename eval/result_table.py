"""What the scripts here share that write tables of a run's results."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from qbench.result import Result


def headlines(rows: Iterable[Result], metrics: Collection[str]) -> dict[str, dict[str, Result]]:
    """The rows of `metrics` that are of a whole variant, by variant and metric, in the order of `rows`."""
    found: dict[str, dict[str, Result]] = {}
    for row in rows:
        if row.metric in metrics and not row.detail:
            found.setdefault(row.variant, {})[row.metric] = row
    return found


def cells(found: dict[str, Result], columns: dict[str, str]) -> list[str]:
    """One variant's numbers in the columns' formats (metric -> format); empty where there is none."""
    return [text.format(found[metric].value) if metric in found else "" for metric, text in columns.items()]


def markdown_table(headings: Sequence[str], num_texts: int, lines: Iterable[Sequence[str]]) -> list[str]:
    """Markdown lines; the first `num_texts` columns are text, the others numbers."""
    rule = "|---" * num_texts + "|---:" * (len(headings) - num_texts) + "|"
    return ["| " + " | ".join(headings) + " |", rule, *("| " + " | ".join(line) + " |" for line in lines)]
