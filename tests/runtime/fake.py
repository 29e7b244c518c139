"""A runner without a model: its "keys and values" are the token ids themselves, read back through the block table.

The hidden state of a position is a hash of every token the cache holds up to it, so that a wrong block, a stale
block or a missed token changes the output.
"""

from __future__ import annotations

import hashlib

import torch

from qbench.runtime.engine import Engine
from qbench.runtime.scheduler import ScheduledStep, SchedulerSettings
from tests.tiny import byte_tokenizer

VOCAB = 300


def hidden_of(token_ids: list[int]) -> int:
    """The hidden state (one whole number below 2^20, exact in float32) after `token_ids`."""
    return int.from_bytes(hashlib.blake2b(repr(token_ids).encode(), digest_size=8).digest()) % 2**20


def expected(prompt: list[int], count: int) -> list[int]:
    """The greedy tokens that `FakeRunner` must give, without any cache."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(hidden_of(ids) % VOCAB)
    return ids[len(prompt) :]


class FakeRunner:
    """`ModelRunner`'s two methods; hidden states ``[n, 1]``, the likeliest token is hidden modulo the vocabulary."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.block_size = settings.block_size
        self.max_num_batched_tokens = settings.max_num_batched_tokens
        self.cache = [-1] * (settings.num_blocks * settings.block_size)
        self.num_computed = 0

    def execute(self, step: ScheduledStep) -> torch.Tensor:
        hidden = []
        for part in step.requests:
            slots = [
                block * self.block_size + offset for block in part.block_table for offset in range(self.block_size)
            ]
            for index, token in enumerate(part.token_ids):
                self.cache[slots[part.start + index]] = token
            for stop in range(part.start + 1, part.start + len(part.token_ids) + 1):
                hidden.append([float(hidden_of([self.cache[slot] for slot in slots[:stop]]))])
        assert 0 < len(hidden) <= self.max_num_batched_tokens
        self.num_computed += len(hidden)
        return torch.tensor(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = []
        for value in hidden[:, 0].long().tolist():
            rows.append(torch.randn(VOCAB, generator=torch.Generator().manual_seed(value)))
            rows[-1][value % VOCAB] = 9.0
        return torch.stack(rows)


def fake_engine(eos_token_ids: tuple[int, ...] = (), seed: int = 0, **settings: int) -> Engine:
    """An engine over `FakeRunner`; 64 blocks of 4 tokens unless `settings` say otherwise."""
    chosen = SchedulerSettings(**({"num_blocks": 64, "block_size": 4, "max_model_len": 128} | settings))  # type: ignore[arg-type]
    return Engine(
        FakeRunner(chosen),
        chosen,
        tokenizer=byte_tokenizer(),
        vocab_size=VOCAB,
        eos_token_ids=eos_token_ids,
        device=torch.device("cpu"),
        seed=seed,
    )
