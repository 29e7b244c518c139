"""Which blocks hold the keys and values of which token prefix.

A full block is keyed by ``(number of the prefix before it, its token ids)``, and a prefix's number is given once and
never again. The key therefore stands for every token from the first one on, and a hit is a comparison of token
ids, not of hashes: the dictionary compares the whole key when two hashes are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

Key = tuple[int, tuple[int, ...]]
EMPTY_PREFIX = 0


class PrefixCache:
    """Full blocks by prefix. Knows nothing of who holds a block: see `BlockPool`."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._entries: dict[Key, tuple[int, int]] = {}  # key -> block, number of the prefix that ends with it
        self._keys: dict[int, Key] = {}  # block -> key
        self._last_prefix = EMPTY_PREFIX

    def __contains__(self, block: int) -> bool:
        return block in self._keys

    def match(self, token_ids: Sequence[int]) -> tuple[list[int], int]:
        """Blocks of the longest cached prefix and its number.

        At least one token is left over, because logits are needed at the last one.
        """
        blocks: list[int] = []
        prefix = EMPTY_PREFIX
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            entry = self._entries.get((prefix, tuple(token_ids[start : start + self.block_size])))
            if entry is None:
                break
            block, prefix = entry
            blocks.append(block)
        return blocks, prefix

    def insert(self, prefix: int, token_ids: Sequence[int], block: int) -> int:
        """Says that `block` holds the full block `token_ids` after `prefix`; returns the longer prefix's number.

        When another block is known for the same tokens, that one stays.
        """
        assert len(token_ids) == self.block_size
        key = (prefix, tuple(token_ids))
        if key not in self._entries:
            self._last_prefix += 1
            self._entries[key] = (block, self._last_prefix)
            self._keys[block] = key
        return self._entries[key][1]

    def forget(self, block: int) -> None:
        """`block` gets other contents."""
        del self._entries[self._keys.pop(block)]
