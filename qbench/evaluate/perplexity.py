"""Perplexity of a variant over windows of held-out text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from qbench.errors import QbenchError
from qbench.evaluate.windows import Window

Measured = tuple[str, float, dict[str, Any]]  # metric, value, detail: the input of `result.make_results`


class ScoringEngine(Protocol):
    """What evaluation needs of the runtime."""

    def encode(self, rows: list[list[int]]) -> Iterator[Tensor]:
        """Each row's final-normed hidden states ``[len(row), hidden]``, in order."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 ``[n, vocab]``."""


@dataclass(frozen=True)
class Perplexity:
    """Over all scored tokens. `standard_error` is of `nll`, tokens taken as independent."""

    nll: float  # mean negative log-likelihood, nats a token
    standard_error: float
    window_nlls: list[float]  # mean of each window
    num_tokens: int

    @property
    def perplexity(self) -> float:
        """Raises `QbenchError` when it is beyond any float: such a model predicts nothing."""
        try:
            return math.exp(self.nll)
        except OverflowError as error:
            raise QbenchError(
                f"evaluate: {self.nll:.4g} nats a token make no finite perplexity; the weights or their quantization "
                "are broken."
            ) from error

    def measured(self) -> list[Measured]:
        per_window: list[Measured] = [("nll", nll, {"window": i}) for i, nll in enumerate(self.window_nlls)]
        return [
            ("perplexity", self.perplexity, {}),
            ("nll", self.nll, {}),
            ("scored_tokens", self.num_tokens, {}),
            ("nll", self.standard_error, {"statistic": "standard_error"}),
            *per_window,
        ]


def scored_hidden(engine: ScoringEngine, windows: Sequence[Window]) -> Iterator[Tensor]:
    """Each window's hidden states that predict a scored token: ``[num_scored, hidden]``. One forward pass."""
    encoded = engine.encode([window.token_ids for window in windows])
    for window, hidden in zip(windows, encoded, strict=True):
        yield hidden[window.num_context - 1 : -1]


def log_probabilities(logits: Tensor, window: int, position: int) -> Tensor:
    """Float64 log-softmax of ``[n, vocab]``. Raises `QbenchError` with the place of a NaN or infinite logit;
    `position` is the token index in the window that the first row predicts."""
    bad = ~torch.isfinite(logits.sum(1))
    if bad.any():
        first = position + int(bad.nonzero()[0])
        raise QbenchError(f"Logits are not finite in window {window} at token {first}: the variant is broken there.")
    return torch.log_softmax(logits, dim=1, dtype=torch.float64)


def summarize_nll(window_nlls: Sequence[Tensor]) -> Perplexity:
    """From the float64 negative log-likelihoods of each window's scored tokens."""
    all_nlls = torch.cat(list(window_nlls))
    spread = all_nlls.std().item() if len(all_nlls) > 1 else 0.0
    return Perplexity(
        nll=all_nlls.mean().item(),
        standard_error=spread / math.sqrt(len(all_nlls)),
        window_nlls=[nlls.mean().item() for nlls in window_nlls],
        num_tokens=len(all_nlls),
    )


def chunk_rows(vocab_size: int, nbytes: int) -> int:
    """Positions whose float64 logits fit in `nbytes`."""
    return max(1, nbytes // (8 * vocab_size))
