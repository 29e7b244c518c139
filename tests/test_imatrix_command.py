"""`qbench imatrix`, and recipes that use what it saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qbench.calibration.imatrix import load_imatrix
from qbench.formats.base import FORMATS, QuantizedTensor
from qbench.models.compressed import CompressedModel
from qbench.models.source import open_model
from qbench.result import read_results
from tests.families import make_family
from tests.test_cli import qbench_
from tests.test_validate import plan_for, refusal

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_text("Some words that follow one another. " * 20)
    return path


def collect(model: Path, text: Path, out: Path, *more: str) -> Path:
    result = qbench_("imatrix", model, "--data", text, "--rows", 2, "--seq-len", 32, "--out", out, *more)
    assert result.exit_code == 0, result.output
    return out


def test_collect_and_show(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    out = collect(tiny_llama, text, tmp_path / "i.gguf")
    found = load_imatrix(out)
    assert found.revision == open_model(tiny_llama).revision
    assert found.datasets == [str(text)]
    assert found.entry(DOWN) is not None
    shown = json.loads(qbench_("imatrix", "--show", out, "--json").stdout)
    assert len(shown["modules"]) == 21
    assert {row["tokens"] for row in shown["modules"]} == {64}
    assert shown["unreached"] == []
    row = next(row for row in shown["modules"] if row["module"] == DOWN)
    assert row["mean_square"] == pytest.approx(float(found.importance(DOWN).mean()), rel=1e-5)
    assert DOWN in qbench_("imatrix", "--show", out).stdout


def test_experts_that_no_token_reached_are_named(text: Path, tmp_path: Path) -> None:
    model = make_family(tmp_path / "moe", "mixtral", num_local_experts=16)
    out = tmp_path / "i.gguf"
    result = qbench_("imatrix", model, "--data", text, "--rows", 1, "--seq-len", 3, "--out", out)
    assert result.exit_code == 0
    assert "No token reached" in result.stdout
    assert ".mlp.experts." in result.stdout.split("No token reached")[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--show", "nowhere.gguf"], "nowhere.gguf: there is no such file"),
        (["some/model"], "Give MODEL and --out FILE"),
        (["MODEL", "--out", "o", "--packing", "padded"], "packing: Input should be 'packed' or 'documents'"),
        (["MODEL", "--out", "o", "--data", "nowhere.txt"], "Data file nowhere.txt does not exist"),
        (["MODEL", "--out", "o", "--seq-len", "513"], "calibration.seq_len is 513; the model's positions end at 512"),
    ],
)
def test_mistakes(tiny_llama: Path, arguments: list[str], message: str) -> None:
    result = qbench_("imatrix", *(str(tiny_llama) if argument == "MODEL" else argument for argument in arguments))
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def weighed(imatrix: Path, **more: Any) -> dict[str, Any]:
    fields = {"format": {"name": "q4_0"}, "solver": {"name": "nearest", "importance": True}}
    return {"x": {**fields, "calibration": {"imatrix": str(imatrix)}, **more}}


def test_a_run_rounds_by_the_saved_importance(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    imatrix = collect(tiny_llama, text, tmp_path / "i.gguf")
    recipe = tmp_path / "r.yaml"
    content = {
        "model": {"source": str(tiny_llama)},
        "calibration": {"data": str(text), "rows": 2, "seq_len": 16},
        "variants": weighed(imatrix),
        "evaluate": None,
        "benchmark": None,
    }
    recipe.write_text(json.dumps(content))
    assert qbench_("run", recipe, "--out", tmp_path / "out").exit_code == 0
    stored = CompressedModel(tmp_path / "out" / "variants" / "x" / "model").load(f"{DOWN}.weight")
    weight = open_model(tiny_llama).load(f"{DOWN}.weight")
    assert isinstance(stored, QuantizedTensor) and isinstance(weight, torch.Tensor)
    expected = FORMATS.get("q4_0")().quantize(weight, load_imatrix(imatrix).importance(DOWN))
    assert torch.equal(stored.parts["blocks"], expected.parts["blocks"])
    provenance = next(row for row in read_results(tmp_path / "out" / "results.jsonl") if row.variant == "x").provenance
    assert provenance["calibration"]["imatrix"] == str(imatrix)
    again = json.loads(qbench_("run", recipe, "--out", tmp_path / "out", "--json").stdout)
    assert "x" in again["reused"]
    collect(tiny_llama, text, imatrix, "--packing", "documents", "--seed", "1")
    imatrix.write_bytes(collect(tiny_llama, text, tmp_path / "j.gguf", "--rows", "1").read_bytes())
    again = json.loads(qbench_("run", recipe, "--out", tmp_path / "out", "--json").stdout)
    assert "x" not in again["reused"]


def test_what_does_not_fit_is_refused_before_the_run(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    imatrix = collect(tiny_llama, text, tmp_path / "i.gguf")
    assert plan_for(tmp_path, tiny_llama, weighed(imatrix)).warnings == []
    where = "variants.x: calibration.imatrix"
    assert f"{where} is of the model's own inputs" in refusal(tmp_path, tiny_llama, weighed(imatrix, rotate=True))
    assert "there is no such file" in refusal(tmp_path, tiny_llama, weighed(tmp_path / "none.gguf"))
    other = make_family(tmp_path / "other", "llama")
    assert f"{where}: {imatrix} was collected from another model" in refusal(tmp_path, other, weighed(imatrix))
    off_grid = collect(tiny_llama, text, tmp_path / "off.gguf", "--off-grid")
    assert "was collected from another model" in refusal(tmp_path, tiny_llama, weighed(off_grid))
    plan_for(tmp_path, tiny_llama, weighed(off_grid), "model.off_grid=true")
    unused = plan_for(tmp_path, tiny_llama, weighed(imatrix, solver={"name": "nearest"}))
    assert unused.warnings == [f"{where} has no effect: its solver does not weigh by importance."]


def test_a_file_of_unknown_origin_must_have_the_right_sizes(tiny_llama: Path, text: Path, tmp_path: Path) -> None:
    imatrix = collect(tiny_llama, text, tmp_path / "i.gguf")
    found = load_imatrix(imatrix)
    found.revision = None
    del found.entries["model.layers.0.self_attn.q_proj"]
    found.save(imatrix)
    warnings = plan_for(tmp_path, tiny_llama, weighed(imatrix)).warnings
    assert warnings == ["variants.x: calibration.imatrix: no token of 1 modules (model.layers.0.self_attn.q_proj, ...);"
                        " they are rounded without it."]  # fmt: skip
    assert "does not say which model it is of" in refusal(tmp_path, tiny_llama, weighed(imatrix), "model.off_grid=true")
    found.entries[DOWN].total = found.entries[DOWN].total[:64]
    found.save(imatrix)
    assert f"has 64 inputs for {DOWN}; it has 128." in refusal(tmp_path, tiny_llama, weighed(imatrix))
