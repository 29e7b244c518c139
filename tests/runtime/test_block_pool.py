from __future__ import annotations

from qbench.runtime.block_pool import BlockPool


def test_free_blocks_go_first_then_the_cached_one_let_go_longest_ago() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append)
    blocks = [pool.allocate() for _ in range(3)]
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block, keep=True)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 3, 1)
    assert [pool.allocate() for _ in range(3)] == [3, blocks[1], blocks[0]]
    assert evicted == [blocks[1], blocks[0]]


def test_a_shared_block_stays_used_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2, lambda block: None)
    block = pool.allocate()
    pool.share(block)
    pool.release(block, keep=True)
    assert (pool.num_used, pool.num_cached) == (1, 0)
    pool.check_integrity([[block]])
    pool.release(block, keep=True)
    assert pool.is_cached(block)
    pool.share(block)
    assert not pool.is_cached(block)
    pool.release(block, keep=False)
    assert pool.num_free == 2
    pool.check_integrity([])
