"""Relative output error by layer: one line a variant; all modules together, then each kind of module."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from qbench.report.svg import Frame, line, linear_axis, log_axis, tag
from qbench.report.text import significant
from qbench.result import Result


@dataclass(frozen=True)
class Series:
    """A variant's error by layer index; `style` is its place in the colour order."""

    name: str
    style: int
    errors: dict[int, float]


@dataclass(frozen=True)
class Panel:
    title: str
    series: list[Series]


def panels(rows: Sequence[Result], styles: dict[str, int]) -> list[Panel]:
    """A first panel with each layer's mean over its modules, then one a module kind, in the model's order.

    `rows` of metric `layer_error` with details `layer` (index) and `module` (its kind is what follows the index).
    `styles` maps the variants to show to their colours. The head is in no layer and not shown.
    """
    rows = [row for row in rows if row.metric == "layer_error" and row.variant in styles and row.value > 0]
    rows = [row for row in rows if row.detail["layer"] is not None]
    kinds: dict[str, list[Result]] = {}
    for row in rows:
        kinds.setdefault(row.detail["module"].partition(f".{row.detail['layer']}.")[2], []).append(row)
    found = [Panel("mean over modules", _series(rows, styles))] if rows else []
    if len(kinds) > 1:
        found += [Panel(kind, _series(inside, styles)) for kind, inside in kinds.items()]
    return found


def _series(rows: Sequence[Result], styles: dict[str, int]) -> list[Series]:
    """Means over the rows of each variant and layer."""
    gathered: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        gathered.setdefault(row.variant, {}).setdefault(row.detail["layer"], []).append(row.value)
    return [
        Series(name, styles[name], {layer: sum(v) / len(v) for layer, v in sorted(layers.items())})
        for name, layers in gathered.items()
    ]


def layer_chart(panel: Panel, domain: list[float], width: int, height: int, class_: str) -> Markup:
    """The chart of one panel. `domain` holds the errors that the (shared, logarithmic) y axis must cover."""
    frame = Frame(width, height, left=46, right=12, top=28, bottom=24 if height < 250 else 36)
    layers = [layer for series in panel.series for layer in series.errors]
    x = linear_axis([float(layer) for layer in layers], frame.left, width - frame.right)
    y = log_axis(domain, height - frame.bottom, frame.top)
    small = height < 250
    x_ticks = [tick for tick in x.ticks(4 if small else max(4, width // 80)) if float(tick).is_integer()]
    parts = frame.axes(x, y, "" if small else "layer", panel.title, x_ticks, y.ticks(3))
    for series in panel.series:
        points = [(x(layer), y(error)) for layer, error in series.errors.items()]
        dots = [
            tag(
                "circle",
                tag("title", escape(f"{series.name}, layer {layer}: {significant(error)}")),
                cx=cx,
                cy=cy,
                r=7,
                class_="hit",
            )
            for (layer, error), (cx, cy) in zip(series.errors.items(), points, strict=True)
        ]
        parts.append(tag("g", line(points, class_="line"), *dots, class_=f"series s{series.style}", data_v=series.name))
    return frame.svg(parts, f"Relative output error by layer, {panel.title}", class_)
