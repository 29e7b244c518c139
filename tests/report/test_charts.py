"""Axes, labels that do not collide, and the line that no variant beats."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qbench.report.labels import Box, place_labels
from qbench.report.layers import panels
from qbench.report.scatter import Point, pareto, scatter
from qbench.report.svg import Axis, linear_axis, log_axis, tick_text
from qbench.result import make_results


def point(name: str, x: float, y: float) -> Point:
    return Point(name, x, y, 1, name)


def test_pareto_by_size_and_by_speed() -> None:
    points = [point("a", 4, 0.1), point("b", 4, 0.2), point("c", 8, 0.01), point("d", 8.5, 0.05), point("e", 32, 0.0)]
    assert [p.name for p in pareto(points, higher_x_is_better=False)] == ["a", "c", "e"]
    assert [p.name for p in pareto(points, higher_x_is_better=True)] == ["e"]
    assert [p.name for p in pareto(points[:4], higher_x_is_better=True)] == ["c", "d"]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12), st.booleans())
def test_no_point_beats_one_on_the_front(places: list[tuple[int, int]], higher: bool) -> None:
    points = [point(str(i), x, y) for i, (x, y) in enumerate(places)]
    front = pareto(points, higher)

    def beats(a: Point, b: Point) -> bool:
        better_x = a.x >= b.x if higher else a.x <= b.x
        return better_x and a.y <= b.y and (a.x, a.y) != (b.x, b.y)

    assert not [(a, b) for a in points for b in front if beats(a, b)]
    assert all(any(beats(f, p) or (f.x, f.y) == (p.x, p.y) for f in front) for p in points)


def test_labels_of_near_points_do_not_overlap() -> None:
    spots = [(100.0, 100.0), (104.0, 103.0), (108.0, 98.0), (250.0, 100.0)]
    texts = ["rtn-int4-g32", "gptq-int4-g32", "nf4", "zeropoint-int8"]
    bounds = Box(0, 0, 300, 200)
    boxes = place_labels(spots, texts, bounds)
    for i, box in enumerate(boxes):
        assert box.overlap(bounds) == pytest.approx(box.area)
        assert all(box.overlap(other) == 0 for other in boxes[:i])


@given(st.floats(1e-6, 1e6), st.floats(1.01, 1e6))
def test_ticks_lie_on_the_axis_and_there_are_enough(low: float, ratio: float) -> None:
    for axis in (log_axis([low, low * ratio], 0, 100), linear_axis([low, low * ratio], 0, 100)):
        ticks = axis.ticks(4)
        assert 1 <= len(ticks) <= 40
        assert ticks == sorted(ticks)
        assert all(-1e-6 <= axis(tick) <= 100 + 1e-6 for tick in ticks)


def test_axes_of_one_value() -> None:
    assert linear_axis([5.0], 0, 10)(5.0) == pytest.approx(5)
    assert linear_axis([0.0], 0, 10)(0.0) == pytest.approx(5)
    assert log_axis([5.0], 0, 10)(5.0) == pytest.approx(5)
    assert Axis(1, 100, 0, 10, log=True)(10) == pytest.approx(5)


def test_tick_texts() -> None:
    assert [tick_text(v) for v in (0, 3000, 0.03, 1e-5, 2.5)] == ["0", "3,000", "0.03", "1e-5", "2.5"]


def test_a_divergence_of_nothing_lies_on_the_axis() -> None:
    points = [point("reference", 32, 1e-13), point("b", 4, 0.1)]
    drawn = scatter(points, "bits", "KL", speed=False, log_y=True, width=580, class_="wide")
    assert "≈ 0" in drawn
    assert 'cy="320"' in drawn  # the bottom axis of a chart 360 high with 40 below it
    assert "nan" not in drawn


def test_layer_panels_average_modules_and_keep_the_models_order() -> None:
    rows = make_results(
        "v",
        [
            ("layer_error", 0.1, {"layer": 0, "module": "layers.0.q"}),
            ("layer_error", 0.3, {"layer": 0, "module": "layers.0.b"}),
            ("layer_error", 0.2, {"layer": 1, "module": "layers.1.q"}),
            ("layer_error", 0.0, {"layer": 1, "module": "layers.1.b"}),  # a logarithmic axis cannot show it
            ("layer_error", 0.5, {"layer": None, "module": "lm_head"}),
        ],
        {},
    )
    mean, *kinds = panels(rows, {"v": 1})
    assert mean.series[0].errors == {0: pytest.approx(0.2), 1: 0.2}
    assert [panel.title for panel in kinds] == ["q", "b"]
    assert panels(rows, {"other": 1}) == []
    assert math.isfinite(kinds[0].series[0].errors[0])
