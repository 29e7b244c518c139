"""The charts of the page, each in the widths it is shown in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from markupsafe import Markup

from qbench.report.layers import layer_chart, panels
from qbench.report.scatter import Point, scatter
from qbench.report.table import Table
from qbench.result import Result

WIDE, NARROW = 580, 350  # pixels; the style sheet shows the one that fits


class Chart(NamedTuple):
    """`views` are alternatives for the x axis: label, and the picture in two widths."""

    title: str
    note: str
    views: list[tuple[str, Markup]]


def quality_charts(table: Table, styles: dict[str, int]) -> list[Chart]:
    """Quality against size and against speed, of comparable numbers; divergence where it was measured."""
    columns = {column.key: column for column in table.columns}
    quality = next((key for key in ("kl", "perplexity") if key in columns), None)
    if quality is None:
        return []
    y_title = "KL to the reference, nats" if quality == "kl" else "perplexity"
    speeds = [key for key in columns if key.startswith("speed")]
    wanted = [
        (
            "Quality against size",
            [("bits", "bits per weight"), ("disk", "MB on disk")],
            False,
            "down and left is better",
        ),
        (
            "Quality against speed",
            [(key, f"output tokens/s, {key.removeprefix('speed')} in flight") for key in speeds],
            True,
            "down and right is better",
        ),
    ]
    charts = []
    for title, axes, speed, note in wanted:
        views = []
        for key, x_title in axes:
            ys, xs = table.ranked(quality), table.ranked(key) if key in columns else {}
            points = [
                Point(
                    name,
                    xs[name] / 1e6 if key == "disk" else xs[name],
                    ys[name],
                    styles[name],
                    f"{name}: {columns[key].show(xs[name])} {columns[key].title}, "
                    f"{columns[quality].title} {columns[quality].show(ys[name])}",
                )
                for name in table.variants
                if name in xs and name in ys
            ]
            if len(points) > 1:
                pictures = [
                    scatter(points, x_title, y_title, speed=speed, log_y=quality == "kl", width=width, class_=class_)
                    for width, class_ in ((WIDE, "wide"), (NARROW, "narrow"))
                ]
                views.append((x_title, Markup("").join(pictures)))
        if views:
            charts.append(Chart(title, note, views))
    return charts


def layer_charts(rows: Sequence[Result], styles: dict[str, int]) -> list[Markup]:
    """The mean in two widths, then the small ones; empty without layer errors."""
    found = panels(rows, styles)
    if not found:
        return []
    mean = [error for series in found[0].series for error in series.errors.values()]
    all_errors = [error for panel in found for series in panel.series for error in series.errors.values()]
    first = Markup("").join(
        [layer_chart(found[0], mean, 1160, 330, "wide"), layer_chart(found[0], mean, NARROW, 260, "narrow")]
    )
    return [first, *(layer_chart(panel, all_errors, 280, 170, "") for panel in found[1:])]
