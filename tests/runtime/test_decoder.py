"""Logits of the decoder against transformers' own models."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from qbench.errors import QbenchError
from qbench.runtime.architecture import Architecture
from tests.runtime.fakes import logits_in_chunks, make_runner, random_model, source_of

TINY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "llama tied": LlamaConfig(**TINY | {"tie_word_embeddings": True}),
    "llama all biases": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama linear rope": LlamaConfig(
        **TINY, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}
    ),
    "llama llama3 rope": LlamaConfig(**TINY, rope_parameters=LLAMA3_ROPE),
    "llama no groups": LlamaConfig(**TINY | {"num_key_value_heads": 6}, rms_norm_eps=0.1),
    "mistral full": MistralConfig(**TINY, head_dim=8, sliding_window=None),
    "qwen2": Qwen2Config(**TINY),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
}


def oracle(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def assert_logits_equal(config: PretrainedConfig, length: int = 45) -> None:
    model = random_model(config)
    ids = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = oracle(model, ids)
    assert expected.std() > 0.1
    runner = make_runner(source_of(model))
    table = torch.randperm(64, generator=torch.Generator().manual_seed(2)).tolist()[: -(-length // 4)]
    for chunks in ([length], [1] * length, [7, 1, 1, 20, length - 29]):
        found = logits_in_chunks(runner, ids, chunks, table)
        assert (found - expected).abs().max() < 1e-4, chunks


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_however_the_prompt_is_cut(name: str) -> None:
    assert_logits_equal(CONFIGS[name])


@pytest.mark.trap(6)
def test_explicit_head_dim() -> None:
    config = LlamaConfig(**TINY | {"hidden_size": 64, "num_attention_heads": 4}, head_dim=32)
    assert Architecture.from_config(source_of(random_model(config)).config).tensor_shapes()[
        "model.layers.0.self_attn.q_proj.weight"
    ] == (128, 64)
    assert_logits_equal(config)


@pytest.mark.trap(58)
@pytest.mark.parametrize("window", [1, 4, 5, 16])
def test_sliding_window_around_its_edges(window: int) -> None:
    assert_logits_equal(MistralConfig(**TINY, head_dim=8, sliding_window=window))


@pytest.mark.trap(58)
def test_sliding_window_in_some_layers_only() -> None:
    config = Qwen2Config(**TINY, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    assert Architecture.from_config(source_of(random_model(config)).config).windows == (None, 6)
    assert_logits_equal(config)


@pytest.mark.parametrize(
    "older",
    [
        {"rope_theta": 5000.0},
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 500000.0, "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"}},
        {"rope_theta": 5000.0, "rope_scaling": None},
    ],
)
def test_older_spelling_of_rope(older: dict[str, Any]) -> None:
    model = random_model(LlamaConfig(**TINY, **older))
    source = source_of(model)
    del source.config["rope_parameters"]
    source.config |= older
    ids = list(range(40))
    found = logits_in_chunks(make_runner(source), ids, [40], list(range(10)))
    assert (found - oracle(model, ids)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LLamaForCausalLM"]}, r"LLamaForCausalLM.*LlamaForCausalLM.*Qwen2ForCausalLM"),
        ({"architectures": None}, r"Known: LlamaForCausalLM"),
        ({"num_key_value_heads": 4}, r"num_key_value_heads is 4.*divisor of num_attention_heads \(6\)"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads is 0"),
        ({"num_attention_heads": 0}, r"LlamaForCausalLM does not accept it"),
        ({"hidden_size": "wide"}, r"LlamaForCausalLM does not accept it.*hidden_size"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, r"does not accept it.*low_freq_factor"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu'.*'silu'"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
            r"rope_type 'yarn'.*default, linear, llama3",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}},
            r"partial_rotary_factor 0.5",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    source = source_of(random_model(CONFIGS["llama"]))
    source.config |= change
    with pytest.raises(QbenchError, match=re.compile(message, re.DOTALL)):
        make_runner(source)


def test_the_config_of_a_source_is_not_changed() -> None:
    config = source_of(random_model(CONFIGS["llama"])).config
    del config["rope_parameters"]
    config |= {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 2.0}, "dtype": "unheard of"}
    before = deepcopy(config)
    Architecture.from_config(config)
    assert config == before


def test_llama3_frequencies_of_a_published_case() -> None:
    from qbench.runtime.rope import inverse_frequencies

    scaled = LLAMA3_ROPE | {"original_max_position_embeddings": 8192}
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    factors = inverse_frequencies(plain, 64) / inverse_frequencies(scaled, 64)
    expected = torch.tensor([1.0] * 15 + [1.6513, 3.2923, 9.6667] + [32.0] * 14)
    torch.testing.assert_close(factors, expected, rtol=1e-4, atol=1e-4)
