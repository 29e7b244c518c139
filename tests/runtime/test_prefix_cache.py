from __future__ import annotations

import pytest

from qbench.runtime.prefix_cache import EMPTY_PREFIX, PrefixCache


class Colliding(int):
    """A token id that has the same hash as every other."""

    def __hash__(self) -> int:
        return 0


def filled(token_ids: list[int], size: int = 2) -> PrefixCache:
    """A cache with the full blocks of `token_ids` in blocks 0, 1, ..."""
    cache = PrefixCache(size)
    prefix = EMPTY_PREFIX
    for block in range(len(token_ids) // size):
        prefix = cache.insert(prefix, token_ids[block * size : (block + 1) * size], block)
    return cache


@pytest.mark.trap(49)
def test_a_hit_leaves_a_token_to_compute() -> None:
    cache = filled([1, 2, 3, 4])
    assert cache.match([1, 2, 3, 4, 5])[0] == [0, 1]
    assert cache.match([1, 2, 3, 4])[0] == [0]
    assert cache.match([1, 2])[0] == []


@pytest.mark.trap(50)
def test_the_key_covers_the_whole_prefix() -> None:
    cache = filled([1, 2, 3, 4])
    assert cache.match([9, 2, 3, 4, 5])[0] == []
    assert cache.match([3, 4, 5])[0] == []
    assert cache.match([1, 2, 9, 4, 5])[0] == [0]


@pytest.mark.trap(50)
def test_equal_hashes_of_other_tokens_are_no_hit() -> None:
    cache = filled([Colliding(t) for t in (1, 2, 3, 4)])
    other = [Colliding(t) for t in (5, 6, 3, 4, 7)]
    assert hash(tuple(other[:2])) == hash(tuple(Colliding(t) for t in (1, 2)))
    assert cache.match(other)[0] == []
    assert cache.match([Colliding(t) for t in (1, 2, 3, 4, 5)])[0] == [0, 1]


def test_a_block_after_a_forgotten_one_is_not_found_under_a_new_prefix() -> None:
    cache = filled([1, 2, 3, 4])
    cache.forget(0)
    assert cache.match([1, 2, 3, 4, 5])[0] == []
    cache.insert(EMPTY_PREFIX, [1, 2], 7)
    assert cache.match([1, 2, 3, 4, 5])[0] == [7]


def test_the_first_block_of_equal_contents_stays() -> None:
    cache = filled([1, 2, 3, 4])
    prefix = cache.insert(EMPTY_PREFIX, [1, 2], 8)
    assert 8 not in cache
    assert cache.insert(prefix, [5, 6], 9) != prefix
    assert cache.match([1, 2, 5, 6, 0])[0] == [0, 9]
