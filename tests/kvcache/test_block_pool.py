"""The pool: references, eviction order, and the map from hashes to blocks."""

import pytest

from nanoserve.kvcache.block_pool import BlockPool


def free_ids(pool):
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def state(pool):
    """Everything that a refused operation must leave as it was."""
    return (
        free_ids(pool),
        [(b.ref_cnt, b.block_hash) for b in pool.blocks],
        {name: list(blocks) for name, blocks in pool._cached.items()},
    )


def test_BP1_null_block_is_never_handed_out_counted_or_freed():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    assert [b.block_id for b in blocks] == [1, 2, 3]
    assert pool.usage == 1.0
    pool.touch([pool.null_block])
    pool.free_blocks([pool.null_block, *blocks])
    assert pool.null_block.ref_cnt == 0
    assert sorted(free_ids(pool)) == [1, 2, 3]
    assert pool.usage == 0.0
    with pytest.raises(AssertionError):
        pool.cache_block(pool.null_block, b"x", 0)


def test_a_pool_needs_room_for_more_than_the_null_block():
    with pytest.raises(ValueError, match="null block"):
        BlockPool(1)


def test_BP2_unhashed_blocks_are_reused_first_and_hashed_ones_last():
    pool = BlockPool(8)
    first, second = pool.get_new_blocks(3), pool.get_new_blocks(2)
    pool.cache_block(first[0], b"a", 0)
    pool.cache_block(first[1], b"b", 0)
    pool.free_blocks(reversed(first))
    assert free_ids(pool) == [3, 6, 7, 2, 1]
    pool.free_blocks(reversed(second))
    assert free_ids(pool) == [5, 4, 3, 6, 7, 2, 1]


def test_BP3_a_freed_block_keeps_its_hash_until_it_is_handed_out():
    pool = BlockPool(3)
    a, b = pool.get_new_blocks(2)
    pool.cache_block(a, b"a", 0)
    pool.cache_block(b, b"b", 0)
    pool.free_blocks([b, a])
    assert pool.get_cached_block(b"a", [0]) == [a]
    assert pool.get_cached_block(b"b", [0]) == [b]
    assert pool.get_new_blocks(1) == [b]
    assert b.block_hash is None
    assert pool.get_cached_block(b"b", [0]) is None
    assert pool.get_cached_block(b"a", [0]) == [a]


def test_BP4_a_hit_takes_a_free_block_out_of_the_middle_and_counts_a_used_one():
    pool = BlockPool(6)
    blocks = pool.get_new_blocks(5)
    for block in blocks:
        pool.cache_block(block, bytes([block.block_id]), 0)
    pool.free_blocks(blocks)
    pool.touch([blocks[2]])
    assert free_ids(pool) == [1, 2, 4, 5]
    pool.touch([blocks[2]])
    assert blocks[2].ref_cnt == 2
    assert free_ids(pool) == [1, 2, 4, 5]
    pool.free_blocks([blocks[2]])
    assert blocks[2].ref_cnt == 1
    pool.free_blocks([blocks[2]])
    assert free_ids(pool) == [1, 2, 4, 5, 3]


def test_get_new_blocks_is_all_or_nothing():
    pool = BlockPool(4)
    (kept,) = pool.get_new_blocks(1)
    pool.cache_block(kept, b"a", 0)
    before = state(pool)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        pool.get_new_blocks(3)
    assert state(pool) == before
    assert pool.get_new_blocks(0) == []


def test_freeing_a_block_twice_is_caught():
    pool = BlockPool(3)
    blocks = pool.get_new_blocks(1)
    pool.free_blocks(blocks)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free_blocks(blocks)


def test_T18_the_group_is_part_of_the_name():
    pool = BlockPool(5)
    one, other = pool.get_new_blocks(2)
    pool.cache_block(one, b"a", 0)
    assert pool.get_cached_block(b"a", [0]) == [one]
    assert pool.get_cached_block(b"a", [1]) is None
    assert pool.get_cached_block(b"a", [0, 1]) is None
    pool.cache_block(other, b"a", 1)
    assert pool.get_cached_block(b"a", [0, 1]) == [one, other]


def test_BP8_two_blocks_may_have_one_hash_and_each_loses_only_its_own():
    pool = BlockPool(4)
    one, other, third = pool.get_new_blocks(3)
    pool.cache_block(one, b"a", 0)
    pool.cache_block(other, b"a", 0)
    assert pool.num_cached_blocks == 2
    assert pool.evict_block(one)
    assert pool.get_cached_block(b"a", [0]) == [other]
    assert not pool.evict_block(one)
    assert not pool.evict_block(third)
    assert pool.evict_block(other)
    assert pool.get_cached_block(b"a", [0]) is None
    assert pool._cached == {}


def test_a_shared_block_may_be_named_twice_but_only_alike():
    pool = BlockPool(2)
    (block,) = pool.get_new_blocks(1)
    pool.cache_block(block, b"a", 0)
    pool.cache_block(block, b"a", 0)
    assert pool.num_cached_blocks == 1
    with pytest.raises(AssertionError):
        pool.cache_block(block, b"b", 0)


def test_T23_BP10_reset_is_refused_while_blocks_are_in_use():
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(2)
    pool.cache_block(blocks[0], b"a", 0)
    before = state(pool)
    assert not pool.reset_prefix_cache()
    assert state(pool) == before
    pool.free_blocks(blocks)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(b"a", [0]) is None
    assert all(block.block_hash is None for block in pool.blocks)
    assert pool.num_free_blocks == 3
