"""Numbers as people read them. Sizes are in MB (10^6 bytes)."""

from __future__ import annotations

from collections.abc import Callable


def fixed(digits: int) -> Callable[[float], str]:
    return lambda value: f"{value:,.{digits}f}"


def megabytes(value: float) -> str:
    return f"{value / 1e6:,.0f}" if value >= 1e8 else f"{value / 1e6:,.1f}"


def percent(value: float) -> str:
    return f"{100 * value:.2f}"


def milliseconds(seconds: float) -> str:
    """About three digits."""
    value = 1000 * seconds
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"


def divergence(value: float) -> str:
    """Three digits, trailing zeros kept; what is below 1e-6 is noise."""
    return "< 1e-6" if value < 1e-6 else f"{value:#.3g}" if value >= 1e-4 else f"{value:.1e}"


def significant(value: float) -> str:
    """Three significant digits without an exponent where that is short."""
    return f"{value:.3g}" if value == 0 or abs(value) >= 1e-4 else f"{value:.1e}"


def duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
