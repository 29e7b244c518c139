"""A library's process and what becomes of its result, with a library that rounds to multiples of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.models.offgrid import OffGrid
from qbench.models.source import open_model
from qbench.peers.choice import read_choice
from qbench.peers.model import bits_per_weight, run_peer
from qbench.recipe import Recipe
from qbench.workflow import run
from tests.peers import fake

ROWS = [[5, 6, 7, 8], [9, 10, 11]]
STEP = 0.25  # the fake library takes blocksize / 512


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake.install(monkeypatch, tmp_path)


def make(source_folder: Path, out: Path, method: str = "nf4"):  # type: ignore[no-untyped-def]
    source = OffGrid(open_model(source_folder), 0)
    choice = read_choice({"library": "bitsandbytes", "method": method, "blocksize": int(512 * STEP)})
    return source, *run_peer(source, choice, ROWS, out, device="cpu", seed=0, label="theirs")


def test_the_model_and_rows_go_there_and_dense_weights_come_back(tiny_llama: Path, tmp_path: Path) -> None:
    source, model, facts = make(tiny_llama, tmp_path / "model")
    for name in source.tensors:
        expected = source.load(name)
        if "proj" in name:
            expected = (expected / STEP).round() * STEP
        assert torch.equal(model.load(name), expected), name
    assert facts["version"] == "1.2"
    assert bits_per_weight(facts, source) == 4.0
    assert facts["seconds"] > 0
    assert facts["peak_memory_bytes"] > 1e8
    assert open_model(tmp_path / "model").revision == model.revision
    assert not (tmp_path / "model.peer").exists()


def test_rounded_inputs_come_along(tiny_llama: Path, tmp_path: Path) -> None:
    _, model, _ = make(tiny_llama, tmp_path / "model", "inputs-8")
    weight = open_model(tmp_path / "model").load("model.layers.0.mlp.up_proj.weight")
    assert isinstance(weight, QuantizedTensor)
    assert weight.activation is not None
    assert weight.activation.to_dict() == {"name": "fp8", "granularity": "tensor", "element": "e4m3"}
    assert weight.parts["input_scale"].item() == 0.5
    assert torch.equal(weight.dequantize(), model.load("model.layers.0.mlp.up_proj.weight").dequantize())


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("fail", "bitsandbytes failed: ValueError: the library cannot do this"),
        ("killed", "ended by SIGKILL"),
        ("forgets", "left 1 of 21 linears alone"),
    ],
)
def test_a_process_that_fails_is_told_with_its_last_words(
    tiny_llama: Path, tmp_path: Path, method: str, told: str
) -> None:
    with pytest.raises(QbenchError, match=told) as caught:
        make(tiny_llama, tmp_path / "model", method)
    log = tmp_path / "model.peer" / "log.txt"
    assert str(log) in str(caught.value)
    assert f"rows {ROWS}" in log.read_text()
    assert not (tmp_path / "model").exists()


def test_in_a_run_it_is_measured_like_the_others_and_reused(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 40)
    rows = {"data": str(text), "rows": 2, "seq_len": 16}
    said = {
        "name": "peers",
        "model": {"source": str(tiny_llama)},
        "calibration": rows,
        "evaluate": rows,
        "benchmark": {"prompt_tokens": 4, "output_tokens": 2, "requests": 1, "concurrency": [1]},
        "variants": {"theirs": {"with": "bitsandbytes"}},
    }
    summary = run(Recipe.model_validate(said), tmp_path / "out")
    rows_of = {row.metric: row for row in summary.results if row.variant == "theirs" and not row.detail}
    assert rows_of["bits_per_weight"].value == 4.0
    assert rows_of["perplexity"].provenance["made_by"] == "bitsandbytes 1.2"
    assert rows_of["compress_peak_bytes"].value > 1e8
    assert "wall_s" not in rows_of
    page = summary.report.read_text()
    assert "nf4 by bitsandbytes, blocksize 64" in page
    assert "made by bitsandbytes 1.2" in page
    assert run(Recipe.model_validate(said), tmp_path / "out").reused == ["reference", "theirs"]
