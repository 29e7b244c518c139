"""The sampler against transformers' logits processors, and its independence from the batch."""

from __future__ import annotations

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from qbench.errors import QbenchError
from qbench.runtime.request import SamplingParams
from qbench.runtime.sampler import process, sample

VOCAB = 50


def some_logits(rows: int = 1, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def transformers_scores(logits: torch.Tensor, params: SamplingParams, history: list[int]) -> torch.Tensor:
    steps = LogitsProcessorList()
    if params.repetition_penalty != 1:
        steps.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k > 0:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(MinPLogitsWarper(params.min_p))
    scores: torch.Tensor = steps(torch.tensor([history]), logits.unsqueeze(0).clone())[0]
    return scores


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=5),
        SamplingParams(top_k=1),
        SamplingParams(top_k=10**6),
        SamplingParams(top_p=0.8),
        SamplingParams(top_p=1e-6),
        SamplingParams(min_p=0.1),
        SamplingParams(repetition_penalty=1.5),
        SamplingParams(repetition_penalty=0.8, temperature=0.5, top_k=20, top_p=0.7, min_p=0.05),
    ],
    ids=str,
)
def test_scores_equal_transformers(params: SamplingParams) -> None:
    for seed in range(20):
        logits = some_logits(seed=seed)[0]
        history = [3, 7, 7, 49, seed]
        before = logits.clone()
        torch.testing.assert_close(process(logits, params, history), transformers_scores(logits, params, history))
        assert torch.equal(logits, before)


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [4, 9, 30]] = 2.0
    assert sample(logits, [SamplingParams(temperature=0)], [[]], [None]) == [4]


def test_greedy_with_a_repetition_penalty() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 4], logits[:, 9] = 2.0, 1.5
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert sample(logits, [params, params], [[4, 4], [9]], [None, None]) == [9, 4]


def test_draws_follow_the_distribution() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(20_000, 1)
    generator = torch.Generator().manual_seed(5)
    drawn = sample(logits, [SamplingParams()] * 20_000, [[]] * 20_000, [generator] * 20_000)
    shares = torch.bincount(torch.tensor(drawn), minlength=3) / 20_000
    torch.testing.assert_close(shares, torch.tensor([0.5, 0.3, 0.2]), rtol=0, atol=0.015)


@pytest.mark.trap(52)
def test_a_seed_draws_the_same_alone_and_in_a_batch() -> None:
    logits = some_logits(rows=4)
    params = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_p=0.9), SamplingParams(top_k=8)]

    def generators() -> list[torch.Generator | None]:
        return [torch.Generator().manual_seed(i) for i in range(4)]

    own = generators()
    alone = [[sample(logits[i : i + 1], [params[i]], [[1]], [own[i]])[0] for i in range(4)] for _ in range(5)]
    shared = generators()
    together = [sample(logits, params, [[1]] * 4, shared) for _ in range(5)]
    assert alone == together
    assert len({tuple(tokens) for tokens in together}) > 1


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused(value: float, temperature: float) -> None:
    logits = some_logits(rows=2)
    logits[1, 3] = value
    with pytest.raises(QbenchError, match="NaN or infinite"):
        sample(logits, [SamplingParams(temperature=temperature)] * 2, [[], []], [None, None])


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-9])
def test_a_vanishing_temperature_draws_the_likeliest(temperature: float) -> None:
    logits = some_logits(4)
    params = [SamplingParams(temperature=temperature)] * 4
    assert sample(logits, params, [[]] * 4, [None] * 4) == logits.argmax(-1).tolist()
