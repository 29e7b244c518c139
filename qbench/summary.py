"""The table at the end of a run, on the terminal."""

from __future__ import annotations

from pathlib import Path

import rich.box
import rich.table
from rich.console import Console
from rich.measure import Measurement
from rich.text import Text

from qbench.report.caveats import caveats
from qbench.report.run_info import REFERENCE, RunInfo
from qbench.report.table import Cell, Column, Table, comparison
from qbench.result import METRICS, read_results


def print_summary(run_dir: Path, to: Console) -> None:
    """Every variant's numbers and what to know before trusting them. Quality and size stand beside speed, or above
    it where the terminal is narrow. Raises `QbenchError` when the folder is not one of a run."""
    info, rows = RunInfo.read(run_dir), read_results(run_dir / "results.jsonl")
    table = comparison(rows, info.variants(rows), REFERENCE)
    whole = _draw(table, table.columns)
    if Measurement.get(to, to.options.update(max_width=10_000), whole).maximum <= to.width:
        to.print(whole)
    else:
        speed = [column for column in table.columns if METRICS[column.metric].family == "speed"]
        to.print(_draw(table, [column for column in table.columns if column not in speed]))
        to.print(_draw(table, speed))
    notes = ["* best of the compressed variants", "MB = 10^6 bytes", "xN: N requests in flight"]
    notes += [f"{column.title}: {column.help}" for column in table.columns if column.key in ("kl", "ttft", "itl")]
    to.print(Text("; ".join(notes) + ".", style="dim"))
    for caveat in caveats(info, rows, table):
        to.print(Text(f"! {caveat}", style="yellow"))


def caveats_of(run_dir: Path) -> list[str]:
    """What `print_summary` says below its table."""
    info, rows = RunInfo.read(run_dir), read_results(run_dir / "results.jsonl")
    return caveats(info, rows, comparison(rows, info.variants(rows), REFERENCE))


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
