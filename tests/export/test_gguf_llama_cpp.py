"""Exported GGUF files computed by llama.cpp, against transformers in float32 with the same weights.

llama.cpp rounds activations to float16 for F16 weights and to int8 for quantized ones, so logits agree to that and
greedy text until the first near tie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from qbench.export.gguf import write
from qbench.formats.base import FORMATS, QuantizedTensor
from qbench.formats.gguf_blocks import KINDS
from qbench.formats.integer import Integer
from qbench.models.source import ModelSource, open_model
from tests.export.quantized import QuantizedSource
from tests.llama_cpp import LlamaCpp
from tests.tiny import byte_tokenizer

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama, 8 query and 2 key-value heads, tied": {"num_attention_heads": 8, "tie_word_embeddings": True},
    "llama, explicit head_dim": {"head_dim": 32},
    "llama, biases": {"attention_bias": True, "mlp_bias": True},
    "llama, llama3 rope": {"rope_parameters": LLAMA3},
    "llama, linear rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 32},
}


def random_model(folder: Path, model_type: str, **overrides: Any) -> PreTrainedModel:
    """A tiny model with random norms and biases too; token 2, the end, is never likely."""
    fields = {
        "vocab_size": 300,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(fields | overrides))).eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.lm_head.weight.data[2] = 0
    model.save_pretrained(folder)
    byte_tokenizer(300).save_pretrained(folder)
    return model


@pytest.mark.trap(35)
@pytest.mark.parametrize("name", NETWORKS)
def test_log_probabilities(tmp_path: Path, name: str) -> None:
    model = random_model(tmp_path / "m", name.split(",")[0], **NETWORKS[name])
    write(open_model(tmp_path / "m"), tmp_path, type="f16")
    judge = LlamaCpp(tmp_path / "model.gguf")
    prompt = [1, *range(20, 220, 3)]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    found = judge.next_log_probabilities(prompt, 50)
    assert max(found, key=found.__getitem__) == int(expected.argmax())
    for token, value in found.items():
        assert value == pytest.approx(float(expected[token]), abs=0.05)


def float32_model(source: ModelSource) -> PreTrainedModel:
    """transformers' own network with the values that `source` stands for."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**source.config), dtype=torch.float32)
    loaded = {name: source.load(name) for name in source.tensors}
    values = {n: t.dequantize() if isinstance(t, QuantizedTensor) else t.float() for n, t in loaded.items()}
    model.load_state_dict(values, strict=False)
    model.tie_weights()
    return model.eval()


PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "<|im_start|>user\nName three colours.<|im_end|>\n<|im_start|>assistant\n",
]


@pytest.mark.parametrize(("kind", "near_tie"), [("f16", 0.05), ("auto", 0.5)])
def test_greedy_text_of_the_default_model(
    tmp_path: Path, default_model: ModelSource, kind: str, near_tie: float
) -> None:
    source = default_model
    if kind == "auto":  # Q4_0: llama.cpp rounds activations to int8
        source = QuantizedSource(default_model, lambda name: Integer(4, "group", 32))
    write(source, tmp_path, type=kind)
    model, judge = float32_model(source), LlamaCpp(tmp_path / "model.gguf")
    source.write_side_files(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    count, agreeing = 12, 0
    for prompt in PROMPTS:
        ids = tokenizer(prompt)["input_ids"]
        answer = judge.greedy(ids, count)
        with torch.no_grad():
            logits = model(torch.tensor([ids + answer])).logits[0, len(ids) - 1 : -1]
        top = logits.topk(2).values
        for position, token in enumerate(answer):
            agrees = int(logits[position].argmax()) == token
            agreeing += agrees
            assert agrees or float(top[position, 0] - top[position, 1]) < near_tie
    assert agreeing >= 0.9 * count * len(PROMPTS)


@pytest.mark.trap(35)
@pytest.mark.parametrize("kind", KINDS)
def test_block_types_are_computed_alike(tmp_path: Path, kind: str) -> None:
    """llama.cpp decodes the blocks as we do; it also rounds activations to 8 bits, which these tolerances allow."""
    model = random_model(tmp_path / "m", "llama", hidden_size=256, intermediate_size=256, initializer_range=0.05)
    model.lm_head.weight.data[97:] *= 0.1  # an ASCII letter is likeliest: half characters are held back
    model.save_pretrained(tmp_path / "m")
    source = QuantizedSource(open_model(tmp_path / "m"), lambda name: FORMATS.get(kind.lower())())
    write(source, tmp_path)
    judge = LlamaCpp(tmp_path / "model.gguf")
    prompt = [1, *range(20, 220, 3)]
    with torch.no_grad():
        expected = float32_model(source)(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    found = judge.next_log_probabilities(prompt, 50)
    differences = [abs(value - float(expected[token])) for token, value in found.items()]
    assert sum(differences) / len(differences) < 0.03
