"""What the single channels of a tensor look like over the calibration tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.functional import pad

from qbench.errors import QbenchError

SAMPLED_TOKENS = 512


class ChannelStatistics:
    """Mean and largest ``|x|`` a channel, in float32, the activations of some tokens, and how channels go together.

    The tokens are drawn at random (always the same ones): equal distances would divide the row length and take the
    first token of every row, whose activations are unlike all others. `grams` holds for each of `block_sizes` the
    ``x^T x`` of every block of so many channels, over all tokens: float32 ``[blocks, size, size]``, where what the last
    block lacks of its size is 0.
    """

    def __init__(self, channels: int, total_tokens: int, device: torch.device, block_sizes: Iterable[int] = ()) -> None:
        self.total = torch.zeros(channels, dtype=torch.float32, device=device)
        self.max_abs = torch.zeros(channels, dtype=torch.float32, device=device)
        self.tokens = 0
        self.grams = {size: torch.zeros(-(-channels // size), size, size, device=device) for size in block_sizes}
        drawn = torch.randperm(total_tokens, generator=torch.Generator().manual_seed(0))[:SAMPLED_TOKENS]
        self._drawn = drawn.sort().values.to(device)
        self._sampled: list[torch.Tensor] = []

    def add(self, inputs: torch.Tensor) -> None:
        """Adds activations ``[..., channels]`` of real tokens."""
        flat = inputs.reshape(-1, inputs.shape[-1]).float()
        magnitude = flat.abs()
        self.total += magnitude.sum(0)
        self.max_abs = torch.maximum(self.max_abs, magnitude.amax(0))
        for size, gram in self.grams.items():
            blocks = in_blocks(flat, size)
            gram.baddbmm_(blocks.mT, blocks)
        here = self._drawn[(self._drawn >= self.tokens) & (self._drawn < self.tokens + len(flat))]
        self._sampled.append(flat[here - self.tokens])
        self.tokens += len(flat)

    def mean_abs(self, layer: str) -> torch.Tensor:
        """``[channels]``. Raises `QbenchError` naming `layer` when an activation was NaN or infinite."""
        if not bool(torch.isfinite(self.total).all()):
            raise QbenchError(f"{layer}: its inputs are NaN or infinite on the calibration rows.")
        return self.total / max(self.tokens, 1)

    @property
    def sample(self) -> torch.Tensor:
        """Float32 ``[tokens, channels]``, at most `SAMPLED_TOKENS` of them."""
        return torch.cat(self._sampled)


def in_blocks(matrix: torch.Tensor, size: int) -> torch.Tensor:
    """``[rows, channels]`` as ``[blocks, rows, size]``, the last block filled up with zeros."""
    blocks = -(-matrix.shape[1] // size)
    filled = pad(matrix, (0, blocks * size - matrix.shape[1]))
    return filled.view(len(matrix), blocks, size).transpose(0, 1)
