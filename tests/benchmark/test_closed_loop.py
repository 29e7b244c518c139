"""Latency and throughput under an engine and a clock whose delays are known."""

import subprocess
import sys

import pytest
import torch

from qbench.benchmark.closed_loop import RequestTimes, Workload, run_closed_loop
from qbench.benchmark.memory import peak_memory
from qbench.benchmark.metrics import latency_metrics
from qbench.errors import QbenchError
from qbench.result import make_results
from tests.benchmark.fake import FakeEngine

TOKENS = list(range(1000))


def by_name(requests: list[RequestTimes], concurrency: int) -> dict[tuple[str, int | None], float]:
    rows = make_results("v", latency_metrics(requests, concurrency), {})
    assert all(row.detail["concurrency"] == concurrency for row in rows)
    return {(row.metric, row.detail.get("percentile")): row.value for row in rows}


def test_one_at_a_time() -> None:
    engine = FakeEngine()
    requests = run_closed_loop(engine, Workload(4, 16, 5), TOKENS, 1, engine.clock)
    assert len(requests) == 4
    assert engine.most_running == 1
    found = by_name(requests, 1)
    assert found["ttft_s", 50] == pytest.approx(0.6)
    assert found["itl_s", 99] == pytest.approx(0.1)
    assert found["tpot_s", 50] == pytest.approx(0.1)
    assert found["wall_s", None] == pytest.approx(4 * (0.6 + 4 * 0.1))
    assert found["output_tokens_per_s", None] == pytest.approx(20 / 4.0)
    assert found["requests_per_s", None] == pytest.approx(1.0)


def test_concurrency_is_kept_and_a_newcomer_delays_the_others() -> None:
    engine = FakeEngine()
    requests = run_closed_loop(engine, Workload(8, 16, 3), TOKENS, 4, engine.clock)
    assert engine.most_running == 4
    found = by_name(requests, 4)  # two rounds of four: 0.6 + 0.1 + 0.1 each
    assert found["wall_s", None] == pytest.approx(1.6)
    assert found["output_tokens_per_s", None] == pytest.approx(24 / 1.6)
    assert found["ttft_s", 99] == pytest.approx(0.6)


@pytest.mark.trap(62)
def test_tokens_are_counted_by_the_engine_not_by_steps() -> None:
    engine = FakeEngine(tokens_per_step=3)
    requests = run_closed_loop(engine, Workload(1, 16, 6), TOKENS, 1, engine.clock)
    assert len(requests[0].token_times) == 6
    found = by_name(requests, 1)
    assert found["output_tokens_per_s", None] == pytest.approx(6 / 0.7)
    assert requests[0].gaps == pytest.approx([0, 0, 0.1, 0, 0])
    assert found["tpot_s", 50] == pytest.approx(0.1 / 5)  # (last - first) / (n - 1)


@pytest.mark.trap(62)
def test_time_per_output_token_is_undefined_for_one_token() -> None:
    engine = FakeEngine()
    requests = run_closed_loop(engine, Workload(2, 16, 1), TOKENS, 1, engine.clock)
    assert requests[0].time_per_output_token is None
    found = by_name(requests, 1)
    assert not [key for key in found if key[0] in ("tpot_s", "itl_s")]
    assert found["ttft_s", 90] == pytest.approx(0.6)


def test_percentiles_interpolate_between_neighbours() -> None:
    requests = [RequestTimes(0.0, [float(first), first + 1.0]) for first in (1, 2, 3, 4)]
    found = by_name(requests, 4)
    assert found["ttft_s", 50] == pytest.approx(2.5)
    assert found["ttft_s", 90] == pytest.approx(3.7)
    assert found["wall_s", None] == 5.0


def test_prompts_are_distinct_seeded_and_the_warm_up_is_not_counted() -> None:
    engine = FakeEngine()
    requests = run_closed_loop(engine, Workload(30, 16, 1), TOKENS, 8, engine.clock)
    assert len(requests) == 30
    assert len({tuple(prompt) for prompt in engine.prompts}) == 31
    assert all(prompt == list(range(prompt[0], prompt[0] + 16)) for prompt in engine.prompts)
    assert Workload(30, 16, 1).prompts(TOKENS, 8) == engine.prompts
    assert Workload(30, 16, 1, seed=1).prompts(TOKENS, 8) != engine.prompts
    assert Workload(30, 16, 1).prompts(TOKENS, 1) != engine.prompts
    with pytest.raises(QbenchError, match="at least 46 tokens"):
        Workload(30, 16, 1).prompts(TOKENS[:45], 8)
    assert len(Workload(30, 16, 1).prompts(TOKENS[:46], 8)) == 31


def test_a_request_that_ends_early_is_refused() -> None:
    engine = FakeEngine(stops_after=3)
    with pytest.raises(QbenchError, match="3 of 5 output tokens"):
        run_closed_loop(engine, Workload(1, 16, 5), TOKENS, 1, engine.clock)


PEAK = """
import torch
from qbench.benchmark.memory import peak_memory
before = peak_memory(torch.device("cpu"))[0][1]
torch.ones(50 * 2**20, dtype=torch.uint8)
print(peak_memory(torch.device("cpu"))[0][1] - before)
"""


def test_peak_memory_sees_an_allocation_that_is_gone() -> None:
    found = subprocess.run([sys.executable, "-c", PEAK], check=True, capture_output=True, text=True)
    assert 40 * 2**20 < int(found.stdout) < 80 * 2**20
    (metric, _, detail) = peak_memory(torch.device("cpu"))[0]
    assert (metric, detail) == ("peak_memory_bytes", {"where": "process"})
