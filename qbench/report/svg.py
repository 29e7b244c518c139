"""Charts as inline SVG text, without a library: escaped tags, axes, ticks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup, escape


def tag(name: str, *children: str, **attributes: object) -> Markup:
    """An SVG element. Attribute names: `_` stands for `-`, a trailing one is dropped; text is escaped."""
    inside = Markup("").join(children)
    pairs = [(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None]
    written = "".join(f' {key}="{escape(_number(value))}"' for key, value in pairs)
    return Markup(f"<{name}{written}>{inside}</{name}>")


def _number(value: object) -> object:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value


def line(points: list[tuple[float, float]], **attributes: object) -> Markup:
    """A polyline; `class_` and `data_v` as attributes."""
    return tag("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), fill="none", **attributes)


@dataclass(frozen=True)
class Axis:
    """Maps values in [low, high] to pixels from `start` to `stop`, linearly or by logarithm."""

    low: float
    high: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (value - low) / (high - low) * (self.stop - self.start)

    def ticks(self, count: int) -> list[float]:
        """Round values inside the axis, about `count` of them."""
        if self.log and self.high > 4 * self.low:
            return _log_ticks(self.low, self.high, count)
        return _linear_ticks(self.low, self.high, count)


def linear_axis(values: list[float], start: float, stop: float, *, zero: bool = False) -> Axis:
    """An axis around `values` with a margin; `zero` starts it there."""
    low, high = min(values), max(values)
    margin = 0.08 * (high - low) or 0.1 * abs(high) or 1.0
    return Axis(0.0 if zero else low - margin, high + margin, start, stop)


def log_axis(values: list[float], start: float, stop: float) -> Axis:
    """A logarithmic axis around positive `values` with a margin."""
    low, high = min(values), max(values)
    margin = max((high / low) ** 0.08, 1.15)
    return Axis(low / margin, high * margin, start, stop, log=True)


def _linear_ticks(low: float, high: float, count: int) -> list[float]:
    rough = (high - low) / count
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float, count: int) -> list[float]:
    """Powers of ten, of two, or the finest of a few sets of multiples, whichever first gives `count`."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices = [[m * 10.0**d for d in decades for m in multiples] for multiples in ((1,), (1, 3), (1, 2, 5))]
    choices.append([2.0**k for k in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)])
    choices.append([m * 10.0**d for d in decades for m in (1, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8)])
    inside = [[value for value in values if low <= value <= high] for values in choices]
    return next((values for values in inside if len(values) >= count), inside[-1])


def tick_text(value: float) -> str:
    """3000 -> 3,000; 0.0003 -> 0.0003; 1e-05 -> 1e-5."""
    if value == 0 or abs(value) >= 1e-4:
        return f"{value:,.10g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


@dataclass(frozen=True)
class Frame:
    """The picture and the plotting area inside it, in pixels."""

    width: int
    height: int
    left: int
    right: int
    top: int
    bottom: int

    def axes(
        self, x: Axis, y: Axis, x_title: str, y_title: str, x_ticks: list[float], y_ticks: list[float]
    ) -> list[Markup]:
        """Grid lines, tick labels and titles (the y title lies above the axis, horizontal)."""
        right, bottom = self.width - self.right, self.height - self.bottom
        parts = []
        for value in y_ticks:
            parts.append(tag("line", class_="grid", x1=self.left, x2=right, y1=y(value), y2=y(value)))
            parts.append(
                tag("text", escape(tick_text(value)), class_="tick", x=self.left - 6, y=y(value) + 4, text_anchor="end")
            )
        for value in x_ticks:
            parts.append(tag("line", class_="grid", x1=x(value), x2=x(value), y1=self.top, y2=bottom))
            parts.append(
                tag("text", escape(tick_text(value)), class_="tick", x=x(value), y=bottom + 16, text_anchor="middle")
            )
        parts.append(tag("line", class_="axis", x1=self.left, x2=right, y1=bottom, y2=bottom))
        if y_title:
            parts.append(tag("text", escape(y_title), class_="title", x=4, y=14))
        if x_title:
            parts.append(tag("text", escape(x_title), class_="title", x=right, y=self.height - 4, text_anchor="end"))
        return parts

    def svg(self, parts: list[Markup], label: str, class_: str) -> Markup:
        return tag(
            "svg", *parts, viewBox=f"0 0 {self.width} {self.height}", role="img", aria_label=label, class_=class_
        )
