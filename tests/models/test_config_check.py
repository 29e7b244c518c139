"""Sizes that a config.json claims are believed only within bounds, whichever way a model is opened."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qbench.errors import QbenchError
from qbench.models.config_check import check_sizes
from qbench.models.source import open_model
from tests.tiny import make_tiny_llama


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("num_hidden_layers", 10**9, "from 1 to 10000"),
        ("num_hidden_layers", True, "a whole number"),
        ("hidden_size", "64", "a whole number"),
        ("head_dim", 10**12, "from 1 to 100000"),
        ("vocab_size", 0, "from 1"),
        ("intermediate_size", [128, -1], "from 1"),
        ("num_attention_heads", 2.5, "a whole number"),
        ("max_position_embeddings", "x", "a whole number"),
        ("sliding_window", -1, "from 1"),
        ("rms_norm_eps", None, "a number above 0"),
        ("rope_theta", 0, "a number above 0"),
        ("rope_theta", float("nan"), "a number above 0"),
        ("rope_parameters", 3, "an object"),
        ("rope_parameters", {"rope_theta": "x"}, "a number above 0"),
        ("text_config", {"hidden_size": -1}, "a whole number"),
        ("architectures", "LlamaForCausalLM", "a list of names"),
        ("model_type", 3, "a name"),
        ("tie_word_embeddings", "yes", "true or false"),
        ("eos_token_id", [[1]], "a token id"),
    ],
)
def test_a_value_that_cannot_be_is_refused_when_the_model_is_opened(
    tmp_path: Path, key: str, value: Any, allowed: str
) -> None:
    folder = make_tiny_llama(tmp_path / "m", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(QbenchError) as caught:
        open_model(folder)
    assert str(caught.value).startswith(f"{folder}: config.json: ")
    assert allowed in str(caught.value)


def test_all_are_listed_and_absent_or_null_ones_are_fine() -> None:
    check_sizes({"head_dim": None, "num_key_value_heads": None, "eos_token_id": [1, 2], "pad_token_id": -1}, "x")
    with pytest.raises(QbenchError, match=r"hidden_size is 0.*vocab_size is -1"):
        check_sizes({"hidden_size": 0, "vocab_size": -1}, "x")


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn])
def test_bare_codes_are_not_taken_for_values(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = make_tiny_llama(tmp_path / "m", num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(dtype)}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(QbenchError, match=f"{name} is stored as .*, in a quantization that config.json does not name"):
        open_model(folder)
