"""Rotations: orthogonal, without effect on the logits, and good against outliers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from qbench.compress.engine import compress
from qbench.errors import QbenchError
from qbench.formats.base import QuantizedTensor
from qbench.formats.integer import Integer
from qbench.models.source import ModelSource, open_model
from qbench.models.structure import linear_names
from qbench.recipe import load_recipe
from qbench.result import read_results
from qbench.scheme import Scheme
from qbench.solvers.nearest import Nearest
from qbench.transforms.awq import AWQ
from qbench.transforms.hadamard import Rotated, rotated
from qbench.validate import check
from tests import families
from tests.compress.test_engine import token_rows
from tests.models.test_offgrid import FAMILIES, logits
from tests.tiny import byte_tokenizer, make_tiny_llama

KEPT_BIASES = ("q_proj.bias", "k_proj.bias", "gate_proj.bias", "up_proj.bias")  # of channels that are not rotated


def write_model(folder: Path, family: str, overrides: dict[str, Any]) -> ModelSource:
    """A random float64 model whose norms are far from 1; 96 = 32 * 3 channels."""
    sizes = {"vocab_size": 300, "hidden_size": 96, "intermediate_size": 80, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | heads | overrides))).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return open_model(folder)


@pytest.mark.parametrize("width", [1, 9, 64, 576, 96])
def test_the_matrix_is_orthogonal_and_spreads_every_channel(width: int) -> None:
    matrix = rotated(torch.eye(width, dtype=torch.float64), 1, width, "key")
    assert (matrix @ matrix.T - torch.eye(width)).abs().max() < 1e-12
    power = width & -width
    assert matrix.abs().max() <= power**-0.5 + 1e-12
    assert torch.equal(matrix, rotated(torch.eye(width, dtype=torch.float64), 1, width, "key"))
    assert width == 1 or not torch.equal(matrix, rotated(torch.eye(width, dtype=torch.float64), 1, width, "other"))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay_the_same(tmp_path: Path, family: str) -> None:
    source = write_model(tmp_path, family, FAMILIES[family])
    moved = Rotated(source, seed=1)
    assert moved.config["tie_word_embeddings"] is False
    tokens = torch.randint(300, (2, 12))
    reference = logits(source, tokens, torch.float64)
    assert (logits(moved, tokens, torch.float64) - reference).abs().max() < 1e-9 * reference.abs().max()
    for name in source.tensors:
        kept = "q_norm" in name or "k_norm" in name or name.endswith(KEPT_BIASES)
        assert torch.equal(source.load(name), moved.load(name)) is kept, name  # type: ignore[arg-type]


@pytest.mark.parametrize("family", families.FAMILIES | families.MORE)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=str)
def test_logits_of_every_family_stay_the_same(
    tmp_path: Path, family: str, dtype: torch.dtype, tolerance: float
) -> None:
    """96 = 32 * 3 channels; heads of 24 = 8 * 3."""
    source = open_model(families.make_family(tmp_path, family, 96, dtype=dtype))
    moved = Rotated(source, seed=1)
    tokens = torch.tensor(token_rows(2, 20))
    reference, changed = (families.logits(model, tokens, dtype) for model in (source, moved))
    assert (changed - reference).abs().max() < tolerance * reference.abs().max()


def test_what_cannot_be_rotated_is_told(tmp_path: Path) -> None:
    """A norm of each branch's output stands between the linears and the residual stream of Gemma 3."""
    source = open_model(families.make_family(tmp_path, "gemma3_text"))
    moved = Rotated(source, seed=1)
    changed = {name for name in source.tensors if not torch.equal(source.load(name), moved.load(name))}
    assert {name.split(".", 3)[-1] for name in changed} == {"self_attn.v_proj.weight", "self_attn.o_proj.weight"}
    assert "lm_head.weight" not in moved.tensors
    assert moved.config["tie_word_embeddings"] is True
    assert len(moved.kept) == 1
    assert "the residual stream is not" in moved.kept[0]
    assert Rotated(open_model(families.make_family(tmp_path / "llama", "llama")), seed=1).kept == []


def test_the_plan_warns_of_what_is_not_rotated(tmp_path: Path) -> None:
    model = families.make_family(tmp_path / "m", "gemma3_text")
    (tmp_path / "text.txt").write_text("It was the best of times, it was the worst of times. " * 40)
    content = {
        "model": {"source": str(model)},
        "calibration": {"data": str(tmp_path / "text.txt"), "rows": 2, "seq_len": 48},
        "evaluate": None,
        "benchmark": None,
        "variants": {"turned": {"preset": "absmax-int8", "rotate": True}},
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    plan = check(load_recipe(tmp_path / "r.yaml"), open_model(model), out=tmp_path)
    assert any(warning.startswith("variants.turned.rotate: only value heads") for warning in plan.warnings)


def test_fused_projections_experts_and_routers_are_rotated(tmp_path: Path) -> None:
    for family in ("phi3", "mixtral"):
        source = open_model(families.make_family(tmp_path / family, family))
        moved = Rotated(source, seed=1)
        assert all(not torch.equal(source.load(name), moved.load(name)) for name in source.tensors)  # type: ignore[arg-type]
        norms = [moved.load(name) for name in source.tensors if "norm" in name]
        assert all(bool((norm == 1).all()) for norm in norms)  # type: ignore[union-attr]


def test_logits_in_float32(tiny_llama: Path) -> None:
    source = open_model(tiny_llama)
    tokens = torch.tensor(token_rows(2))
    reference, moved = (logits(model, tokens, torch.float32) for model in (source, Rotated(source, seed=0)))
    assert (moved - reference).abs().max() < 1e-4 * reference.abs().max()


def test_rotation_then_awq_lowers_the_divergence_of_a_model_with_outliers(tmp_path: Path) -> None:
    """A few loud channels in the residual stream, as trained models have; 3 bits, a scale a row."""
    folder = make_tiny_llama(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
                parameter[:, ::16] *= 12
    model.save_pretrained(folder)
    source = open_model(folder)
    held_out = torch.tensor(token_rows(seed=9))
    reference = logits(source, held_out, torch.float32).log_softmax(-1)
    found = {}
    for label, start, transform in (
        ("plain", source, None),
        ("rotated", Rotated(source, 0), None),
        ("both", Rotated(source, 0), AWQ(clip=False)),
    ):
        format = Integer(bits=4, granularity="channel")
        schemes = dict.fromkeys(linear_names(start.tensors, start.config), Scheme(format, Nearest(), transform))
        done = compress(start, schemes, token_rows(), tmp_path / label, key="k")
        changed = logits(Decoded(done.model), held_out, torch.float32).log_softmax(-1)
        found[label] = float((reference.exp() * (reference - changed)).sum(-1).mean())
    assert found["rotated"] < 0.8 * found["plain"]
    assert found["both"] < 0.8 * found["plain"]


class Decoded:
    """A compressed model's tensors as floats."""

    def __init__(self, model: ModelSource) -> None:
        self.model, self.tensors, self.config = model, model.tensors, model.config

    def load(self, name: str) -> torch.Tensor:
        tensor = self.model.load(name)
        return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor


def test_other_architectures_and_quantized_tensors_are_refused(tmp_path: Path, tiny_llama: Path) -> None:
    source = open_model(tiny_llama)
    schemes = dict.fromkeys(linear_names(source.tensors, source.config), Scheme(Integer(), Nearest()))
    done = compress(source, schemes, token_rows(2), tmp_path / "out", key="k")
    with pytest.raises(QbenchError, match=r"q_proj\.weight .* is quantized"):
        Rotated(done.model, 0).load("model.layers.0.self_attn.q_proj.weight")
    source.config["model_type"] = "gpt2"
    with pytest.raises(QbenchError, match="'gpt2' model; known: llama"):
        Rotated(source, 0)


def test_a_recipe_rotates_and_scales_and_runs(tmp_path: Path, tiny_llama: Path) -> None:
    """Through the command line: the compressed model is measured by the runtime, its rotation in its key."""
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times, it was the age of wisdom. " * 40)
    rows = {"data": str(text), "rows": 2, "seq_len": 48}
    content = {
        "name": "r",
        "model": {"source": str(tiny_llama)},
        "calibration": rows,
        "evaluate": rows,
        "benchmark": None,
        "variants": {
            name: {"preset": "absmax-int8", "rotate": rotate, "transform": {"name": "awq"}}
            for name, rotate in (("still", False), ("turned", True))
        },
    }
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(content))
    command = [sys.executable, "-m", "qbench", "run", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "out")]
    subprocess.run(command, check=True, capture_output=True)
    found = {(row.variant, row.metric): row.value for row in read_results(tmp_path / "out" / "results.jsonl")}
    assert 0 <= found["turned", "kl_mean"] < 0.01
    assert 0 <= found["still", "kl_mean"] < 0.01
    assert found["turned", "transforms_skipped"] == 3  # o_proj: heads share values
    keys = [json.loads((tmp_path / f"out/variants/{n}/compress.json").read_text())["key"] for n in ("still", "turned")]
    assert keys[0] != keys[1]
