"""A runtime that keeps keys and values in few bits, against transformers with a cache that rounds them in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from qbench.errors import QbenchError
from qbench.formats.kv_cache import FP8KV, Int4KV, Int8KV, IntegerKV, KVCache, KVFormat
from qbench.kernels import dispatch
from qbench.models.source import open_model
from qbench.runtime import placement
from qbench.runtime.architecture import Architecture
from qbench.runtime.kv_cache import PagedKVCache
from qbench.runtime.llm import LLM
from qbench.runtime.placement import default_num_blocks, token_bytes
from qbench.runtime.request import SamplingParams
from qbench.runtime.runner import ModelRunner
from qbench.runtime.scheduler import SchedulerSettings
from tests.runtime.fakes import logits_in_chunks, make_runner, random_model, source_of
from tests.runtime.test_decoder import TINY

CPU = torch.device("cpu")
SCALES = ((0.01, 0.004), (0.02, 0.005), (0.015, 0.006))
CACHES = [
    KVCache(FP8KV(), SCALES[:2]),
    KVCache(Int8KV()),
    KVCache(Int8KV(symmetric=False)),
    KVCache(Int4KV(group_size=8)),
    KVCache(Int4KV(group_size=8, symmetric=True)),
]
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**TINY, head_dim=8),
    "mistral": MistralConfig(**TINY, head_dim=8, sliding_window=9),
    "qwen2": Qwen2Config(**TINY),
    "qwen3": Qwen3Config(**TINY, head_dim=16),
}


def rounded(x: torch.Tensor, format: KVFormat, scale: float | None) -> torch.Tensor:
    """What `x` ``[..., head_dim]`` is after it was stored, in float64 and in other words than the format's own."""
    if isinstance(format, FP8KV):
        assert scale is not None
        units = (x.double() / scale).clamp(-448, 448).numpy()
        exponent = np.floor(np.log2(np.maximum(np.abs(units), 2.0**-6)))
        step = 2.0 ** (exponent - 3)  # three bits after the point; subnormal below 2**-6
        return torch.from_numpy(np.rint(units / step) * step * scale)
    assert isinstance(format, IntegerKV)
    groups = x.double().reshape(*x.shape[:-1], -1, format.group_size or x.shape[-1])
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    top = 2**format.bits - 1
    if format.symmetric:
        step = (torch.maximum(-low, high) / (top // 2)).float().half().double()
        return ((groups / step).round() * step).reshape(x.shape)
    step = ((high - low) / top).float().half().double()
    low = low.float().half().double()
    return (((groups - low) / step).round().clamp(0, top) * step + low).reshape(x.shape)


class RoundingCache(DynamicCache):
    def __init__(self, kv_cache: KVCache) -> None:
        super().__init__()
        self.kv_cache = kv_cache

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        scales = self.kv_cache.layer_scales(layer_idx)
        both = [rounded(x, self.kv_cache.format, s) for x, s in zip((key_states, value_states), scales, strict=True)]
        return super().update(*both, layer_idx, *args, **kwargs)


def runner_of(config: PretrainedConfig, kv_cache: KVCache) -> tuple[torch.nn.Module, ModelRunner]:
    """A random model and our runner of it, both in float64, where hardly any value lies on the edge of two codes."""
    model = random_model(config).double()
    source = source_of(model)
    source.kv_cache = kv_cache
    return model, ModelRunner(source, dtype=torch.float64, device=CPU, num_blocks=64, block_size=4)


@pytest.mark.parametrize("kv_cache", CACHES, ids=lambda cache: repr(cache.format))
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers_with_rounded_keys_and_values(
    name: str, kv_cache: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(dispatch._SHORT, torch.float64, "f64")  # a dtype that only this test runs in
    model, runner = runner_of(CONFIGS[name], kv_cache)
    ids = torch.randint(0, 97, (45,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        exact = model(torch.tensor([ids])).logits[0]
        expected = model(torch.tensor([ids]), past_key_values=RoundingCache(kv_cache), use_cache=True).logits[0]
    assert (expected - exact).abs().max() > 0.01
    table = torch.randperm(64, generator=torch.Generator().manual_seed(2)).tolist()[:12]
    for chunks, blocks in (([45], list(range(12))), ([7, 1, 1, 20, 16], table)):
        found = logits_in_chunks(runner, ids, chunks, blocks)
        ratio = torch.linalg.norm(found - expected) / torch.linalg.norm(expected - exact)
        assert ratio < 0.02, chunks  # a value on the edge of two codes may fall to the other side


@pytest.mark.parametrize("kv_cache", CACHES, ids=lambda cache: repr(cache.format))
def test_what_is_written_is_read_back_rounded(kv_cache: KVCache) -> None:
    cache = PagedKVCache(
        num_layers=2,
        num_blocks=6,
        block_size=4,
        num_kv_heads=3,
        head_dim=16,
        dtype=torch.bfloat16,
        device=CPU,
        kv_cache=kv_cache,
    )
    assert cache.nbytes == 2 * 6 * 4 * kv_cache.format.token_bytes(3, 16)
    k, v = (torch.randn(3, 3, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    cache.write(1, torch.tensor([9, 4, 23]), k, v)
    for blocks in (slice(0, 6), torch.arange(6)):
        keys, values = cache.read(1, blocks)
        scales = kv_cache.layer_scales(1)
        for found, x, scale in zip((keys, values), (k, v), scales, strict=True):
            assert found.dtype == torch.bfloat16
            expected = torch.zeros(24, 3, 16)
            expected[[9, 4, 23]] = rounded(x, kv_cache.format, scale).float()
            assert torch.equal(found, expected.bfloat16())
    assert not any(pool[0].any() for pool in cache.read(0, slice(0, 6)))


def test_the_cache_takes_the_formats_bytes() -> None:
    sizes = {}
    for kv_cache in (None, *CACHES[:2], CACHES[3]):
        source = source_of(random_model(LlamaConfig(**TINY)))
        source.kv_cache = kv_cache
        sizes[kv_cache.format.name if kv_cache else "float32"] = make_runner(source, 10, 4).kv_cache_bytes
    tokens = 2 * 10 * 4  # layers, blocks, block size
    each = 2 * 2  # keys and values, heads
    assert sizes == {
        "float32": tokens * each * 8 * 4,
        "fp8": tokens * each * 8,
        "int8": tokens * each * (8 + 2),
        "int4": tokens * each * (4 + 4),
    }


def test_smaller_tokens_make_more_blocks_in_the_same_memory(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "available_memory", lambda device: 10**9)
    source = open_model(tiny_llama)
    settings = SchedulerSettings(
        num_blocks=1, block_size=16, max_num_seqs=10**9, max_num_batched_tokens=2048, max_model_len=512
    )
    architecture = Architecture.from_config(source.config)
    plain = default_num_blocks(source, CPU, torch.float32, settings)
    source.kv_cache = KVCache(Int8KV())
    more = default_num_blocks(source, CPU, torch.float32, settings)
    ratio = token_bytes(architecture, torch.float32, None) / token_bytes(architecture, torch.float32, source.kv_cache)
    assert ratio == 64 / 18  # 16 channels in float32; in int8 with a scale
    assert more / plain == pytest.approx(ratio, rel=1e-3)


@pytest.mark.trap(30)
def test_fp8_without_calibrated_scales_is_refused() -> None:
    source = source_of(random_model(LlamaConfig(**TINY)))
    source.kv_cache = KVCache(FP8KV())
    with pytest.raises(QbenchError, match="fp8: 0 of 2 layers have calibrated scales"):
        make_runner(source)


def test_heads_that_the_groups_do_not_divide_are_refused() -> None:
    source = source_of(random_model(LlamaConfig(**TINY)))
    source.kv_cache = KVCache(Int4KV())
    with pytest.raises(QbenchError, match="int4: group_size is 32, heads have 8 channels"):
        make_runner(source)


@pytest.mark.trap(51)
@pytest.mark.trap(52)
@pytest.mark.filterwarnings("ignore:The key-value cache")
@pytest.mark.parametrize("kv_cache", [KVCache(FP8KV(), SCALES), KVCache(Int4KV(group_size=8))], ids=str)
def test_greedy_tokens_are_the_same_alone_in_a_batch_preempted_and_from_the_prefix_cache(
    tiny_llama: Path, kv_cache: KVCache
) -> None:
    source = open_model(tiny_llama)
    source.kv_cache = kv_cache
    shared = [(11 * i) % 290 + 3 for i in range(40)]
    prompts = [shared[: 3 * n] + [(n * n + 7 * j) % 290 + 3 for j in range(n)] for n in range(1, 11)]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

    def tokens(batches: list[list[list[int]]], num_blocks: int = 256, **settings: Any) -> tuple[list[list[int]], LLM]:
        llm = LLM(source, device="cpu", dtype="float32", block_size=8, num_blocks=num_blocks, **settings)
        found = [o.outputs[0].token_ids for batch in batches for o in llm.generate(batch, greedy)]
        llm.engine.scheduler.check_integrity()
        return found, llm

    alone, _ = tokens([[prompt] for prompt in prompts], enable_prefix_caching=False)
    again, llm = tokens([[prompt] for prompt in prompts])
    assert again == alone
    assert llm.engine.scheduler.num_reused_tokens > 0
    assert tokens([prompts], max_num_batched_tokens=13)[0] == alone
    crowded, llm = tokens([prompts], num_blocks=12)
    assert crowded == alone
    assert llm.engine.scheduler.num_preemptions > 0
