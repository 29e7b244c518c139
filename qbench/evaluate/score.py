"""One forward pass of a variant gives its perplexity and its divergence from the reference, same positions for both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qbench.errors import QbenchError
from qbench.evaluate.divergence import (
    Divergence,
    ReferenceStates,
    kl_divergence,
    shared_ids,
    summarize_divergence,
    windows_hash,
)
from qbench.evaluate.perplexity import (
    Measured,
    Perplexity,
    ScoringEngine,
    chunk_rows,
    log_probabilities,
    scored_hidden,
    summarize_nll,
)
from qbench.evaluate.windows import Window

CHUNK_BYTES = 32 * 2**20  # of the float64 [positions, vocab] logits that are made at once
CACHE_BYTES = 4 * 2**20  # of those that a processor compares at once, so that they stay near its cores


@dataclass(frozen=True)
class Scores:
    """`divergence` is None when no reference was given."""

    perplexity: Perplexity
    divergence: Divergence | None

    def measured(self) -> list[Measured]:
        """(metric, value, detail) triples for `result.make_results`."""
        return self.perplexity.measured() + (self.divergence.measured() if self.divergence else [])


@torch.inference_mode()
def score(engine: ScoringEngine, windows: Sequence[Window], reference: ReferenceStates | None = None) -> Scores:
    """Scores every window once, through `engine`.

    The likelihood is over all the model's ids, as its own softmax has it; divergence over the ids both models share.
    Raises `QbenchError` when a logit is not finite or `reference` was taken on other windows.
    """
    if reference is not None and reference.windows_hash != windows_hash(windows):
        raise QbenchError("evaluate: the stored reference states belong to other windows than the ones to be scored.")
    nlls: list[Tensor] = []  # one tensor a window
    kls, agreements, confidences = [], [], []  # one tensor a chunk
    offset = 0  # of the window's first scored position among all
    for index, (window, hidden) in enumerate(zip(windows, scored_hidden(engine, windows), strict=True)):
        targets = torch.tensor(window.token_ids[window.num_context :], device=hidden.device)
        if not nlls:
            vocab_size = engine.logits(hidden[:1]).shape[1]
            rows = chunk_rows(vocab_size, CHUNK_BYTES)
            near = chunk_rows(vocab_size, CACHE_BYTES) if hidden.device.type == "cpu" else rows
            reference = reference.to(hidden.device) if reference else None
        window_nlls = []
        for start, logits, expected_logits in _logits(engine, hidden, reference, offset, rows, near):
            found = log_probabilities(logits, index, window.num_context + start)
            window_nlls.append(-found.gather(1, targets[start : start + len(found), None])[:, 0].cpu())
            if reference is None or expected_logits is None:
                continue
            expected = log_probabilities(expected_logits, index, window.num_context + start)
            num_ids = min(reference.vocab_size, expected.shape[1], found.shape[1])
            expected, found = shared_ids(expected, num_ids), shared_ids(found, num_ids)
            confidence, first = expected.max(1)
            kls.append(kl_divergence(expected, found).cpu())
            agreements.append((first == found.argmax(1)).cpu())
            confidences.append(confidence.exp().cpu())
        nlls.append(torch.cat(window_nlls))
        offset += len(hidden)
    divergence = None
    if reference is not None:
        divergence = summarize_divergence(torch.cat(kls), torch.cat(agreements), torch.cat(confidences))
    return Scores(summarize_nll(nlls), divergence)


def _logits(
    engine: ScoringEngine, hidden: Tensor, reference: ReferenceStates | None, offset: int, rows: int, near: int
) -> Iterator[tuple[int, Tensor, Tensor | None]]:
    """The logits of `hidden` and of the reference at the same positions, made `rows` at a time and given `near` at a
    time, each with its first position. `offset` is where `hidden` begins among the reference's."""
    for start in range(0, len(hidden), rows):
        stop = min(start + rows, len(hidden))
        found = engine.logits(hidden[start:stop])
        expected = reference.logits(offset + start, offset + stop) if reference else None
        for i in range(0, stop - start, near):
            yield start + i, found[i : i + near], None if expected is None else expected[i : i + near]
