"""The table at the end of a run, on the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.box
import rich.table
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from qbench.report.caveats import caveats
from qbench.report.run_info import RunInfo
from qbench.report.table import Cell, Column, Table, comparison
from qbench.results import METRICS, Result, read_results


@dataclass(frozen=True)
class Summary:
    """A finished run: its numbers side by side, and where its report lies."""

    run_dir: Path
    info: RunInfo
    rows: list[Result]

    @classmethod
    def of(cls, run_dir: Path) -> Summary:
        """Raises `QbenchError` when the folder is not one of a run."""
        return cls(run_dir, RunInfo.read(run_dir), read_results(run_dir / "results.jsonl"))

    @property
    def table(self) -> Table:
        return comparison(self.rows, [variant.name for variant in self.info.variants], self.info.reference)

    def print(self, console: Console) -> None:
        """Quality and size beside speed; below it where the terminal is narrow."""
        table = self.table
        whole = _draw(table, table.columns)
        if Measurement.get(console, console.options.update(max_width=10_000), whole).maximum <= console.width:
            console.print(whole)
        else:
            speed = [column for column in table.columns if METRICS[column.metric].family == "speed"]
            console.print(_draw(table, [column for column in table.columns if column not in speed]))
            console.print(_draw(table, speed))
        notes = ["* best of the compressed variants", "sizes in MB = 10^6 bytes"]
        notes += [f"{column.title}: {column.help}" for column in table.columns if column.key in ("kl", "ttft", "itl")]
        console.print(Text("; ".join(notes) + ".", style="dim"))
        for caveat in caveats(self.info, self.rows, table):
            console.print(Text(f"! {caveat}", style="yellow"))
        console.print(Text(f"Report: {self.run_dir / 'report.html'}"), soft_wrap=True)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: the table's numbers by variant, and the paths."""
        table = self.table
        return {
            "run": str(self.run_dir),
            "report": str(self.run_dir / "report.html"),
            "results": str(self.run_dir / "results.jsonl"),
            "variants": {
                variant: {column.key: table.value(variant, column.key) for column in table.columns}
                for variant in table.variants
            },
            "caveats": caveats(self.info, self.rows, table),
        }


def _draw(table: Table, columns: list[Column]) -> rich.table.Table:
    drawn = rich.table.Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("variant", no_wrap=True)
    for column in columns:
        drawn.add_column("\n".join(column.title.rsplit(" ", 1)), justify="right", no_wrap=True)
    for variant in table.variants:
        cells = [_cell(table.cells.get((variant, column.key))) for column in columns]
        drawn.add_row(Text(variant), *cells, style="dim" if variant == table.reference else "")
    return drawn


def _cell(cell: Cell | None) -> Text:
    if cell is None:
        return Text("-", style="dim")
    if cell.differs:
        return Text(f"({cell.text})", style="dim")  # shown, not ranked; the caveats say why
    shown = Text(f"*{cell.text}" if cell.best else cell.text, style="bold green" if cell.best else "")
    return shown.append(f" {cell.note}", style="dim") if cell.note else shown
