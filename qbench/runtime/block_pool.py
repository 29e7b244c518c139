"""Who holds which physical block of the key-value cache.

A block is *used* (one or more requests hold it), *cached* (nobody holds it, but its contents may be asked for
again) or *free*. New blocks come from the free ones first, then from the cached one that was let go the longest ago.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable


class BlockPool:
    """Hands out block ids 0 .. num_blocks - 1. `evicted(block)` is called when a cached block gets a new use."""

    def __init__(self, num_blocks: int, evicted: Callable[[int], None]) -> None:
        self.num_blocks = num_blocks
        self._evicted = evicted
        self._free = list(reversed(range(num_blocks)))
        self._cached: dict[int, None] = {}  # in the order they were let go
        self._holders: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._holders)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free) + len(self._cached)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def allocate(self) -> int:
        """A block with one holder and no meaningful contents."""
        if self._free:
            block = self._free.pop()
        else:
            block = next(iter(self._cached))
            del self._cached[block]
            self._evicted(block)
        self._holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """One more holder for a used or cached block."""
        assert block in self._holders or block in self._cached, f"block {block} is free"
        self._cached.pop(block, None)
        self._holders[block] += 1

    def release(self, block: int, keep: bool) -> None:
        """One holder less; without holders the block is cached (`keep`) or free."""
        self._holders[block] -= 1
        assert self._holders[block] >= 0, f"block {block} was released too often"
        if self._holders[block] == 0:
            del self._holders[block]
            if keep:
                self._cached[block] = None
            else:
                self._free.append(block)

    def check_integrity(self, tables: Iterable[list[int]]) -> None:
        """Asserts that every block is in exactly one state and that `tables` are all its holders."""
        states = [*self._holders, *self._free, *self._cached]
        assert sorted(states) == list(range(self.num_blocks)), "used + free + cached is not the whole pool"
        assert self._holders == Counter(block for table in tables for block in table), "holders and tables differ"
