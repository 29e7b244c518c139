"""Quality against size or speed: one point a variant, and the line that no variant beats on both."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from qbench.report.labels import Box, place_labels
from qbench.report.svg import Frame, line, linear_axis, log_axis, tag

FLOOR = 1e-6  # a divergence below this is noise: the point is drawn on the axis


@dataclass(frozen=True)
class Point:
    """`style` is the variant's place in the colour order; `tip` is what hovering says."""

    name: str
    x: float
    y: float
    style: int
    tip: str


def pareto(points: list[Point], higher_x_is_better: bool) -> list[Point]:
    """The points that no other beats in one measure without losing in the other, by x. Lower y is better."""
    sign = -1 if higher_x_is_better else 1
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (sign * p.x, p.y)):
        if not front or point.y < front[-1].y:
            front.append(point)
    return sorted(front, key=lambda p: p.x)


def scatter(
    points: list[Point], x_title: str, y_title: str, *, speed: bool, log_y: bool, width: int, class_: str
) -> Markup:
    """The chart at `width` pixels: `speed` says that x is one (linear from zero, more is better) and not a size
    (logarithmic, less is better). With `log_y`, values below `FLOOR` lie on the bottom axis."""
    narrow = width < 480
    frame = Frame(width, 300 if narrow else 360, left=52, right=14, top=28, bottom=40)
    bottom = frame.height - frame.bottom
    xs, right = [point.x for point in points], width - frame.right
    x = linear_axis(xs, frame.left, right, zero=True) if speed else log_axis(xs, frame.left, right)
    shown = [point.y for point in points if point.y >= FLOOR or not log_y]
    y = (log_axis if log_y else linear_axis)(shown or [FLOOR], bottom, frame.top)
    where = {p.name: (x(p.x), y(p.y) if p.y >= FLOOR or not log_y else bottom) for p in points}
    parts = frame.axes(x, y, x_title, y_title, x.ticks(6 if speed and not narrow else 4), y.ticks(4))
    if log_y and len(shown) < len(points):
        parts.append(tag("text", "≈ 0", class_="tick", x=frame.left - 6, y=bottom + 4, text_anchor="end"))

    front = pareto(points, speed)
    steps = [where[point.name] for point in front[:1]]
    for before, after in pairwise(front):
        a, b = where[before.name], where[after.name]
        steps += [(a[0], b[1]) if speed else (b[0], a[1]), b]
    parts.append(line(steps, class_="pareto"))

    places = place_labels(list(where.values()), [p.name for p in points], Box(frame.left, 4, width - 2, bottom))
    for point, box in zip(points, places, strict=True):
        cx, cy = where[point.name]
        parts.append(
            tag(
                "g",
                tag("title", escape(point.tip)),
                tag("circle", class_="dot", cx=cx, cy=cy, r=6),
                tag("text", escape(point.name), class_="label", x=box.left, y=box.bottom - 3),
                class_=f"series s{point.style}",
                data_v=point.name,
            )
        )
    return frame.svg(parts, f"{y_title} against {x_title}", class_)
