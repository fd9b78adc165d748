"""Block tables over the pool. Tests of prefix hits use a small chain index over the pool's map."""

import pytest
from nanofixtures.scheduling import ChainIndex, check_manager, make_cache_config, make_request

from nanoserve.kvcache.manager import KVCacheManager
from nanoserve.kvcache.prefix_index import PREFIX_INDEXES, NullPrefixIndex


def make_manager(num_blocks, block_size=16, num_groups=1, cached=True):
    config = make_cache_config(num_blocks, block_size, num_groups)
    return KVCacheManager(config, ChainIndex if cached else None)


def admit(manager, request):
    """Admit and compute a request's known tokens, as a step of the scheduler would."""
    hits, num_hit = manager.get_computed_blocks(request)
    new = manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hits)
    if new is not None:
        request.num_computed_tokens = request.num_tokens
        manager.cache_blocks(request, request.num_tokens)
    check_manager(manager)
    return new


def decode(manager, request, num_tokens):
    """Generate num_tokens tokens, all in one step."""
    new = manager.allocate_slots(request, num_tokens)
    if new is not None:
        request.token_ids += [7 + i % 3 for i in range(num_tokens)]
        request.num_computed_tokens = request.num_tokens
        manager.cache_blocks(request, request.num_tokens)
    check_manager(manager)
    return new


def free_ids(manager):
    return [b.block_id for b in manager.block_pool.free_block_queue.get_all_free_blocks()]


def ids(groups):
    return [[block.block_id for block in group] for group in groups]


def snapshot(manager):
    pool = manager.block_pool
    return (
        free_ids(manager),
        [(b.ref_cnt, b.block_hash) for b in pool.blocks],
        {name: list(blocks) for name, blocks in pool._cached.items()},
        {name: ids(table.blocks) for name, table in manager._tables.items()},
    )


COMMON = [i for i in range(3) for _ in range(16)]  # three blocks of 16


def test_T10_lookahead_slots_are_allocated_and_used_up():
    manager = make_manager(20, block_size=4, cached=False)
    request = make_request("a", 3)
    assert ids(manager.allocate_slots(request, 3, num_lookahead_tokens=2)) == [[1, 2]]
    manager.free(request)
    assert len(manager.allocate_slots(request, 3, num_lookahead_tokens=4)[0]) == 2
    request.num_computed_tokens = 3
    # The slots that were looked ahead for are there: nothing is added until they are used.
    assert ids(manager.allocate_slots(request, 5)) == [[]]
    assert len(manager.allocate_slots(request, 6)[0]) == 1
    check_manager(manager)


def test_T11_prefill_hits_sharing_and_free_order():
    manager = make_manager(11)
    first = make_request("0", COMMON + [3] * 7)
    assert ids(admit(manager, first)) == [[1, 2, 3, 4]]
    blocks = manager.get_blocks("0")[0]
    assert [b.block_hash[0] for b in blocks[:3]] == first.block_hashes
    assert blocks[3].block_hash is None
    second = make_request("1", COMMON + [4] * 5)
    hits, num_hit = manager.get_computed_blocks(second)
    assert (ids(hits), num_hit) == ([[1, 2, 3]], 48)
    assert ids(admit(manager, second)) == [[5]]
    assert [b.ref_cnt for b in manager.block_pool.blocks[1:6]] == [2, 2, 2, 1, 1]
    manager.free(first)
    manager.free(second)
    assert free_ids(manager) == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    third = make_request("2", COMMON + [4] * 5)
    assert ids(admit(manager, third)) == [[5]]
    assert manager.get_block_ids("2") == ([1, 2, 3, 5],)
    manager.free(third)
    # All of the pool for one request: every hash goes.
    fourth = make_request("3", [9] * 160)
    assert ids(admit(manager, fourth)) == [[5, 4, 6, 7, 8, 9, 10, 3, 2, 1]]
    assert manager.block_pool.num_cached_blocks == 10
    assert manager.get_computed_blocks(make_request("4", COMMON + [4]))[1] == 0


def test_T13_decode_fills_blocks_one_after_another():
    manager = make_manager(11)
    request = make_request("0", COMMON + [3] * 7)
    admit(manager, request)
    assert ids(decode(manager, request, 4)) == [[]]
    assert manager.get_blocks("0")[0][-1].block_hash is None
    assert ids(decode(manager, request, 19)) == [[5]]
    table = manager.get_blocks("0")[0]
    assert table[3].block_hash is not None
    assert table[4].block_hash is None


def test_T14_eviction_takes_tails_before_heads_and_old_before_new():
    manager = make_manager(11)
    first, second = make_request("0", list(range(29)) * 3), make_request("1", [8] * 48)
    assert ids(admit(manager, first)) == [[1, 2, 3, 4, 5, 6]]
    assert ids(admit(manager, second)) == [[7, 8, 9]]
    manager.free(first)
    manager.free(second)
    assert free_ids(manager) == [6, 10, 5, 4, 3, 2, 1, 9, 8, 7]
    third = make_request("2", first.token_ids[:32] + [0, 1, 2])
    assert ids(admit(manager, third)) == [[6]]
    assert manager.get_block_ids("2") == ([1, 2, 6],)
    assert free_ids(manager) == [10, 5, 4, 3, 9, 8, 7]


def test_T15_A04_a_block_handed_out_is_found_under_its_old_hash_no_more():
    manager = make_manager(5, block_size=4)
    x = make_request("x", [1, 2, 3, 4, 5, 6, 7, 8])
    admit(manager, x)
    manager.free(x)
    y = make_request("y", [9] * 16)
    assert admit(manager, y) is not None
    assert manager.get_computed_blocks(make_request("x2", [1, 2, 3, 4, 5, 6, 7, 8]))[1] == 0
    manager.free(y)
    assert manager.get_computed_blocks(make_request("x3", [1, 2, 3, 4, 5, 6, 7, 8]))[1] == 0


def test_T16_hit_blocks_are_not_taken_as_new_ones_in_the_same_call():
    manager = make_manager(4)
    first = make_request("0", [1] * 16 + [2] * 16)
    admit(manager, first)
    manager.free(first)
    assert free_ids(manager) == [3, 2, 1]
    again = make_request("1", [1] * 16 + [2] * 16 + [3] * 16)
    assert ids(admit(manager, again)) == [[3]]
    assert manager.get_block_ids("1") == ([1, 2, 3],)


def test_T16_with_groups_no_group_takes_another_groups_hit():
    manager = make_manager(7, num_groups=2)
    first = make_request("0", [1] * 16 + [2] * 16)
    assert ids(admit(manager, first)) == [[1, 2], [3, 4]]
    manager.free(first)
    again = make_request("1", [1] * 16 + [2] * 16 + [3] * 16)
    assert ids(admit(manager, again)) == [[5], [6]]
    assert manager.get_block_ids("1") == ([1, 2, 5], [3, 4, 6])


def test_T17_without_caching_nothing_is_ever_found():
    manager = make_manager(11, cached=False)
    assert not manager.enable_caching
    assert isinstance(manager.prefix_index, PREFIX_INDEXES.load("null"))
    first = make_request("0", COMMON)
    admit(manager, first)
    assert manager.get_computed_blocks(make_request("1", COMMON)) == (([],), 0)
    assert all(block.block_hash is None for block in manager.block_pool.blocks)
    assert admit(manager, make_request("1", 16 * 8)) is None
    assert admit(manager, make_request("2", 16 * 7)) is not None
    assert manager.num_free_blocks == 0
    assert isinstance(manager.prefix_index, NullPrefixIndex)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_T18_each_full_block_is_told_once_for_each_group(num_groups):
    manager = make_manager(20, block_size=4, num_groups=num_groups)
    told = []
    inner = manager.prefix_index.blocks_filled
    manager.prefix_index.blocks_filled = lambda r, g, b, s, e: (
        told.append((g, s, e)),
        inner(r, g, b, s, e),
    )
    request = make_request("0", 11)
    manager.allocate_slots(request, 11)
    manager.cache_blocks(request, 3)
    assert told == []
    manager.cache_blocks(request, 9)
    manager.cache_blocks(request, 11)
    assert told == [(g, 0, 2) for g in range(num_groups)]
    request.token_ids += [1] * 2
    manager.allocate_slots(request, 13)
    manager.cache_blocks(request, 13)
    assert told[num_groups:] == [(g, 2, 3) for g in range(num_groups)]
    # Blocks that were found are known already.
    other = make_request("1", [*request.token_ids[:12], 1, 2, 3, 4])
    admit(manager, other)
    assert told[2 * num_groups :] == [(g, 3, 4) for g in range(num_groups)]
    check_manager(manager)


def test_T22_BP5_free_hits_count_as_capacity_and_a_refusal_changes_nothing():
    manager = make_manager(11)
    first = make_request("0", COMMON)
    admit(manager, first)
    manager.free(first)
    second = make_request("1", [20] * 16 * 5)
    admit(manager, second)
    assert manager.num_free_blocks == 5
    # Three hits, all in the free queue, and three new blocks: six, and only five are free.
    third = make_request("2", COMMON + [21] * 48)
    assert manager.get_computed_blocks(third)[1] == 48
    before = snapshot(manager)
    assert admit(manager, third) is None
    assert snapshot(manager) == before
    # While somebody holds the hits, they cost nothing.
    holder = make_request("3", [*COMMON, 5])
    manager.free(second)
    assert admit(manager, holder) is not None
    assert manager.num_free_blocks == 6
    assert len(admit(manager, third)[0]) == 3


def test_BP5_refusal_while_running_changes_nothing():
    manager = make_manager(6, block_size=4)
    one, two = make_request("0", 8), make_request("1", 12)
    admit(manager, one)
    admit(manager, two)
    before = snapshot(manager)
    assert manager.allocate_slots(one, 1) is None
    assert snapshot(manager) == before
    manager.free(two)
    assert len(manager.allocate_slots(one, 1)[0]) == 1


def test_BP5_must_fit_tokens_reserves_nothing():
    manager = make_manager(6, block_size=4, cached=False)
    request = make_request("0", 4)
    assert manager.allocate_slots(request, 4, must_fit_tokens=20) is not None
    assert manager.num_free_blocks == 4
    other = make_request("1", 4)
    assert manager.allocate_slots(other, 4, must_fit_tokens=17) is None
    # More than the pool has: the pool, if it is free, will do.
    manager.free(request)
    assert manager.allocate_slots(other, 4, must_fit_tokens=1000) is not None


def test_must_fit_beyond_the_pool_with_free_hits_is_not_refused_for_ever():
    manager = make_manager(6, block_size=4)
    first = make_request("0", [1] * 12)
    admit(manager, first)
    manager.free(first)
    again = make_request("1", [1] * 12)
    hits, num_hit = manager.get_computed_blocks(again)
    assert num_hit == 8
    assert manager.allocate_slots(again, 4, num_hit, hits, must_fit_tokens=1000) is not None


@pytest.mark.parametrize("num_tokens", range(1, 14))
def test_BP7_lookup_leaves_at_least_one_token(num_tokens):
    manager = make_manager(20, block_size=4)
    first = make_request("0", [5] * 16)
    admit(manager, first)
    hits, num_hit = manager.get_computed_blocks(make_request("1", [5] * num_tokens))
    assert num_hit == (num_tokens - 1) // 4 * 4
    assert len(hits[0]) == num_hit // 4


def test_BP8_equal_prompts_in_one_step_own_their_blocks():
    manager = make_manager(11, block_size=4)
    requests = [make_request(str(i), [5] * 9) for i in range(2)]
    for request in requests:
        hits, num_hit = manager.get_computed_blocks(request)
        assert num_hit == 0
        manager.allocate_slots(request, 9, num_hit, hits)
    tables = [manager.get_block_ids(r.request_id) for r in requests]
    assert tables == [([1, 2, 3],), ([4, 5, 6],)]
    for request in requests:
        request.num_computed_tokens = 9
        manager.cache_blocks(request, 9)
    assert [manager.get_block_ids(r.request_id) for r in requests] == tables
    assert manager.block_pool.num_cached_blocks == 4
    check_manager(manager)
    for request in requests:
        manager.free(request)
        check_manager(manager)
    assert manager.num_free_blocks == 10


def test_a_wrong_index_that_gives_the_whole_prompt_is_caught():
    manager = make_manager(11, block_size=4)
    request = make_request("0", 8)
    manager.prefix_index.lookup = lambda request, limit: (([],), request.num_tokens)
    with pytest.raises(AssertionError, match="last token"):
        manager.get_computed_blocks(request)


def test_free_is_last_block_first_and_may_be_repeated():
    manager = make_manager(6, block_size=4, cached=False)
    request = make_request("0", 20)
    admit(manager, request)
    manager.free(request)
    manager.free(request)
    assert free_ids(manager) == [5, 4, 3, 2, 1]
    assert manager.get_block_ids("0") == ([],)
    check_manager(manager)


def test_groups_draw_from_one_pool():
    manager = make_manager(8, block_size=4, num_groups=3, cached=False)
    request = make_request("0", 8)
    assert ids(manager.allocate_slots(request, 8)) == [[1, 2], [3, 4], [5, 6]]
    assert manager.allocate_slots(make_request("1", 1), 1) is None
    assert manager.num_free_blocks == 1
    assert manager.config.num_usable_tokens == 8
    assert manager.fits_empty_pool(8)
    assert not manager.fits_empty_pool(9)


def test_T23_reset_prefix_cache():
    manager = make_manager(11)
    request = make_request("0", COMMON)
    admit(manager, request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(make_request("1", COMMON))[1] == 0


@pytest.mark.parametrize(("num_tokens", "tail"), [(8, False), (9, True), (11, True), (3, True)])
def test_forks_share_full_blocks_and_copy_the_tail(num_tokens, tail):
    manager = make_manager(14, block_size=4, num_groups=2)
    parent, child = make_request("p", num_tokens), make_request("c", num_tokens)
    admit(manager, parent)
    before = manager.get_block_ids("p")
    assert manager.fork(parent, child, num_tokens)
    check_manager(manager)
    assert manager.get_block_ids("p") == before
    full = num_tokens // 4
    for mine, hers in zip(manager.get_block_ids("p"), manager.get_block_ids("c"), strict=True):
        assert hers[:full] == mine[:full]
        assert len(hers) == full + tail
        assert not set(hers[full:]) & set(mine)
    copies = manager.take_block_copies()
    assert copies == [
        (mine[full], hers[full])
        for mine, hers in zip(manager.get_block_ids("p"), manager.get_block_ids("c"), strict=True)
        if tail
    ]
    assert manager.take_block_copies() == []
    # Each goes on by itself, in blocks of its own.
    child.num_computed_tokens = num_tokens
    for request in (parent, child):
        assert decode(manager, request, 4) is not None
    manager.free(parent)
    check_manager(manager)
    manager.free(child)
    check_manager(manager)
    assert manager.num_free_blocks == 13


def test_fork_without_room_for_the_tail_changes_nothing():
    manager = make_manager(4, block_size=4)
    parent, child = make_request("p", 11), make_request("c", 11)
    admit(manager, parent)
    before = snapshot(manager)
    assert not manager.fork(parent, child, 11)
    assert snapshot(manager) == before
    assert manager.take_block_copies() == []
    assert manager.fork(parent, child, 8)


def test_forks_that_fill_a_shared_block_name_it_once():
    manager = make_manager(12, block_size=4)
    parent, child = make_request("p", [1] * 8), make_request("c", [1] * 8)
    manager.allocate_slots(parent, 8)
    assert manager.fork(parent, child, 8)
    parent.num_computed_tokens = child.num_computed_tokens = 8
    manager.cache_blocks(child, 8)
    manager.cache_blocks(parent, 8)
    assert manager.block_pool.num_cached_blocks == 2
    check_manager(manager)
