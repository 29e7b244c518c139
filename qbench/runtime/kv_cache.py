"""The paged key-value cache: one pool of fixed-size blocks a layer, addressed through block tables."""

from __future__ import annotations

import math

import numpy as np
import torch


class PagedKVCache:
    """Keys and values, each ``[layers, num_blocks, block_size, kv_heads, head_dim]``.

    Zeroed at the start: positions that a mask hides must still hold finite numbers.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_size = block_size
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self.keys = _zeros(shape, dtype, device)
        self.values = _zeros(shape, dtype, device)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores `k`, `v` ``[tokens, kv_heads, head_dim]`` at `slots` (block id * block_size + offset)."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, k)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, v)

    def read(self, layer: int, blocks: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[len(blocks) * block_size, kv_heads, head_dim]``; a slice of blocks is not copied."""
        if isinstance(blocks, slice):
            return self.keys[layer, blocks].flatten(0, 1), self.values[layer, blocks].flatten(0, 1)
        keys = self.keys[layer].index_select(0, blocks)
        values = self.values[layer].index_select(0, blocks)
        return keys.flatten(0, 1), values.flatten(0, 1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU they are numpy's, whose pages take neither time nor memory until a block is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes, line = math.prod(shape) * dtype.itemsize, 64  # the start of a cache line, as torch's own memory
    memory = torch.from_numpy(np.zeros(nbytes + line, np.uint8))
    start = -memory.data_ptr() % line
    return memory[start : start + nbytes].view(dtype).view(shape)
