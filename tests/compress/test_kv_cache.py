"""Scales of FP8 keys and values, and rounded keys and values felt by later blocks, against transformers' own cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from qbench.compress.engine import compress
from qbench.compress.progress_state import ProgressState
from qbench.errors import QbenchError
from qbench.formats.integer import Integer
from qbench.formats.kv_cache import FP8KV, Int4KV, Int8KV, KVCache, KVFormat
from qbench.models.source import open_model
from qbench.solvers.gptq import GPTQ
from qbench.solvers.nearest import Nearest
from tests.compress.test_engine import all_linears, state_dict, token_rows
from tests.digest import folder_digest
from tests.tiny import byte_tokenizer, make_tiny_llama

TINY: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 2,
}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "mistral": MistralConfig(**TINY, head_dim=16, sliding_window=20),
    "qwen2": Qwen2Config(**TINY),
    "qwen3": Qwen3Config(**TINY, head_dim=32),
    "gemma3": Gemma3TextConfig(**TINY, head_dim=32, sliding_window=20),
    "phi3": Phi3Config(**TINY),
    "mixtral": MixtralConfig(**TINY, num_local_experts=4, num_experts_per_tok=2),
}


class JudgeCache(DynamicCache):
    """Notes amax and rounds, in its own words: E4M3 by way of a table of its 127 magnitudes, int8 in float64."""

    def __init__(self, format: KVFormat, scales: list[list[float]] | None = None) -> None:
        super().__init__()
        self.format, self.scales = format, scales
        self.amax: dict[int, list[float]] = {}

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self.amax[layer_idx] = [float(x.abs().max()) for x in (key_states, value_states)]
        both = []
        for i, x in enumerate((key_states, value_states)):
            if isinstance(self.format, FP8KV):
                both.append(nearest_e4m3(x, self.amax[layer_idx][i] / 448))
            else:
                scale = (x.abs().amax(-1, keepdim=True) / 127).half().float()
                both.append((x / scale).round() * scale)
        return super().update(*both, layer_idx, *args, **kwargs)


def nearest_e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    table = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    edges = (table[1:] + table[:-1]) / 2
    return (table[torch.bucketize(x.abs().double().contiguous() / scale, edges)] * scale * x.sign()).to(x.dtype)


def random_folder(folder: Path, config: PretrainedConfig) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).eval().save_pretrained(folder)
    byte_tokenizer(300).save_pretrained(folder)
    return folder


@pytest.mark.trap(30)
@pytest.mark.parametrize("family", CONFIGS)
def test_fp8_scales_are_amax_over_448_of_what_the_cache_is_given(tmp_path: Path, family: str) -> None:
    """Keys after their rotary embedding, from blocks whose earlier ones already round theirs; weights as they were."""
    folder = random_folder(tmp_path / "source", CONFIGS[family])
    rows = token_rows(4, 40)
    done = compress(open_model(folder), {}, rows, tmp_path / "model", key="k", kv_cache=FP8KV())
    assert done.layers == []
    judge = JudgeCache(FP8KV())
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        model(torch.tensor(rows), past_key_values=judge, use_cache=True)
    assert done.model.kv_cache is not None
    found = torch.tensor(done.model.kv_cache.scales)
    expected = torch.tensor([judge.amax[layer] for layer in range(3)]) / 448
    assert torch.allclose(found[0], expected[0], rtol=1e-5)
    assert torch.allclose(found, expected, rtol=0.02)  # a value on the edge of two codes may fall to the other side
    stored = json.loads((done.model.folder / "qbench.json").read_text())["kv_cache"]
    assert stored == {
        "format": {"name": "fp8"},
        "scales": {str(i): list(pair) for i, pair in enumerate(found.tolist())},
    }
    source = open_model(folder)
    assert all(torch.equal(done.model.load(name), source.load(name)) for name in source.tensors)


def test_the_weights_that_will_run_decide_the_scales(tiny_llama: Path, tmp_path: Path) -> None:
    source = open_model(tiny_llama)
    rows = token_rows()
    coarse = Integer(bits=2, group_size=64)
    done = compress(source, all_linears(source, Nearest(), coarse), rows, tmp_path / "m", key="k", kv_cache=FP8KV())
    judge = JudgeCache(FP8KV())
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
        model(torch.tensor(rows), past_key_values=JudgeCache(FP8KV()), use_cache=True)
        model.load_state_dict(state_dict(done.model), strict=False)
        model(torch.tensor(rows), past_key_values=judge, use_cache=True)
    assert done.model.kv_cache is not None
    assert done.model.kv_cache.scales[0] == pytest.approx([amax / 448 for amax in judge.amax[0]], rel=1e-5)


def test_later_blocks_feel_rounded_keys_and_values(tiny_llama: Path, tmp_path: Path) -> None:
    """What GPTQ sees of the last block's input, through the error it reports."""
    source = open_model(tiny_llama)
    rows = token_rows()
    name = "model.layers.2.self_attn.q_proj"
    schemes = {name: all_linears(source, Nearest())[name]}
    for kv_cache in (None, Int8KV(), Int4KV(group_size=16)):
        folder = tmp_path / (kv_cache.name if kv_cache else "float")
        done = compress(source, schemes, rows, folder, key="k", kv_cache=kv_cache)
        model = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
        seen: list[torch.Tensor] = []
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        with torch.no_grad():
            cache = None if kv_cache is None else JudgeCache(kv_cache)
            model(torch.tensor(rows), past_key_values=cache, use_cache=cache is not None)
        before, after = (w[f"{name}.weight"].double() for w in (state_dict(source), state_dict(done.model)))
        inputs = seen[0].flatten(0, 1).double()
        expected = torch.linalg.norm(inputs @ (after - before).T) / torch.linalg.norm(inputs @ before.T)
        judged = pytest.approx(float(expected), rel=1e-5)
        assert (done.layers[0].relative_error == judged) == (kv_cache is None or kv_cache == Int8KV())


@pytest.mark.trap(30)
@pytest.mark.parametrize("which", ["k", "v"])
def test_keys_or_values_that_are_all_zeros_name_their_block(tmp_path: Path, which: str) -> None:
    folder = make_tiny_llama(tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.get_parameter(f"model.layers.1.self_attn.{which}_proj.weight").zero_()
    model.save_pretrained(folder)
    source = open_model(folder)
    what = {"k": "keys", "v": "values"}[which]
    with pytest.raises(
        QbenchError, match=rf"model\.layers\.1: KV-cache format fp8: {what}: the largest magnitude is 0"
    ):
        compress(source, {}, token_rows(), tmp_path / "model", key="k", kv_cache=FP8KV())
    assert not (tmp_path / "model").exists()
    done = compress(source, {}, token_rows(), tmp_path / "int8", key="k", kv_cache=Int8KV())
    assert done.model.kv_cache == KVCache(Int8KV())


@pytest.mark.trap(30)
def test_a_block_that_keeps_no_keys_and_values_is_named(tiny_llama: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention

    forward = LlamaAttention.forward

    def without_cache(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        cache = None if self.layer_idx == 1 else past_key_values
        return forward(self, *args, past_key_values=cache, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", without_cache)
    for format in (FP8KV(), Int8KV()):
        with pytest.raises(QbenchError, match=r"model\.layers\.1: its attention keeps no keys and values"):
            compress(open_model(tiny_llama), {}, token_rows(), tmp_path / "model", key="k", kv_cache=format)


def test_heads_that_the_groups_do_not_divide_name_their_block(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(QbenchError, match=r"model\.layers\.0: .*int4: group_size is 32, heads have 16 channels"):
        compress(open_model(tiny_llama), {}, token_rows(), tmp_path / "model", key="k", kv_cache=Int4KV())


@pytest.mark.trap(15)
def test_an_interrupted_run_ends_in_the_same_scales_and_bytes(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = open_model(tiny_llama)
    schemes = all_linears(source, GPTQ())
    whole = compress(source, schemes, token_rows(), tmp_path / "whole", key="k", kv_cache=FP8KV())
    save = ProgressState.save

    def interrupted(self: ProgressState, blocks_done: int, *args: Any) -> None:
        save(self, blocks_done, *args)
        if blocks_done < 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressState, "save", interrupted)
    for done in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            compress(source, schemes, token_rows(), tmp_path / "resumed", key="k", kv_cache=FP8KV())
        state = json.loads((tmp_path / "resumed.part" / "progress" / "state.json").read_text())
        assert len(state["kv_scales"]) == done
    compress(source, schemes, token_rows(), tmp_path / "resumed", key="k", kv_cache=FP8KV())
    assert whole.model.kv_cache is not None
    assert len(whole.model.kv_cache.scales) == 3
    assert folder_digest(tmp_path / "resumed") == folder_digest(tmp_path / "whole")
