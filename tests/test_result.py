"""Results files are written whole, refuse numbers that are none, and rows are ranked like with like only."""

import math
import re
from pathlib import Path

import pytest

from qbench.errors import QbenchError
from qbench.result import METRICS, Result, comparable, make_results, read_results, write_results


def row(variant: str = "a", value: float = 1.0, **provenance: object) -> Result:
    return Result(variant, "perplexity", value, "", {}, provenance)


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    rows = make_results("nf4 “é”", [("perplexity", 31.25, {}), ("itl_s", 0.01, {"percentile": 50})], {"dtype": "f32"})
    path = tmp_path / "run" / "results.jsonl"
    write_results(path, [row("earlier")])
    write_results(path, rows)
    assert read_results(path) == rows
    assert [r.unit for r in rows] == ["", "s"]


def test_a_failed_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    write_results(path, [row("a")])
    with pytest.raises(ValueError, match="JSON compliant"):
        write_results(path, [row("b"), row("c", note=math.nan)])
    assert [r.variant for r in read_results(path)] == ["a"]
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(QbenchError, match=r"ttft_s \{'percentile': 99\} of variant 'v'"):
        make_results("v", [("ttft_s", value, {"percentile": 99})], {})


def test_an_unknown_metric_is_refused_with_the_nearest() -> None:
    with pytest.raises(QbenchError, match="perplexity"):
        Result("v", "perplexty", 1.0, "")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{]", "Expecting"),
        ("[]", "an object with the keys variant"),
        ('{"variant": "a"}', "metric"),
        ('{"variant": "a", "metric": "perplexity", "value": "4", "unit": ""}', "value is '4', expected float"),
        ('{"variant": "a", "metric": "perplexity", "value": true, "unit": ""}', "value is True, expected float"),
        ('{"variant": "a", "metric": "perplexity", "value": NaN, "unit": ""}', "not a finite number"),
        ('{"variant": "a", "metric": "perplexity", "value": 4, "unit": "", "detail": 3}', "detail is 3"),
        ('{"variant": "a", "metric": "perplexity", "value": 4, "unit": "", "more": 3}', "an object with the keys"),
        ('{"variant": "a", "metric": "perplexity", "value": 4, "unit": ""}', "a second value of perplexity {} of a"),
        ("[" * 100_000, "recursion"),
    ],
)
def test_a_line_that_is_no_row_is_refused_by_number(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "results.jsonl"
    write_results(path, [row()])
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(QbenchError, match=re.escape(f"{path}, line 2: ")) as caught:
        read_results(path)
    assert problem in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QbenchError, match="No results file"):
        read_results(tmp_path / "none.jsonl")


@pytest.mark.parametrize("key", ["window", "dtype", "engine"])
def test_quality_rows_of_other_conditions_are_marked(key: str) -> None:
    usual = {"window": {"seq_len": 512}, "dtype": "float32", "engine": "qbench"}
    rows = [row("a", **usual), row("b", **usual, model_revision="x"), row("c", **(usual | {key: "other"}))]
    assert [marked.differs for marked in comparable(rows)] == [(), (), (key,)]


def test_prefix_cache_state_matters_for_speed_but_nothing_does_for_size() -> None:
    def speed(variant: str, metric: str, on: bool) -> Result:
        return Result(variant, metric, 1.0, METRICS[metric].unit, {}, {"prefix_cache": on})

    rows = [speed("a", "ttft_s", False), speed("b", "ttft_s", True), speed("c", "ttft_s", False)]
    assert [marked.differs for marked in comparable(rows)] == [(), ("prefix_cache",), ()]
    sizes = [speed("a", "disk_bytes", False), speed("b", "disk_bytes", True)]
    assert [marked.differs for marked in comparable(sizes)] == [(), ()]
