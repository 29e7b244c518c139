"""llama.cpp's mixes: the types in a file that llama.cpp made, and its rules at other depths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from qbench.gguf_mixes import MIXES, mixed_formats
from qbench.models.source import ModelSource, TensorInfo
from qbench.recipe import Variant
from qbench.resolve import replaced, resolve


class Shapes(ModelSource):
    """A model of which only names and shapes are known."""

    location = "shapes"
    revision = "1"

    def __init__(self, config: dict[str, Any], linears: dict[str, tuple[int, int]], head: bool = False) -> None:
        self.config = config
        self._tensors = {
            f"model.layers.{i}.{name}.weight": TensorInfo(shape, "F32", 0)
            for i in range(config["num_hidden_layers"])
            for name, shape in linears.items()
        }
        self._tensors["model.embed_tokens.weight"] = TensorInfo((300, config["hidden_size"]), "F32", 0)
        if head:
            self._tensors["lm_head.weight"] = self._tensors["model.embed_tokens.weight"]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def load(self, name: str) -> torch.Tensor:
        raise AssertionError(name)

    def write_side_files(self, folder: Path) -> list[str]:
        raise AssertionError(folder)


GEMMA = {"num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 640}
GEMMA_LINEARS = {
    "self_attn.q_proj": (1024, 640),
    "self_attn.k_proj": (256, 640),
    "self_attn.v_proj": (256, 640),
    "self_attn.o_proj": (640, 1024),
    "mlp.gate_proj": (2048, 640),
    "mlp.up_proj": (2048, 640),
    "mlp.down_proj": (640, 2048),
}


@pytest.mark.trap(37)
def test_the_types_of_a_file_that_llama_cpp_made() -> None:
    """gemma-3-270m-q4_k_m.gguf: the blocks with more bits, and what takes a K-quant's place in rows of 640."""
    more = {0, 1, 4, 7, 10, 13, 15, 16, 17}
    source, variant = Shapes(GEMMA, GEMMA_LINEARS), Variant(preset="q4_k_m")
    found = {module: scheme.format.name for module, scheme in resolve(variant, source).items()}
    expected = {}
    for i in range(18):
        plain = dict.fromkeys(GEMMA_LINEARS, "q5_0") | {"self_attn.o_proj": "q4_k", "mlp.down_proj": "q4_k"}
        types = plain | ({"self_attn.v_proj": "q8_0", "mlp.down_proj": "q6_k"} if i in more else {})
        expected |= {f"model.layers.{i}.{name}": kind for name, kind in types.items()}
    assert found == expected
    assert replaced(variant, source) == [
        "81 modules are in q5_0 instead of q4_k, whose blocks do not divide their rows of 640.",
        "9 modules are in q8_0 instead of q6_k, whose blocks do not divide their rows of 640.",
    ]


def test_a_head_of_its_own_gets_six_bits_and_rules_win() -> None:
    config = GEMMA | {"hidden_size": 768}
    source = Shapes(config, {"mlp.down_proj": (768, 2048)}, head=True)
    schemes = resolve(Variant(preset="q4_k_m"), source)
    assert schemes["lm_head"].format.name == "q6_k"
    assert schemes["model.layers.2.mlp.down_proj"].format.name == "q4_k"
    rule = {"match": "layers.2", "format": {"name": "q8_0"}}
    ruled = resolve(Variant.model_validate({"preset": "q4_k_m", "rules": [rule], "ignore": ["lm_head"]}), source)
    assert ruled["model.layers.2.mlp.down_proj"].format.name == "q8_0"
    assert "lm_head" not in ruled
    one = resolve(Variant.model_validate({"preset": "q4_k_m", "format": {"name": "q5_k"}}), source)
    assert {scheme.format.name for scheme in one.values()} == {"q5_k"}


@pytest.mark.parametrize(
    ("mix", "down", "value", "output"),
    [
        ("q2_k", ["q3_k"] * 16, ["q3_k"] * 16, "q3_k"),
        ("q3_k_s", [None] * 16, [None] * 16, None),
        ("q3_k_m", ["q5_k", *["q4_k"] * 15], ["q5_k", "q5_k", *["q4_k"] * 14], "q4_k"),
        ("q3_k_l", ["q5_k"] * 16, ["q5_k"] * 16, "q5_k"),
        ("q4_k_s", ["q5_k", "q5_k", *[None] * 14], [*["q5_k"] * 4, *[None] * 12], None),
        ("q5_k_s", [None] * 16, [None] * 16, None),
    ],
)
def test_rules_at_sixteen_blocks(mix: str, down: list[str | None], value: list[str | None], output: str | None) -> None:
    config = {"num_hidden_layers": 16, "num_attention_heads": 8, "num_key_value_heads": 4}
    names = ("mlp.down_proj", "self_attn.v_proj", "self_attn.o_proj", "self_attn.q_proj")
    found = mixed_formats(mix, [f"model.layers.{i}.{name}" for i in range(16) for name in names], config)
    assert [found.get(f"model.layers.{i}.mlp.down_proj") for i in range(16)] == down
    assert [found.get(f"model.layers.{i}.self_attn.v_proj") for i in range(16)] == value
    assert [found.get(f"model.layers.{i}.self_attn.o_proj") for i in range(16)] == [output] * 16
    assert not any("q_proj" in module for module in found)


def test_mixes_of_special_models() -> None:
    value, key = "model.layers.5.self_attn.v_proj", "model.layers.5.self_attn.k_proj"
    eight = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8}
    assert mixed_formats("q4_k_m", [value, key], eight) == {value: "q8_0", key: "q8_0"}
    wide = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert mixed_formats("q2_k", [value], wide) == {value: "q4_k"}
    large = {"num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8}
    values = [f"model.layers.{i}.self_attn.v_proj" for i in range(80)]
    for mix in MIXES:
        assert set(mixed_formats(mix, values, large).values()) <= {"q5_k", "q6_k"}, mix
    fused = "model.layers.5.self_attn.qkv_proj"
    assert mixed_formats("q4_k_m", [fused], wide) == {fused: "q5_k"}
