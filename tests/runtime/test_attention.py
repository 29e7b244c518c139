"""Paged attention against a plain softmax over each request's own keys, in float64."""

from __future__ import annotations

import pytest
import torch

from qbench.runtime.attention import StepPlan, attend
from qbench.runtime.kv_cache import PagedKVCache
from qbench.runtime.scheduler import ScheduledStep
from tests.runtime.fakes import scheduled

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 8, 4


def filled_cache(num_blocks: int = 40) -> PagedKVCache:
    cache = PagedKVCache(
        num_layers=2,
        num_blocks=num_blocks,
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        dtype=torch.float32,
        device=CPU,
    )
    generator = torch.Generator().manual_seed(0)
    cache.keys["floats"].normal_(generator=generator)
    cache.values["floats"].normal_(generator=generator)
    return cache


def plain(
    q: torch.Tensor, cache: PagedKVCache, layer: int, table: list[int], position: int, window: int | None
) -> torch.Tensor:
    """One query ``[H, D]`` at `position`."""
    first = 0 if window is None else max(0, position - window + 1)
    slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(first, position + 1)]
    k = cache.keys["floats"][layer].flatten(0, 1)[slots].double().repeat_interleave(HEADS // KV_HEADS, 1)
    v = cache.values["floats"][layer].flatten(0, 1)[slots].double().repeat_interleave(HEADS // KV_HEADS, 1)
    weights = (torch.einsum("hd,shd->hs", q.double(), k) * 0.3).softmax(-1)
    return torch.einsum("hs,shd->hd", weights, v)


@pytest.mark.trap(58)
@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 100])
def test_a_mixed_step(window: int | None) -> None:
    cache = filled_cache()
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1)).tolist()
    requests = [
        scheduled("chunk in the middle", [1] * 6, 5, order[:3]),
        scheduled("single, long", [1], 18, order[3:8]),
        scheduled("whole prompt", [1] * 7, 0, order[8:10]),
        scheduled("single, first token", [1], 0, order[10:11]),
        scheduled("single, end of a block", [1], 3, order[11:12]),
        scheduled("single, neighbouring blocks", [1], 17, [20, 21, 22, 23, 24]),
        scheduled("single, more blocks than needed", [1], 16, order[12:19]),
        scheduled("chunk, neighbouring blocks", [1] * 3, 8, [30, 31, 32, 33]),
    ]
    plan = StepPlan.build(ScheduledStep(requests), BLOCK, {window}, torch.float32, CPU)
    q = torch.randn(len(plan.positions), HEADS, DIM, generator=torch.Generator().manual_seed(2))
    found = attend(q, cache, 1, plan, window, 0.3)
    row = 0
    for request in requests:
        for offset in range(len(request.token_ids)):
            position = request.start + offset
            assert plan.positions[row] == position
            assert plan.slots[row] == request.block_table[position // BLOCK] * BLOCK + position % BLOCK
            expected = plain(q[row], cache, 1, request.block_table, position, window)
            torch.testing.assert_close(found[row].double(), expected, rtol=1e-5, atol=1e-5)
            row += 1
    assert row == len(found)


def test_a_very_long_request_does_not_widen_the_batch_of_short_ones() -> None:
    requests = [scheduled("long", [1], 127, list(range(32)))]
    requests += [scheduled(str(i), [1], 1, [32 + i]) for i in range(4)]
    plan = StepPlan.build(ScheduledStep(requests), BLOCK, {None}, torch.float32, CPU)
    assert [batch.context for batch in plan.batches] == [128, 2]


def test_write_then_read() -> None:
    cache = filled_cache()
    k, v = torch.randn(2, KV_HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
    before = cache.keys["floats"][0].clone()
    cache.write(1, torch.tensor([5, 14]), k, v)
    keys, values = cache.read(1, torch.tensor([3, 1]))
    assert torch.equal(keys[2], k[1])
    assert torch.equal(values[BLOCK + 1], v[0])
    assert torch.equal(cache.read(1, slice(1, 2))[0][1], k[0])
    assert torch.equal(cache.keys["floats"][0], before)
