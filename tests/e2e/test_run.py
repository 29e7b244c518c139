"""Whole runs through the command line: killed, repeated, changed."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import yaml

from qbench.result import read_results
from tests.digest import folder_digest

QUALITY = ("perplexity", "kl_mean")
MEASURED = {"dtype", "device", "kernel", "engine", "engine_version", "data", "data_hash"}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    text = folder / "text.txt"
    text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 40)
    held_out = folder / "held-out.txt"
    held_out.write_text(text.read_text())
    rows = {"data": str(text), "rows": 4, "seq_len": 48}
    exports = [{"layout": "gptq"}, {"layout": "gguf"}, {"layout": "gguf", "type": "f16"}]
    content = {
        "name": "small",
        "model": {"source": str(tiny_llama)},
        "calibration": rows,
        "evaluate": rows | {"data": str(held_out)},
        "benchmark": {"prompt_tokens": 8, "output_tokens": 4, "requests": 3, "concurrency": [1, 2]},
        "variants": {
            "int8": {"preset": "absmax-int8"},
            "solved": {"preset": "gptq", "format": {"group_size": 32}, "export": exports},
        },
    }
    file = folder / "small.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def start(recipe: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "qbench", "run", str(recipe), "--out", str(out), "--json", *more]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_hear_interrupts,
    )


def _hear_interrupts() -> None:
    """A shell lets what it starts in the background ignore SIGINT, and children of it too."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def finish(child: subprocess.Popen[str]) -> dict[str, object]:
    stdout, stderr = child.communicate()
    assert child.returncode == 0, stderr
    summary: dict[str, object] = json.loads(stdout)
    return summary


@pytest.fixture(scope="module")
def whole(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    finish(start(recipe, out))
    return out


def artifacts(out: Path) -> dict[str, str]:
    """Every model and exported file by content."""
    kept = ("model/", "gptq/", "gguf/", "gguf-f16/")
    return {name: digest for name, digest in folder_digest(out / "variants").items() if any(k in name for k in kept)}


def kill_when(child: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    while child.poll() is None and not reached():
        time.sleep(0.002)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


@pytest.mark.trap(15)
def test_a_run_killed_at_three_moments_ends_in_the_same_bytes(recipe: Path, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    variants = out / "variants"
    kill_when(start(recipe, out), lambda: (variants / "solved/model.part/progress/state.json").is_file())
    kill_when(start(recipe, out), lambda: any((variants / "solved").glob(".g*")) or (variants / "solved/gguf").exists())
    kill_when(start(recipe, out), lambda: (variants / "solved/job.json").is_file())
    finish(start(recipe, out))
    assert len(artifacts(whole)) > 20
    assert artifacts(out) == artifacts(whole)
    scores = [
        {
            row.key: row.value
            for row in read_results(folder / "results.jsonl")
            if row.metric in ("perplexity", "kl_mean")
        }
        for folder in (whole, out)
    ]
    assert scores[0] == pytest.approx(scores[1], rel=1e-6)


def test_a_second_run_redoes_nothing_and_a_changed_one_only_what_changed(recipe: Path, whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.json") if path.parent.parent.name == "variants"}
    assert finish(start(recipe, whole))["reused"] == ["reference", "int8", "solved"]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert finish(start(recipe, whole, "--set", "benchmark.output_tokens=5"))["reused"] == []
    changed = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert changed == {"speed.json"}
    finish(start(recipe, whole))


def test_what_was_deleted_is_made_again(recipe: Path, whole: Path) -> None:
    before = artifacts(whole)
    shutil.rmtree(whole / "variants/int8/model")
    shutil.rmtree(whole / "variants/solved/gptq")
    assert finish(start(recipe, whole))["reused"] == ["reference"]
    assert artifacts(whole) == before


def test_a_damaged_record_is_named(recipe: Path, whole: Path) -> None:
    record = whole / "variants/int8/speed.json"
    content = record.read_text()
    for damaged in (content[:-20], "{}", '{"key": 1, "rows": []}', '{"key": "", "rows": [{"variant": 3}]}'):
        record.write_text(damaged)
        child = start(recipe, whole)
        _, stderr = child.communicate()
        assert child.returncode == 2
        assert f"{record}: damaged (" in stderr
        assert "Delete it" in stderr
    record.write_text(content)


def test_ctrl_c_while_measuring_is_one_line_and_leaves_no_process(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = out / "variants/reference/job.json"
    child = start(recipe, out)
    while child.poll() is None and not job.is_file():
        time.sleep(0.01)
    time.sleep(1)
    child.send_signal(signal.SIGSTOP)  # however long the second run takes to start, the first is not done
    second = start(recipe, out)
    assert "another run is writing here" in second.communicate()[1]
    assert second.returncode == 2
    child.send_signal(signal.SIGINT)
    child.send_signal(signal.SIGCONT)
    _, stderr = child.communicate(timeout=30)
    assert child.returncode == 130
    assert stderr.strip() == "Interrupted. What was finished is kept: the same command goes on from there."
    measuring = [p for p in psutil.process_iter(["cmdline"]) if str(job) in (p.info["cmdline"] or [])]
    assert not [process for process in measuring if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.trap(60)
def test_the_reference_does_not_diverge_from_itself(whole: Path) -> None:
    rows = {(row.variant, row.metric): row.value for row in read_results(whole / "results.jsonl") if not row.detail}
    assert rows["reference", "kl_mean"] < 1e-6
    assert rows["reference", "top1_agreement"] == 1
    assert 0 < rows["int8", "kl_mean"] < rows["solved", "kl_mean"]


def test_another_recipes_folder_is_refused(recipe: Path, whole: Path, tmp_path: Path) -> None:
    child = start(recipe, whole, "--set", "name=other")
    _, stderr = child.communicate()
    assert child.returncode == 2
    assert "holds the run of recipe 'small'" in stderr
    (tmp_path / "letter.txt").write_text("dear")
    child = start(recipe, tmp_path)
    _, stderr = child.communicate()
    assert child.returncode == 2
    assert "holds no run" in stderr
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_every_number_says_where_it_is_from(whole: Path) -> None:
    for row in read_results(whole / "results.jsonl"):
        assert {"recipe_hash", "model", "model_revision", "seed", "off_grid"} <= row.provenance.keys()
        if row.metric in ("perplexity", "kl_mean", "output_tokens_per_s"):
            assert {
                "dtype",
                "device",
                "kernel",
                "engine",
                "engine_version",
                "data",
                "data_hash",
            } <= row.provenance.keys()
