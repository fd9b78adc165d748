"""Sliding windows: what a table keeps, what a hit needs, and what several groups can serve."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nanofixtures.scheduling import (
    Harness,
    RecordingCache,
    check_manager,
    make_cache_config,
    make_request,
    make_scheduler,
    make_siblings,
)

from nanoserve.kvcache.manager import KVCacheManager
from nanoserve.kvcache.prefix_cache import PrefixCache
from nanoserve.kvcache.spec import SlidingWindowSpec


def manager(windows, num_blocks=64, size=2):
    return KVCacheManager(make_cache_config(num_blocks, size, windows=windows), PrefixCache)


def grow(manager, request, num_tokens):
    """Compute the request's first num_tokens tokens."""
    missing = num_tokens - request.num_computed_tokens
    assert manager.allocate_slots(request, missing) is not None
    request.num_computed_tokens = num_tokens
    manager.cache_blocks(request, num_tokens)
    check_manager(manager)


@pytest.mark.parametrize("window", range(1, 9))
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_block_is_skipped_once_no_later_token_sees_any_of_it(window, size):
    spec = SlidingWindowSpec(size, 1, 8, 4, window)
    for num_tokens in range(30):
        seen = range(max(0, num_tokens - window + 1), num_tokens + 1)
        first_seen = min(seen) // size
        assert spec.num_skipped_blocks(num_tokens) == first_seen


def test_T32_blocks_before_the_window_become_null_and_can_be_used_again():
    cache, request = manager([4]), make_request("r", 12)
    held = []
    for num_tokens in (4, 5, 6, 7, 11):
        grow(cache, request, num_tokens)
        cache.allocate_slots(request, 0)
        check_manager(cache)
        held.append([not block.is_null for block in cache.get_blocks("r")[0]])
    assert held == [
        [True, True],
        [False, True, True],
        [False, True, True],
        [False, False, True, True],
        [False, False, False, False, True, True],
    ]
    # They keep their names, and of those dropped at once the later goes first.
    free = [b.block_id for b in cache.block_pool.free_block_queue.get_all_free_blocks()]
    assert free[-4:] == [1, 2, 4, 3]
    cache.free(request)
    check_manager(cache)
    assert cache.num_free_blocks == 63


def serves(window, size, known, num_blocks):
    """A plain reading: is every block that a token after num_blocks blocks sees there?"""
    first = 0 if window is None else max(0, num_blocks * size - window + 1) // size
    return all(known[first:num_blocks])


def found_with(windows, size, patterns):
    """The hit when `patterns[group][i]` says whether block i is cached for the group."""
    length = len(patterns[0])
    cache = manager(windows, 2 + len(windows) * length, size)
    request = make_request("r", list(range(length * size + 1)))
    names = cache.prefix_index._names(request, length)
    for group, pattern in enumerate(patterns):
        for name, known in zip(names, pattern, strict=True):
            if known:
                cache.block_pool.cache_block(cache.block_pool.get_new_blocks(1)[0], name, group)
    hits, num_tokens = cache.get_computed_blocks(request)
    for window, group in zip(windows, hits, strict=True):
        assert len(group) * size == num_tokens
        first = 0 if window is None else max(0, num_tokens - window + 1) // size
        assert [block.is_null for block in group] == [i < first for i in range(len(group))]
    return num_tokens // size


@pytest.mark.parametrize(
    ("pattern", "blocks"),
    [("TTFTFFTTFTTT", 12), ("TTFTFFTTFFFF", 8), ("TTFFFFTFTFTF", 2), ("FTFTFT", 0), ("TFFF", 1)],
)
def test_T31_a_window_needs_only_the_last_blocks(pattern, blocks):
    assert found_with([4], 2, [[mark == "T" for mark in pattern]]) == blocks


@given(
    windows=st.lists(st.sampled_from([None, None, 1, 2, 3, 5, 9]), min_size=1, max_size=3),
    size=st.sampled_from([1, 2, 3]),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_T26_the_hit_is_the_longest_that_every_group_can_serve(windows, size, data):
    length = data.draw(st.integers(1, 9))
    mostly = st.lists(st.sampled_from([True, True, True, False]), min_size=length, max_size=length)
    patterns = [data.draw(mostly) for _ in windows]
    longest = max(
        n
        for n in range(length + 1)
        if all(serves(w, size, p, n) for w, p in zip(windows, patterns, strict=True))
    )
    assert found_with(windows, size, patterns) == longest


def test_a_hit_in_a_window_starts_with_null_blocks_and_computes_right():
    harness = Harness(
        make_scheduler(40, 2, windows=[5, 3], prefix_index=RecordingCache, max_model_len=40)
    )
    prompt = [i % 29 for i in range(21)]
    for name in ("first", "second"):
        harness.add(make_request(name, prompt, max_tokens=3))
        harness.run(20)
    harness.check_end()
    assert harness.finished["second"].num_cached_tokens == 20
    assert harness.steps[-4]["second"] == 1


def test_a_long_sequence_holds_no_more_than_its_window():
    harness = Harness(
        make_scheduler(
            30, 2, windows=[6], prefix_index=RecordingCache, max_num_batched_tokens=4,
            max_model_len=58,
        )
    )  # fmt: skip
    harness.add(make_request("long", 30, max_tokens=20))
    most = 0
    while harness.scheduler.has_unfinished_requests():
        harness.step()
        pool = harness.scheduler.kv_cache_manager.block_pool
        most = max(most, pool.num_usable_blocks - pool.num_free_blocks)
    harness.run(2)
    harness.check_end()
    # The window, a chunk, and the two ends that may stick out of whole blocks.
    assert most <= (6 + 4) // 2 + 1


def test_a_sibling_whose_prompt_has_left_the_window_computes_it_again():
    harness = Harness(
        make_scheduler(
            60, 2, windows=[3], prefix_index=None, max_num_seqs=2, max_model_len=40
        )
    )  # fmt: skip
    other = harness.add(make_request("other", 3, max_tokens=8))
    first, second = make_siblings("s", 9, 2, max_tokens=16)
    harness.add(first)
    harness.add(second)
    harness.run(60)
    harness.check_end()
    assert other.is_finished
    # It was admitted when the first was far ahead.
    assert next(step["s-1"] for step in harness.steps if "s-1" in step) == 9
