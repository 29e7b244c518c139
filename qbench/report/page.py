"""`report.html`: a run on one page that needs nothing else, neither network nor other files."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2
import yaml
from markupsafe import Markup

from qbench.report import details, text
from qbench.report.cards import cards
from qbench.report.caveats import caveats
from qbench.report.charts import layer_charts, quality_charts
from qbench.report.experts import expert_counts
from qbench.report.run_info import REFERENCE, RunInfo
from qbench.report.table import comparison
from qbench.resources import written_whole
from qbench.result import read_results

NUM_COLORS = 8  # of the style sheet; later variants use them again, dashed


def write_report(run_dir: Path) -> Path:
    """Makes `report.html` from the run's `run.json` and `results.jsonl` and returns its path.

    Raises `QbenchError` when the folder is not one of a run.
    """
    info, rows = RunInfo.read(run_dir), read_results(run_dir / "results.jsonl")
    names = info.variants(rows)
    table = comparison(rows, names, REFERENCE)
    styles = variant_styles(names)
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("qbench.report", "template"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals.update(text=text)
    template = files("qbench.report") / "template"
    page = environment.get_template("page.html").render(
        info=info,
        recipe=yaml.safe_dump(info.recipe, sort_keys=False, allow_unicode=True),
        table=table,
        styles=styles,
        cards=cards(table),
        charts=quality_charts(table, styles),
        layers=layer_charts(rows, {name: style for name, style in styles.items() if name != REFERENCE}),
        caveats=caveats(info, rows, table),
        latency=details.latency(rows, names),
        confidence=details.confidence(rows, names),
        made={name: details.made(rows, name) for name in names},
        experts=expert_counts(rows, names),
        provenance=details.provenance(rows),
        css=Markup((template / "page.css").read_text(encoding="utf-8")),
        script=Markup((template / "page.js").read_text(encoding="utf-8")),
    )
    path = run_dir / "report.html"
    with written_whole(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def variant_styles(names: Sequence[str]) -> dict[str, int]:
    """Colour numbers by variant: the reference 0 (ink), the others from 1."""
    others = [name for name in names if name != REFERENCE]
    return {name: 0 if name == REFERENCE else 1 + others.index(name) % (2 * NUM_COLORS) for name in names}
