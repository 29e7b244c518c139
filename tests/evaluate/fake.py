"""An engine for scoring that is transformers' own model, and the same answers computed whole in float64."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tests.tiny import make_tiny_llama


class TransformersEngine:
    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model = model
        self.passes = 0

    def encode(self, rows: list[list[int]]) -> Iterator[Tensor]:
        self.passes += 1
        for row in rows:
            with torch.inference_mode():
                yield self.model.model(torch.tensor([row])).last_hidden_state[0]

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.nn.functional.linear(hidden, self.model.lm_head.weight).float()

    @property
    def head(self) -> Tensor:
        return self.model.lm_head.weight.detach()


def tiny_engine(folder: Path, seed: int = 0, **overrides: object) -> TransformersEngine:
    make_tiny_llama(folder, seed=seed, **overrides)
    return TransformersEngine(LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


def some_tokens(count: int, seed: int = 1, vocab: int = 300) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
