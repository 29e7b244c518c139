"""The result log survives kills, refuses numbers that are none, and ranks like with like only."""

import json
import math
from pathlib import Path

import pytest

from qbench.errors import QbenchError
from qbench.result import METRICS, Result, ResultLog, comparable, make_results, read_results


def row(variant: str = "a", value: float = 1.0, **provenance: object) -> Result:
    return Result(variant, "perplexity", value, "", {}, provenance)


def test_rows_come_back_as_written(tmp_path: Path) -> None:
    rows = make_results("nf4 “é”", [("perplexity", 31.25, {}), ("itl_s", 0.01, {"percentile": 50})], {"dtype": "f32"})
    log = ResultLog(tmp_path / "run" / "results.jsonl")
    log.append(rows[:1])
    log.append(rows[1:])
    assert read_results(log.path) == rows
    assert [r.unit for r in rows] == ["", "s"]


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_last_line_is_ignored_then_removed(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "results.jsonl"
    ResultLog(path).append([row("a"), row("b")])
    path.write_bytes(path.read_bytes()[:-cut])
    assert [r.variant for r in read_results(path)] == ["a"]
    ResultLog(path).append([row("c")])
    assert [r.variant for r in read_results(path)] == ["a", "c"]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_the_last_of_equal_keys_counts(tmp_path: Path) -> None:
    log = ResultLog(tmp_path / "results.jsonl")
    log.append([row("a", 1.0), row("b", 2.0), row("a", 3.0)])
    assert [(r.variant, r.value) for r in read_results(log.path)] == [("b", 2.0), ("a", 3.0)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(QbenchError, match=r"ttft_s \{'percentile': 99\} of variant 'v'"):
        make_results("v", [("ttft_s", value, {"percentile": 99})], {})


def test_an_unknown_metric_is_refused_with_the_nearest() -> None:
    with pytest.raises(QbenchError, match="perplexity"):
        Result("v", "perplexty", 1.0, "")


def test_a_broken_line_is_refused_by_number(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ResultLog(path).append([row()])
    path.write_text(path.read_text() + "{]\n")
    with pytest.raises(QbenchError, match="line 2"):
        read_results(path)
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
