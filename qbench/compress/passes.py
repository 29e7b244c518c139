"""Forward passes of one block over the hidden states of the calibration rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from qbench.compress.skeleton import BlockCall, PassEnded, Skeleton


class Statistics(Protocol):
    """What gathers the activations of a linear's input."""

    def add(self, inputs: torch.Tensor) -> None: ...


class Passes:
    """`block` with the hidden states that go into it, a batch ``[rows, n, hidden]`` for each of `calls`."""

    def __init__(
        self, skeleton: Skeleton, block: nn.Module, hidden: list[torch.Tensor], calls: Sequence[BlockCall]
    ) -> None:
        self.skeleton, self.block, self.hidden, self.calls = skeleton, block, hidden, calls

    @property
    def tokens(self) -> int:
        return sum(batch.shape[0] * batch.shape[1] for batch in self.hidden)

    def first(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first whole rows up to `tokens` tokens (at least one row) and the block's output for them."""
        rows, length = self.hidden[0].shape[:2]
        taken = max(1, min(rows, tokens // length))
        inputs = self.hidden[0][:taken]
        return inputs, self.skeleton.run_block(self.block, inputs, self.calls[0].rows(slice(taken), rows))

    def collect(self, wanted: Sequence[tuple[nn.Linear, Statistics]]) -> None:
        """Adds what each linear is given to its statistics, in one pass that stops when the last one was seen."""
        hooks = []
        for index, (linear, statistics) in enumerate(wanted):
            last = index == len(wanted) - 1

            def note(_: nn.Module, args: Any, statistics: Statistics = statistics, last: bool = last) -> None:
                statistics.add(args[0])
                if last:
                    raise PassEnded

            hooks.append(linear.register_forward_pre_hook(note))
        for batch, call in zip(self.hidden, self.calls, strict=True):
            try:
                self.skeleton.run_block(self.block, batch, call)
            except PassEnded:
                pass
        for hook in hooks:
            hook.remove()
