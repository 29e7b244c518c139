"""The paged key-value cache: one pool of fixed-size blocks a layer, addressed through block tables."""

from __future__ import annotations

import math

import numpy as np
import torch

from qbench.formats.base import Params
from qbench.formats.kv_cache import KVCache


class _Floats:
    """Keys and values as they are; the same two calls as a `KVFormat`'s."""

    def encode(self, x: torch.Tensor, scale: float | None = None) -> Params:
        return {"floats": x}

    def decode(self, parts: Params, scale: float | None = None) -> torch.Tensor:
        return parts["floats"]


class PagedKVCache:
    """Keys and values, each a pool of what their format keeps of a token: by part ``[layers, num_blocks, block_size,
    kv_heads, ...]``. Without `kv_cache` these are the floats themselves.

    A token is rounded once, when it is written: whoever reads it later, in whatever batch, reads the same values.
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
        kv_cache: KVCache | None = None,
    ) -> None:
        self.block_size = block_size
        self.dtype = dtype
        self._format = _Floats() if kv_cache is None else kv_cache.format
        self._scales = [(None, None) if kv_cache is None else kv_cache.layer_scales(i) for i in range(num_layers)]
        a_token = self._format.encode(torch.zeros(1, num_kv_heads, head_dim, dtype=dtype), 1.0)
        shape = (num_layers, num_blocks, block_size)
        self.keys, self.values = (
            {name: _zeros((*shape, *part.shape[1:]), part.dtype, device) for name, part in a_token.items()}
            for _ in range(2)
        )

    @property
    def stored_as(self) -> str:
        """The format's name, or the dtype of floats."""
        return str(self.dtype).removeprefix("torch.") if isinstance(self._format, _Floats) else self._format.name

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(part[:, 0, 0].nbytes for pool in (self.keys, self.values) for part in pool.values())

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for pool in (self.keys, self.values) for part in pool.values())

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores `k`, `v` ``[tokens, kv_heads, head_dim]`` at `slots` (block id * block_size + offset)."""
        for pool, x, scale in zip((self.keys, self.values), (k, v), self._scales[layer], strict=True):
            for name, part in self._format.encode(x, scale).items():
                pool[name][layer].flatten(0, 1).index_copy_(0, slots, part)

    def read(self, layer: int, blocks: torch.Tensor | slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[len(blocks) * block_size, kv_heads, head_dim]``; floats in a slice of blocks are not
        copied."""
        key_scale, value_scale = self._scales[layer]
        return self._read(self.keys, layer, blocks, key_scale), self._read(self.values, layer, blocks, value_scale)

    def _read(self, pool: Params, layer: int, blocks: torch.Tensor | slice, scale: float | None) -> torch.Tensor:
        parts = {
            name: part[layer, blocks] if isinstance(blocks, slice) else part[layer].index_select(0, blocks)
            for name, part in pool.items()
        }
        flat = {name: part.flatten(0, 1) for name, part in parts.items()}
        return self._format.decode(flat, scale).to(self.dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU they are numpy's, whose pages take neither time nor memory until a block is first written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes, line = math.prod(shape) * dtype.itemsize, 64  # the start of a cache line, as torch's own memory
    memory = torch.from_numpy(np.zeros(nbytes + line, np.uint8))
    start = -memory.data_ptr() % line
    return memory[start : start + nbytes].view(dtype).view(shape)
