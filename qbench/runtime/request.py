"""What a user asks of the runtime: sampling parameters, checked when they are made, and a request's state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from qbench.errors import QbenchError


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of one request are chosen and when it ends. Raises `QbenchError` on a bad value."""

    max_tokens: int = 16  # clamped to what the context leaves; the request then ends with "length"
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # keep the k likeliest; 0: all
    top_p: float = 1.0  # keep the smallest set of this probability
    min_p: float = 0.0  # drop tokens below this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # logits of tokens already seen are divided (if > 0) or multiplied by it
    seed: int | None = None  # same tokens alone or in a batch
    stop: list[str] = field(default_factory=list)  # text that ends the output and is not part of it
    stop_token_ids: list[int] = field(default_factory=list)  # in addition to the model's end-of-sequence ids
    ignore_eos: bool = False  # the model's end-of-sequence ids do not stop
