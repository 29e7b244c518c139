"""Choosing next tokens from logits.

The order of the steps is transformers': repetition penalty, temperature, top_k, top_p, min_p, each on what the one
before left. Temperature 0 takes the likeliest token after the penalty, the lowest id among equals. Each request draws
from its own generator, so its tokens do not depend on who shares the batch.
"""

from __future__ import annotations

import torch

from qbench.errors import QbenchError
from qbench.runtime.request import SamplingParams

LOWEST_TEMPERATURE = 1e-6  # below it float32 overflows; at it only ties with the likeliest token are drawn


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    histories: list[list[int]],
    generators: list[torch.Generator | None],
) -> list[int]:
    """One token id for each row of float32 `logits` ``[n, vocab]``.

    `histories`: prompt and output ids so far; `generators` are on the device of `logits` (None: the global one).
    Raises `QbenchError` if a row has no finite maximum (a broken model).
    """
    greedy = logits.argmax(-1)
    if not bool(torch.isfinite(logits.gather(1, greedy.unsqueeze(1))).all()):
        raise QbenchError("The model's logits are NaN or infinite; its weights or its quantization are broken.")
    tokens = greedy.tolist()
    for row, param in enumerate(params):
        if param.temperature == 0 and param.repetition_penalty == 1:
            continue
        scores = process(logits[row], param, histories[row])
        if param.temperature == 0:
            tokens[row] = int(scores.argmax())
        else:
            tokens[row] = int(torch.multinomial(scores.softmax(0), 1, generator=generators[row]))
    return tokens


def process(logits: torch.Tensor, params: SamplingParams, history: list[int]) -> torch.Tensor:
    """The scores ``[vocab]`` whose softmax a request draws from; -inf marks what cannot be drawn. New tensor."""
    scores = logits.clone()
    if params.repetition_penalty != 1 and history:
        seen = torch.tensor(sorted(set(history)), device=scores.device)
        found = scores[seen]
        scores[seen] = torch.where(found < 0, found * params.repetition_penalty, found / params.repetition_penalty)
    if params.temperature == 0:
        return scores
    scores /= max(params.temperature, LOWEST_TEMPERATURE)
    if 0 < params.top_k < len(scores):
        scores[scores < scores.topk(params.top_k).values[-1]] = float("-inf")
    if params.top_p < 1:
        _keep_top_p(scores, params.top_p)
    if params.min_p > 0:
        probabilities = scores.softmax(0)
        scores[probabilities < params.min_p * probabilities.max()] = float("-inf")
    return scores


def _keep_top_p(scores: torch.Tensor, top_p: float) -> None:
    """Hides, in place, all but the smallest set of likeliest tokens whose probability reaches `top_p`."""
    ascending, ids = scores.sort()
    below = ascending.softmax(0).cumsum(0) <= 1 - top_p
    below[-1] = False
    scores[ids[below]] = float("-inf")
