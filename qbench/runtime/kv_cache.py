"""The paged key-value cache: one pool of fixed-size blocks a layer, addressed through block tables."""

from __future__ import annotations

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
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

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
