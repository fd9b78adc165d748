"""The classic faults of prefix caches and block tables, planted one by one: each must be caught.

Each is a bug that a public engine has really had. What catches them is the harness: tokens that
hash what is read through the block tables, and the invariants of pool and tables.
"""

import random

import pytest
from nanofixtures.scheduling import Harness, RecordingCache, make_request, make_scheduler

from nanoserve.kvcache.block_pool import BlockPool
from nanoserve.kvcache.manager import KVCacheManager
from nanoserve.kvcache.prefix_cache import PrefixCache
from nanoserve.scheduler import Scheduler


def workload(seed=0, num_blocks=15):
    """Requests with common beginnings, some the same whole, in a pool that evicts."""
    rng = random.Random(seed)
    engine = Harness(
        make_scheduler(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=40,
            max_num_seqs=4,
            max_num_batched_tokens=12,
            prefix_index=RecordingCache,
        )
    )
    # Few blocks in any order: the same one comes back after other beginnings.
    blocks = [[rng.randrange(29) for _ in range(4)] for _ in range(3)]
    for number in range(60):
        prompt = [token for _ in range(rng.randrange(1, 5)) for token in rng.choice(blocks)]
        prompt += [rng.randrange(29) for _ in range(rng.choice([0, 0, 1, 5]))]
        engine.add(make_request(f"r{number}", prompt, max_tokens=rng.choice([1, 4, 9, 15])))
        for _ in range(rng.randrange(3)):
            engine.step()
    engine.run(2000)
    engine.check_end()
    return engine


def test_the_workload_hits_evicts_and_is_right():
    engine = workload()
    assert any(request.num_cached_tokens > 0 for request in engine.requests.values())
    assert engine.num_preemptions > 0


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


@pytest.mark.parametrize(
    "fault",
    [
        duplicates_freed_under_a_table,
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
        workload()
