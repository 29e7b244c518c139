"""What a user asks of the runtime (`SamplingParams`) and where one request stands (`Request`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qbench.errors import QbenchError


@dataclass(frozen=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends. Raises `QbenchError` on a value out of range."""

    max_tokens: int = 16  # clamped to what the context leaves; the output then ends with "length"
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with this probability
    min_p: float = 0.0  # drop tokens below this share of the likeliest one's probability
    repetition_penalty: float = 1.0  # divides positive and multiplies negative logits of tokens already seen
    seed: int | None = None  # the same seed gives the same tokens, alone or in a batch
    stop: Sequence[str] = ()  # texts that end the output and are no part of it
    stop_token_ids: Sequence[int] = ()  # end the output, in addition to the model's end-of-sequence ids
    ignore_eos: bool = False  # the model's end-of-sequence ids do not end the output

    def __post_init__(self) -> None:
        self._check("max_tokens", _is_int, lambda v: v >= 1, "a whole number of at least 1")
        self._check("temperature", _is_number, lambda v: 0 <= v < math.inf, "a number of at least 0")
        self._check("top_k", _is_int, lambda v: v >= 0, "a whole number of at least 0 (0: all tokens)")
        self._check("top_p", _is_number, lambda v: 0 < v <= 1, "above 0 and at most 1")
        self._check("min_p", _is_number, lambda v: 0 <= v <= 1, "between 0 and 1")
        self._check("repetition_penalty", _is_number, lambda v: 0 < v < math.inf, "a number above 0 (1: none)")
        if self.seed is not None:
            self._check("seed", _is_int, lambda v: 0 <= v < 2**63, "a whole number from 0 to 2^63 - 1")
        self._check("stop", _is_list, lambda v: all(isinstance(s, str) and s for s in v), "a list of non-empty texts")
        self._check("stop_token_ids", _is_list, lambda v: all(map(_is_int, v)), "a list of whole numbers")

    def _check(self, name: str, of_type: Callable[[Any], bool], in_range: Callable[[Any], bool], allowed: str) -> None:
        value = getattr(self, name)
        if not of_type(value) or not in_range(value):
            raise QbenchError(f"Sampling parameter {name} is {value!r}; it must be {allowed}.")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_int(value) or isinstance(value, float)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


@dataclass(eq=False)
class Request:
    """One request as the scheduler sees it. `token_ids` is the prompt followed by what was sampled so far."""

    request_id: str
    token_ids: list[int]
    samples: bool = True  # False: the prompt is scored, nothing is sampled, every position is computed
    num_computed_tokens: int = 0  # tokens whose keys and values are in the cache
    block_table: list[int] = field(default_factory=list)  # append-only while the request runs
    num_keyed_blocks: int = 0  # leading blocks the prefix cache knows
    prefix: int = 0  # the prefix cache's number for those blocks

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def reset(self) -> None:
        """Forget all that was computed; the tokens stay."""
        self.num_computed_tokens = self.num_keyed_blocks = self.prefix = 0
        self.block_table = []
