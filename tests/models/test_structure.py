"""Which modules are linears of the blocks, against transformers' own modules; what a pattern means."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen2MoeConfig

from qbench.errors import QbenchError
from qbench.models.source import TensorInfo, open_model
from qbench.models.structure import layer_index, linear_names, match, weight_bytes
from tests.tiny import make_tiny_llama


def test_llama_linears_are_those_of_transformers(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path, num_hidden_layers=11, attention_bias=True, mlp_bias=True)
    source = open_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"}
    found = linear_names(source.tensors, source.config)
    assert set(found) == expected and len(found) == len(expected) == 77
    assert [layer_index(name) for name in found] == sorted(layer_index(name) or 0 for name in found)


@pytest.mark.trap(6)
def test_explicit_head_dim(tmp_path: Path) -> None:
    source = open_model(make_tiny_llama(tmp_path, head_dim=32))
    assert source.tensors["model.layers.0.self_attn.q_proj.weight"].shape == (128, 64)
    assert source.config["head_dim"] == 32


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_experts_are_linears_and_routers_are_not(tmp_path: Path, family: str) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if family == "mixtral":
        config = MixtralConfig(**sizes, **heads, num_local_experts=3)
        experts = [f"block_sparse_moe.experts.{e}.w{i}" for e in range(3) for i in (1, 2, 3)]
    else:
        config = Qwen2MoeConfig(**sizes, **heads, num_experts=3, moe_intermediate_size=16)
        experts = [f"mlp.experts.{e}.{p}_proj" for e in range(3) for p in ("gate", "up", "down")]
        experts += [f"mlp.shared_expert.{p}_proj" for p in ("gate", "up", "down")]
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    source = open_model(tmp_path)
    attention = [f"self_attn.{p}_proj" for p in "qkvo"]
    expected = {f"model.layers.{layer}.{name}" for layer in range(2) for name in attention + experts}
    assert set(linear_names(source.tensors, source.config)) == expected


def test_blocks_beyond_the_decoder_are_left_alone() -> None:
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": TensorInfo((4, 4), "F32", 64) for i in range(3)}
    assert linear_names(tensors, {"num_hidden_layers": 2}) == [
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.up_proj",
    ]
    assert weight_bytes(tensors) == 192


def test_a_config_without_a_number_of_blocks_is_refused() -> None:
    with pytest.raises(QbenchError, match="num_hidden_layers is None"):
        linear_names({}, {"text_config": {}})


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.1", "model.layers.1.mlp.up_proj", True),
        ("layers.1", "model.layers.10.mlp.up_proj", False),
        ("ayers.1", "model.layers.1.mlp.up_proj", False),
        ("mlp.gate", "model.layers.0.mlp.gate", True),
        ("mlp.gate", "model.layers.0.mlp.gate_proj", False),
        ("down_proj", "model.layers.0.mlp.down_proj", True),
        ("lm_head", "lm_head", True),
        ("layers.*.mlp", "model.layers.7.mlp.up_proj", True),
        ("model.*.up_proj", "model.layers.7.mlp.up_proj", False),
        ("*_proj", "model.layers.7.mlp.up_proj", True),
        ("self_attn.*_proj", "model.layers.7.mlp.up_proj", False),
        ("*", "lm_head", True),
        ("a.b.c", "b.c", False),
        (r"re:.*\.(q|k)_proj", "model.layers.0.self_attn.k_proj", True),
        (r"re:layers", "model.layers.0.self_attn.k_proj", False),
        (r"re:model\.layers\.1\..*", "model.layers.10.mlp.up_proj", False),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert match(pattern, name) is expected


def test_a_broken_expression_is_refused() -> None:
    with pytest.raises(QbenchError, match=r"'re:\(' is not a valid regular expression"):
        match("re:(", "lm_head")


def test_layer_index() -> None:
    assert layer_index("model.layers.12.mlp.up_proj.weight") == 12
    assert layer_index("layers.3") == 3
    assert layer_index("model.embed_tokens.weight") is None
