"""The classic faults of prefix caches and block tables, planted one by one: each must be caught.

Each is a bug that a public engine has really had. What catches them is the harness: tokens that
hash what is read through the block tables, and the invariants of pool and tables.
"""

import random

import pytest
from nanofixtures.scheduling import Harness, RecordingCache, make_request, make_scheduler

from nanoserve.kvcache import prefix_cache
from nanoserve.kvcache.block_pool import BlockPool
from nanoserve.kvcache.manager import KVCacheManager
from nanoserve.kvcache.prefix_cache import PrefixCache
from nanoserve.kvcache.spec import SlidingWindowSpec
from nanoserve.scheduler import Scheduler


def workload(seed=0, num_blocks=15, windows=(None,), index=RecordingCache):
    """Requests with common beginnings, some the same whole, some aborted, in a pool that evicts."""
    rng = random.Random(seed)
    engine = Harness(
        make_scheduler(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=40,
            max_num_seqs=4,
            max_num_batched_tokens=12,
            prefix_index=index,
            windows=windows,
        ),
        num_drafts=2,
    )
    # Few blocks in any order: the same one comes back after other beginnings.
    blocks = [[rng.randrange(29) for _ in range(4)] for _ in range(3)]
    for number in range(60):
        prompt = [token for _ in range(rng.randrange(1, 5)) for token in rng.choice(blocks)]
        prompt += [rng.randrange(29) for _ in range(rng.choice([0, 0, 1, 5]))]
        max_tokens, salt = rng.choice([1, 4, 9, 15]), rng.choice([None, None, None, "a"])
        engine.add(make_request(f"r{number}", prompt, max_tokens=max_tokens, cache_salt=salt))
        for _ in range(rng.randrange(3)):
            engine.step()
        if number % 9 == 5:
            engine.abort(f"r{number - rng.randrange(3)}")
    engine.run(2000)
    engine.check_end()
    return engine


@pytest.mark.parametrize("windows", [(None,), (6,), (None, 6)])
def test_the_workload_hits_evicts_and_is_right(windows):
    num_blocks = 1 + 14 * len(windows)
    engine, plain = (workload(0, num_blocks, windows, index) for index in (RecordingCache, None))
    assert any(request.num_cached_tokens > 0 for request in engine.requests.values())
    # A window alone gives blocks back so early that nobody has to be preempted.
    assert (engine.num_preemptions > 0) == (None in windows)
    assert engine.aborted
    # Aborts come after the same number of steps, in which a hit has given more tokens.
    ended = engine.finished.keys() & plain.finished.keys()
    assert len(ended) > 50
    for name in ended:
        assert engine.tokens[name] == plain.tokens[name]


def workloads(num_blocks=15, windows=(None,)):
    """Some faults show only now and then."""
    for seed in range(20):
        workload(seed, num_blocks, windows)


def test_without_a_fault_every_workload_is_right():
    workloads()
    workloads(29, (None, 6))


def duplicates_freed_under_a_table(monkeypatch):
    """Duplicate pages are freed while a table still points at them (mini-sglang#142)."""
    real = KVCacheManager.cache_blocks

    def faulty(self, request, num_final_tokens):
        real(self, request, num_final_tokens)
        for block in self.get_blocks(request.request_id)[0]:
            twins = self.block_pool._cached.get(block.block_hash, {}) if block.block_hash else {}
            if len(twins) > 1 and block.ref_cnt:
                self.block_pool.free_blocks([block])
                return

    monkeypatch.setattr(KVCacheManager, "cache_blocks", faulty)


def twins_stored_twice(monkeypatch):
    """Equal prompts of one step: the second's block takes the first's place (nano-vllm#219)."""

    def faulty(self, block, block_hash, group_id):
        block.block_hash = (block_hash, group_id)
        self._cached[block.block_hash] = {block.block_id: block}

    monkeypatch.setattr(BlockPool, "cache_block", faulty)


def hits_of_the_first_attempt(monkeypatch):
    """What the first lookup found is used at a later attempt to admit (vllm#18957)."""
    real, kept = KVCacheManager.get_computed_blocks, {}

    def faulty(self, request):
        if request.request_id not in kept:
            kept[request.request_id] = real(self, request)
        return kept[request.request_id]

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", faulty)


def drafts_are_named(monkeypatch):
    """A block is named when drafts have filled it, before they are verified."""
    real = Scheduler._update_request

    def faulty(self, request, step, results):
        drafts = step.scheduled_spec_decode_tokens.get(request.request_id, [])
        known = len(request.token_ids)
        request.token_ids += drafts
        self.kv_cache_manager.cache_blocks(request, request.num_computed_tokens)
        del request.token_ids[known:]
        return real(self, request, step, results)

    monkeypatch.setattr(Scheduler, "_update_request", faulty)


def salts_are_left_out(monkeypatch):
    """Whoever sends the same tokens shares the block, whatever the salt."""
    monkeypatch.setattr(prefix_cache, "extra_keys_of", lambda request, start, end: ())


def full_hit_leaves_nothing_to_compute(monkeypatch):
    """A prompt that is cached whole becomes a query of length zero (nano-vllm#114)."""

    def faulty(self, request):
        return self.prefix_index.lookup(request, request.num_tokens)

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", faulty)


def stale_hash_after_reuse(monkeypatch):
    """A block keeps its name when it is handed out for other tokens (nano-vllm#163)."""

    def faulty(self, n):
        blocks = self.free_block_queue.popleft_n(n)
        for block in blocks:
            block.ref_cnt = 1
        return blocks

    monkeypatch.setattr(BlockPool, "get_new_blocks", faulty)
    real = BlockPool.cache_block

    def lenient(self, block, block_hash, group_id):
        if block.block_hash is None:
            real(self, block, block_hash, group_id)

    monkeypatch.setattr(BlockPool, "cache_block", lenient)


def hits_counted_as_free(monkeypatch):
    """Room is counted before the hits leave the free queue (nano-vllm#207)."""
    real, extra = KVCacheManager.allocate_slots, [0]
    count = BlockPool.num_free_blocks.fget

    def faulty(self, request, num_new, num_hit=0, hits=None, *rest, **options):
        extra[0] = sum(block.ref_cnt == 0 for group in hits or () for block in group)
        try:
            return real(self, request, num_new, num_hit, hits, *rest, **options)
        finally:
            extra[0] = 0

    monkeypatch.setattr(KVCacheManager, "allocate_slots", faulty)
    monkeypatch.setattr(BlockPool, "num_free_blocks", property(lambda s: count(s) + extra[0]))


def hit_blocks_stay_in_the_free_queue(monkeypatch):
    """A hit on a free block does not take it out of the free queue."""

    def faulty(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    monkeypatch.setattr(BlockPool, "touch", faulty)


def chain_without_its_parent(monkeypatch):
    """A block is named by its own tokens alone, and found after any beginning."""

    def faulty(self, request, num_blocks):
        size = self._block_size
        del request.block_hashes[:]
        for index in range(num_blocks):
            tokens = request.token_ids[index * size : (index + 1) * size]
            request.block_hashes.append(self._function(repr(tokens).encode()))
        return list(request.block_hashes)

    monkeypatch.setattr(PrefixCache, "_names", faulty)


def named_before_it_is_computed(monkeypatch):
    """A block can be found before its tokens have been computed."""
    real = Scheduler.schedule

    def faulty(self):
        out = real(self)
        for request in self.running:
            self.kv_cache_manager.cache_blocks(request, request.num_tokens)
        return out

    monkeypatch.setattr(Scheduler, "schedule", faulty)


def last_chunk_one_short(monkeypatch):
    """The key length is wrong at a chunk's edge (nano-vllm#213)."""
    real = Scheduler._admit

    def faulty(self, request, num_computed, num_hit_tokens):
        real(self, request, num_computed + (num_hit_tokens > 0), num_hit_tokens)

    monkeypatch.setattr(Scheduler, "_admit", faulty)


def position_zero_is_never_written(monkeypatch):
    """The cache never holds position 0, and a test that reads none of it passes."""
    from nanofixtures.scheduling import KVOracle

    real = KVOracle._write

    def faulty(self, request_id, count, drafts):
        real(self, request_id, count, drafts)
        for slot, (_, position) in list(self.slots.items()):
            if position == 0:
                del self.slots[slot]

    monkeypatch.setattr(KVOracle, "_write", faulty)


def window_gives_up_a_block_too_many(monkeypatch):
    """A block goes while the next token still sees its end."""

    def faulty(self, num_tokens):
        return max(0, num_tokens + self.block_size - self.window) // self.block_size

    monkeypatch.setattr(SlidingWindowSpec, "num_skipped_blocks", faulty)


def window_shortened_by_another_group(monkeypatch):
    """A window's hit is cut to another group's length, where its own blocks may be gone."""

    def faulty(self, request, max_num_tokens):
        names = self._names(request, max_num_tokens // self._block_size)
        found = [self._find(group_id, names) for group_id in range(len(self._specs))]
        length = min(map(len, found))
        return tuple(group[:length] for group in found), length * self._block_size

    monkeypatch.setattr(PrefixCache, "lookup", faulty)


@pytest.mark.parametrize(
    "fault", [window_gives_up_a_block_too_many, window_shortened_by_another_group]
)
def test_a_planted_fault_of_windows_is_caught(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        workloads(29, (None, 6))


@pytest.mark.parametrize(
    "fault",
    [
        duplicates_freed_under_a_table,
        twins_stored_twice,
        hits_of_the_first_attempt,
        drafts_are_named,
        salts_are_left_out,
        full_hit_leaves_nothing_to_compute,
        stale_hash_after_reuse,
        hits_counted_as_free,
        hit_blocks_stay_in_the_free_queue,
        chain_without_its_parent,
        named_before_it_is_computed,
        last_chunk_one_short,
        position_zero_is_never_written,
    ],
)
def test_a_planted_fault_is_caught(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        workloads()
