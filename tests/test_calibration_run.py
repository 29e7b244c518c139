"""Whole runs over each kind of calibration data, and what their results say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qbench.result import read_results
from tests.test_cli import qbench_


def run(tmp_path: Path, model: Path, variants: dict[str, Any], *more: object, **sections: Any) -> Any:
    (tmp_path / "text.txt").write_text("Some words that follow one another. " * 40)
    content = {
        "model": {"source": str(model)},
        "calibration": {"data": str(tmp_path / "text.txt"), "rows": 3, "seq_len": 32},
        "variants": variants,
        "evaluate": None,
        "benchmark": None,
        **sections,
    }
    (tmp_path / "r.yaml").write_text(json.dumps(content))
    return qbench_("run", tmp_path / "r.yaml", "--out", tmp_path / "out", *more)


def test_variants_on_different_data(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QBENCH_CACHE", str(tmp_path / "cache"))
    talk = [{"role": "user", "content": "Two and two?"}, {"role": "assistant", "content": "Four."}]
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": talk}) + "\n" + json.dumps({"messages": talk * 2}))
    method: dict[str, Any] = {"preset": "gptq", "format": {"group_size": 32}}
    variants = {
        "text": method,
        "talk": {**method, "calibration": {"data": str(tmp_path / "talk.jsonl"), "packing": "documents"}},
        "own": {**method, "calibration": {"data": "self-generated", "sampling": {"temperature": 0.7}}},
    }
    result = run(tmp_path, tiny_llama, variants)
    assert result.exit_code == 0, result.output
    rows = read_results(tmp_path / "out" / "results.jsonl")
    found = {row.variant: row.provenance for row in rows if row.metric == "calibration_tokens"}
    tokens = {row.variant: row.value for row in rows if row.metric == "calibration_tokens"}
    assert found["text"]["data"] == str(tmp_path / "text.txt")
    assert found["text"]["calibration"] == {"packing": "packed", "seq_len": 32, "rows": 3, "tokens": 96}
    assert found["talk"]["calibration"]["packing"] == "documents"
    assert found["own"]["data"] == "self-generated"
    assert found["own"]["calibration"]["sampling_temperature"] == 0.7
    assert len({provenance["data_hash"] for provenance in found.values()}) == 3
    assert all(tokens[name] == provenance["calibration"]["tokens"] for name, provenance in found.items())
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "self-generated" in page
    again = json.loads(run(tmp_path, tiny_llama, variants, "--json").stdout)
    assert set(variants) <= set(again["reused"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"message": "hello"}\n', "no column 'text' or 'messages'; found 'message'"),
        (b'{"text": "\xff"}\n', "not UTF-8 text"),
    ],
)
def test_bad_data_ends_a_run_before_it_begins(tmp_path: Path, tiny_llama: Path, content: bytes, message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    calibration = {"data": str(tmp_path / "bad.jsonl")}
    result = run(tmp_path, tiny_llama, {"x": {"preset": "nf4"}}, calibration=calibration)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_fewer_rows_than_asked_for_are_told(tmp_path: Path, tiny_llama: Path) -> None:
    calibration = {"data": str(tmp_path / "text.txt"), "rows": 500, "seq_len": 32}
    variants = {"x": {"preset": "nf4"}, "y": {"preset": "nf4", "calibration": {"packing": "documents", "rows": 400}}}
    said = " ".join(run(tmp_path, tiny_llama, variants, calibration=calibration).output.split())
    assert "tokens; 500 rows of 32 were asked for. All of it is used." in said
    assert "rows; 400 were asked for." in said


def test_too_few_tokens_for_a_hessian_are_said_of_the_variant_that_has_one(tmp_path: Path, tiny_llama: Path) -> None:
    calibration = {"data": str(tmp_path / "text.txt"), "rows": 1, "seq_len": 32}
    variants = {"plain": {"preset": "nf4"}, "solved": {"preset": "gptq", "format": {"group_size": 32}}}
    result = run(tmp_path, tiny_llama, variants, "--json", calibration=calibration)
    caveats = json.loads(result.stdout)["caveats"]
    assert "variants.solved: 32 calibration tokens are few for layers of 64 inputs; expect a weak result." in caveats
    assert not any("variants.plain" in caveat for caveat in caveats)
