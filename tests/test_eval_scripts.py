"""The scripts under eval/: what they judge with is itself right, and a baseline holds the headline numbers only."""

from __future__ import annotations

import importlib
import json
import runpy
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from qbench.result import make_results

EVAL = Path(__file__).parents[1] / "eval"


def test_the_rounding_of_activations_is_llama_cpps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EVAL / "peers"))
    q8_0 = importlib.import_module("gguf_top1_vs_llama_cpp").q8_0
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 96)
    x[2, :32] = 0
    kind = gguf.GGMLQuantizationType.Q8_0
    expected = gguf.quants.dequantize(gguf.quants.quantize(x.numpy(), kind), kind)
    np.testing.assert_allclose(q8_0(x).numpy(), expected, rtol=0, atol=0)


def test_a_baseline_keeps_the_headline_numbers() -> None:
    frozen = runpy.run_path(str(EVAL / "freeze.py"))["frozen"]
    about = {"dtype": "float32", "kernel": "dense_f32", "seed": 0}
    rows = make_results("a", [("perplexity", 31.25, {}), ("kl_mean", 0.5, {}), ("nll", 3.1, {"window": 0})], about)
    rows += make_results("a", [("itl_s", 0.01, {"concurrency": 1, "percentile": 50}), ("wall_s", 9, {})], about)
    rows += make_results("a", [("layer_error", 0.1, {"layer": 1, "module": "m"})], {"seed": 0})
    content = frozen(rows, {"cores": 2})
    assert content["values"] == {
        "a": {"perplexity": 31.25, "kl_mean": 0.5, "itl_s (concurrency 1, percentile 50)": 0.01, "wall_s": 9.0}
    }
    assert content["conditions"] == {"seed": 0, "dtype": "float32"}
    assert content["kernels"] == {"a": "dense_f32"}


@pytest.mark.parametrize("file", sorted((EVAL / "baselines").glob("*.json")), ids=lambda file: file.name)
def test_baselines_say_how_they_were_measured(file: Path) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    assert {"recipe_hash", "model_revision", "data_hash", "dtype", "torch_version"} <= content["conditions"].keys()
    assert content["values"]["reference"]["kl_mean"] < 1e-6


def test_the_table_of_presets_is_ordered_by_size_then_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EVAL))
    script = runpy.run_path(str(EVAL / "presets.py"))
    measured = {
        "reference": (32.0, 25.5, 0.0),
        "rtn": (4.17, 40.0, 0.5),
        "gptq": (4.17, 30.0, 0.125),
        "w8a8": (8.0, 26.0, 0.01),
    }
    rows = [
        row
        for name, (bits, perplexity, kl) in measured.items()
        for row in make_results(
            name,
            [
                ("bits_per_weight", bits, {}),
                ("perplexity", perplexity, {}),
                ("kl_mean", kl, {}),
                ("kl_mean", 9, {"confidence": "low"}),
            ],
            {"seed": 0},
        )
    ]
    lines = script["table"](rows).splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == ["reference", "w8a8", "gptq", "rtn"]
    assert lines[4] == "| gptq | 4.17 | 30.00 | 0.1250 |  |"
    assert script["recipe"]()["variants"].keys() >= {"gptq", "q4_k_m", "nvfp4", "autoround"}


def test_the_table_of_peers_is_in_the_recipes_order_with_who_made_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EVAL))
    script = runpy.run_path(str(EVAL / "peers_table.py"))
    about = {
        "model": "a-model", "off_grid": True, "window": {"rows": 2, "seq_len": 32}, "data": "some-text", "seed": 0,
        "dtype": "float32", "device": "cpu", "engine": "qbench", "engine_version": "1", "torch_version": "2",
    }  # fmt: skip
    rows = [
        row
        for name, kl, more in (("theirs", 0.25, {"made_by": "other 3"}), ("ours", 0.125, {}), ("reference", 0.0, {}))
        for row in make_results(name, [("kl_mean", kl, {}), ("kl_mean", 9, {"confidence": "low"})], about | more)
    ]
    lines = script["table"](rows, ["ours", "theirs", "later"]).splitlines()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[4:7]] == ["reference", "ours", "theirs"]
    assert lines[6] == "| theirs | other 3 |  | 0.2500 |  |  |  |"
    assert lines[-1] == "Not run: later."
