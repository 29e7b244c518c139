"""How far a variant's next-token distributions are from the reference's: KL(reference || variant) in nats.

The reference's final hidden states at the scored positions are kept (a few hundred floats a token), and its logits
are made again from them chunk by chunk, so every variant is measured against the same numbers in one pass of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from qbench.errors import QbenchError
from qbench.evaluate.perplexity import Measured, ScoringEngine, scored_hidden
from qbench.evaluate.windows import Window
from qbench.models.safetensors_writer import write_safetensors

CONFIDENCE_EDGES = (0.0, 0.25, 0.5, 0.75, 0.9, 1.0)  # of the reference's likeliest token


@dataclass(frozen=True)
class ReferenceStates:
    """The reference at every scored position, in the dtype it ran in, so that its logits are made the same way.

    `hidden` ``[positions, hidden]``, `head` ``[vocab, hidden]``; ids from `vocab_size` on are padding and ignored.
    """

    hidden: Tensor
    head: Tensor
    vocab_size: int
    windows_hash: str

    def logits(self, start: int, stop: int) -> Tensor:
        """Float32 ``[stop - start, vocab]``."""
        return torch.nn.functional.linear(self.hidden[start:stop], self.head).float()

    def to(self, device: torch.device) -> ReferenceStates:
        return replace(self, hidden=self.hidden.to(device), head=self.head.to(device))

    def save(self, path: Path) -> None:
        metadata = {"vocab_size": str(self.vocab_size), "windows_hash": self.windows_hash}
        write_safetensors(path, {"hidden": self.hidden, "head": self.head}, metadata)

    @classmethod
    def load(cls, path: Path) -> ReferenceStates:
        with safe_open(path, framework="pt") as file:
            found = file.metadata()
            return cls(
                file.get_tensor("hidden"), file.get_tensor("head"), int(found["vocab_size"]), found["windows_hash"]
            )


@torch.inference_mode()
def reference_states(
    engine: ScoringEngine, windows: Sequence[Window], head: Tensor, vocab_size: int
) -> ReferenceStates:
    """One forward pass of the reference. `head` is its float ``[vocab, hidden]`` output weight, `vocab_size` the
    number of ids its tokenizer knows.

    Raises `QbenchError` when the model's logits are not the product of hidden states and head alone.
    """
    hidden = torch.cat(list(scored_hidden(engine, windows)))
    states = ReferenceStates(hidden, head.to(hidden), vocab_size, windows_hash(windows))
    own = engine.logits(hidden[:1])
    if not bool(torch.isfinite(own).all()):
        raise QbenchError("evaluate: the reference's logits are NaN or infinite; the weight of its head is broken.")
    if not torch.allclose(own, states.logits(0, 1), rtol=0.0, atol=0.02 * own.abs().max().item()):
        raise QbenchError(
            "evaluate: the reference's logits are not its hidden states times its head "
            "(a bias, a cap or a scale follows); divergence from such a model is not supported."
        )
    return states


def windows_hash(windows: Sequence[Window]) -> str:
    """SHA-256 of the windows' ids and context lengths."""
    return hashlib.sha256(json.dumps([[w.token_ids, w.num_context] for w in windows]).encode()).hexdigest()


def kl_divergence(reference: Tensor, variant: Tensor) -> Tensor:
    """KL(reference || variant) in nats, a row each, of float64 log-probabilities ``[n, ids]`` over the same ids.

    It cannot be negative; what float64 rounding leaves below zero is set to zero.
    """
    return (reference - variant).mul_(reference.exp()).sum(1).clamp(min=0.0)


def shared_ids(log_probabilities: Tensor, num_ids: int) -> Tensor:
    """Float64 log-probabilities of the first `num_ids` ids, renormalized among them."""
    if log_probabilities.shape[1] == num_ids:
        return log_probabilities
    return torch.log_softmax(log_probabilities[:, :num_ids], dim=1)


@dataclass(frozen=True)
class Bucket:
    """Positions where the reference gave its likeliest token a probability in ``[low, high)``."""

    low: float
    high: float
    num_positions: int
    kl_mean: float
    top1_agreement: float


@dataclass(frozen=True)
class Divergence:
    """KL(reference || variant) in nats over scored positions, and how often both put the same id first."""

    kl_mean: float
    kl_median: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    buckets: list[Bucket]

    def measured(self) -> list[Measured]:
        rows: list[Measured] = [
            (name, getattr(self, name), {}) for name in ("kl_mean", "kl_median", "kl_p99", "kl_max", "top1_agreement")
        ]
        for bucket in self.buckets:
            detail = {"confidence": f"{bucket.low:g}-{bucket.high:g}"}
            rows += [
                ("kl_mean", bucket.kl_mean, detail),
                ("top1_agreement", bucket.top1_agreement, detail),
                ("scored_tokens", bucket.num_positions, detail),
            ]
        return rows


def summarize_divergence(kl: Tensor, agrees: Tensor, confidence: Tensor) -> Divergence:
    """From each position's KL (float64), whether the first ids agree (bool), and the reference's top probability.

    The median and p99 interpolate linearly between neighbours; empty buckets are left out.
    """
    buckets = []
    for low, high in pairwise(CONFIDENCE_EDGES):
        inside = (confidence >= low) & ((confidence < high) | (high == 1.0))
        if inside.any():
            agreed = agrees[inside].double().mean().item()
            buckets.append(Bucket(low, high, int(inside.sum()), kl[inside].mean().item(), agreed))
    median, p99 = torch.quantile(kl, torch.tensor([0.5, 0.99], dtype=kl.dtype)).tolist()
    return Divergence(kl.mean().item(), median, p99, kl.max().item(), agrees.double().mean().item(), buckets)
