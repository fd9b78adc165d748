"""Forks: the sequences of one request compute its prompt once and never write what they share."""

import pytest
from nanofixtures.scheduling import (
    ChainIndex,
    Harness,
    RecordingCache,
    make_scheduler,
    make_siblings,
)

INDEXES = pytest.mark.parametrize("index", [None, ChainIndex, RecordingCache])


def harness(index=None, **settings):
    options = {"num_blocks": 64, "block_size": 4, "max_model_len": 64, "max_num_seqs": 8}
    return Harness(make_scheduler(prefix_index=index, **{**options, **settings}))


def run(harness, siblings):
    for request in siblings:
        harness.add(request)
    harness.run(500)
    harness.check_end()


def prompt_tokens(harness, siblings, max_tokens):
    """Tokens scheduled beyond those that were generated (the last one's KV is never computed)."""
    total = sum(sum(step.values()) for step in harness.steps)
    return total - len(siblings) * (max_tokens - 1)


@INDEXES
@pytest.mark.parametrize("length", [2, 3, 4, 5, 8, 9, 17, 30])
def test_the_prompt_is_computed_once_and_each_siblings_last_token(index, length):
    engine, siblings = harness(index), make_siblings("r", length, 4, max_tokens=6)
    run(engine, siblings)
    assert prompt_tokens(engine, siblings, 6) == length + 3
    assert engine.num_preemptions == 0


def test_a_prompt_of_one_token_has_nothing_to_share():
    engine, siblings = harness(), make_siblings("r", 1, 3, max_tokens=4)
    run(engine, siblings)
    assert prompt_tokens(engine, siblings, 4) == 3


@INDEXES
def test_full_blocks_are_shared_and_the_tail_is_each_ones_own(index):
    engine, siblings = harness(index), make_siblings("r", 11, 3, max_tokens=3)
    for request in siblings:
        engine.add(request)
    engine.step()
    out = engine.step()
    tables = [
        engine.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
        for request in siblings
    ]
    assert [table[:2] for table in tables[1:]] == [tables[0][:2]] * 2
    tails = [table[2] for table in tables]
    assert len(set(tails)) == 3
    assert out.block_copies == [(tails[0], tails[1]), (tails[0], tails[2])]
    shared = engine.scheduler.kv_cache_manager.block_pool.blocks[tables[0][0]]
    assert shared.ref_cnt == 3
    engine.run(50)
    engine.check_end()


def test_no_block_id_changes_later():
    engine, siblings = harness(), make_siblings("r", 9, 3, max_tokens=12)
    for request in siblings:
        engine.add(request)
    seen = {}
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        for request_id in list(engine.scheduler.requests):
            ids = engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            before = seen.get(request_id, [])
            assert ids[: len(before)] == before
            seen[request_id] = ids
    engine.run(5)
    engine.check_end()


@INDEXES
def test_a_chunked_prompt_is_waited_for(index):
    engine = harness(index, max_num_batched_tokens=8)
    siblings = make_siblings("r", 30, 3, max_tokens=3)
    for request in siblings:
        engine.add(request)
    for _ in range(3):
        assert set(engine.step().num_scheduled_tokens) == {"r-0"}
    engine.run(50)
    engine.check_end()
    assert prompt_tokens(engine, siblings, 3) == 32


@INDEXES
@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_a_parent_that_goes_leaves_its_siblings_a_way(index, after):
    engine = harness(index, max_num_batched_tokens=8)
    siblings = make_siblings("r", 19, 3, max_tokens=4)
    for request in siblings:
        engine.add(request)
    for _ in range(after):
        engine.step()
    engine.abort("r-0")
    engine.run(100)
    engine.check_end()


def test_a_parent_that_ends_at_its_first_token_leaves_them_a_way():
    engine, siblings = harness(), make_siblings("r", 10, 3, max_tokens=1)
    run(engine, siblings)


@INDEXES
def test_others_are_not_held_up_by_siblings_that_wait(index):
    engine = harness(index, max_num_batched_tokens=8)
    for request in make_siblings("r", 30, 3, max_tokens=3):
        engine.add(request)
    other = engine.add(make_siblings("other", 3, 1, max_tokens=3)[0])
    engine.step()
    while "other-0" not in engine.finished:
        engine.step()
    assert engine.tokens[other.request_id]
    engine.run(50)
    engine.check_end()


@INDEXES
@pytest.mark.parametrize("num_blocks", [9, 10, 12, 16])
def test_siblings_in_a_tight_pool_preempt_and_come_back(index, num_blocks):
    engine = harness(index, num_blocks=num_blocks, max_model_len=32)
    run(engine, make_siblings("r", 13, 4, max_tokens=16))
    if num_blocks < 12:
        assert engine.num_preemptions > 0


@INDEXES
def test_only_the_first_counts_as_a_query_of_the_cache(index):
    engine, siblings = harness(index), make_siblings("r", 12, 4, max_tokens=2)
    run(engine, siblings)
    assert [request.num_cached_tokens for request in siblings] == [0] * 4
    again = make_siblings("again", siblings[0].token_ids[:12], 4, max_tokens=2)
    run(engine, again)
    hits = 0 if index is None else 8
    assert [request.num_cached_tokens for request in again] == [hits, 0, 0, 0]


def test_a_lost_copy_is_caught(monkeypatch):
    engine, siblings = harness(), make_siblings("r", 11, 3, max_tokens=3)
    monkeypatch.setattr(engine.oracle, "_copy_blocks", lambda copies: None)
    with pytest.raises(AssertionError):
        run(engine, siblings)
