"""Pool, manager and prefix cache under any order of calls, checked after every one of them.

Each slot of a model cache holds what real keys and values depend on: all tokens up to there, the
adapter, the media among them, and whose salt they were computed under. Whatever a request can read
through its table, and whatever can be found by a name, must be exactly its own.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from nanofixtures.scheduling import check_manager, make_cache_config, make_request, windows_of

from nanoserve.kvcache.manager import KVCacheManager
from nanoserve.kvcache.prefix_cache import PrefixCache
from nanoserve.request import MediaItem, Request


def contents(request, position, tokens=None):
    """What the slot of a request's token holds."""
    tokens = request.token_ids if tokens is None else tokens
    media = [item for item in request.media if item.offset <= position]
    return tuple(tokens[: position + 1]), request.extra_keys, tuple(media)


# Few beginnings and short tails, so that most requests meet blocks of others.
PROMPTS = st.builds(
    lambda row, length, tail: row[:length] + tail,
    st.sampled_from([[0] * 14, [0, 1] * 7]),
    st.integers(1, 14),
    st.lists(st.integers(0, 1), max_size=2),
)


class CacheMachine(RuleBasedStateMachine):
    """Requests are admitted, computed, verified, forked and freed, and the cache is reset."""

    @initialize(
        size=st.sampled_from([1, 2, 3]),
        windows=st.sampled_from([(None,), (None,), (None, None), (3,), (None, 4), (5, 2)]),
        num_blocks=st.integers(3, 16),
    )
    def start(self, size, windows, num_blocks):
        config = make_cache_config(num_blocks, size, windows=windows)
        self.size, self.windows = size, windows_of(config)
        self.manager = KVCacheManager(config, PrefixCache)
        self.slots: dict[tuple[int, int], object] = {}
        self.live: dict[str, Request] = {}
        self.named: dict[tuple[bytes, int], list[object]] = {}
        self.count = 0

    # What the worker does.

    def place(self, request, group, position):
        block = self.manager.get_blocks(request.request_id)[group][position // self.size]
        assert not block.is_null, f"position {position} of {request} is gone"
        return group, block.block_id * self.size + position % self.size

    def write(self, request, start, end, tokens=None):
        for group in range(len(self.windows)):
            for position in range(start, end):
                self.slots[self.place(request, group, position)] = contents(
                    request, position, tokens
                )

    def visible(self, group, num_tokens):
        """Positions that a token after num_tokens tokens sees in a group."""
        window = self.windows[group]
        return range(0 if window is None else max(0, num_tokens - window + 1), num_tokens)

    def note_names(self, request):
        """Remember what each of a request's names stands for: once and for all."""
        for index, name in enumerate(request.block_hashes):
            places = range(index * self.size, (index + 1) * self.size)
            for group in range(len(self.windows)):
                held = [contents(request, position) for position in places]
                assert self.named.setdefault((name, group), held) == held, "one name, two contents"

    def picture(self):
        pool = self.manager.block_pool
        return (
            [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
            [(b.ref_cnt, b.block_hash) for b in pool.blocks],
            {name: list(blocks) for name, blocks in pool._cached.items()},
            {name: self.manager.get_block_ids(name) for name in self.live},
        )

    # What can happen.

    @rule(
        prompt=PROMPTS,
        salt=st.sampled_from([None] * 5 + ["a", "b"]),
        lora=st.sampled_from([None] * 5 + ["a"]),
        media=st.sampled_from([()] * 4 + [(MediaItem("x", 2, 3),), (MediaItem("y", 2, 3),)]),
        chunk=st.sampled_from([1, 2, 3, 5, 16, 16, 16]),
        drafts=st.sampled_from([0, 0, 1, 3]),
        whole=st.booleans(),
        skip=st.sampled_from([False, False, False, True]),
    )
    def admit(self, prompt, salt, lora, media, chunk, drafts, whole, skip):
        name, manager = f"r{self.count}", self.manager
        self.count += 1
        params = make_request(name, prompt, skip_reading_prefix_cache=skip).sampling_params
        request = Request(name, prompt, params, cache_salt=salt, lora_name=lora, media=media)
        hits, num_hit = manager.get_computed_blocks(request)
        self.note_names(request)
        assert 0 <= num_hit < len(prompt)
        assert num_hit % self.size == 0
        assert not (skip and num_hit)
        for group, blocks in enumerate(hits):
            assert len(blocks) * self.size == num_hit
            for position in self.visible(group, num_hit):
                slot = blocks[position // self.size].block_id * self.size + position % self.size
                assert self.slots[group, slot] == contents(request, position), "a foreign hit"
        before = self.picture()
        num_new = min(chunk, len(prompt) - num_hit)
        new = manager.allocate_slots(
            request, num_new, num_hit, hits, drafts, must_fit_tokens=len(prompt) if whole else 0
        )
        if new is None:
            assert self.picture() == before, "a refusal changed something"
            return
        self.live[name] = request
        request.num_computed_tokens = num_hit
        self.compute(request, num_new)

    def compute(self, request, num_tokens):
        start = request.num_computed_tokens
        self.write(request, start, start + num_tokens)
        request.num_computed_tokens = start + num_tokens
        self.manager.cache_blocks(request, request.num_computed_tokens)
        self.note_names(request)

    def some(self, data):
        return self.live[data.draw(st.sampled_from(sorted(self.live)))]

    @precondition(lambda self: self.live)
    @rule(data=st.data(), chunk=st.integers(1, 9))
    def next_chunk(self, data, chunk):
        request = self.some(data)
        left = request.num_tokens - request.num_computed_tokens
        num_new = min(chunk, left)
        if num_new and self.manager.allocate_slots(request, num_new) is not None:
            self.compute(request, num_new)

    @precondition(lambda self: self.live)
    @rule(
        data=st.data(),
        drafts=st.lists(st.integers(0, 1), max_size=5),
        accepted=st.integers(0, 5),
        token=st.integers(0, 1),
    )
    def verify(self, data, drafts, accepted, token):
        """The last token and drafts are computed; some drafts stay, and one token more comes."""
        request = self.some(data)
        start = request.num_computed_tokens
        if start == request.num_tokens:
            request.token_ids.append(token)
        if start + 1 != request.num_tokens:
            return
        if self.manager.allocate_slots(request, 1 + len(drafts)) is None:
            return
        self.write(request, start, start + 1 + len(drafts), request.token_ids + drafts)
        kept = drafts[:accepted]
        request.token_ids += [*kept, token]
        request.num_computed_tokens = start + 1 + len(kept)
        self.manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        self.note_names(request)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data):
        parent, manager = self.some(data), self.manager
        num_shared = parent.num_prompt_tokens - 1
        if parent.num_computed_tokens <= num_shared or not manager.can_fork(parent, num_shared):
            return
        name = f"f{self.count}"
        self.count += 1
        prompt = parent.token_ids[: parent.num_prompt_tokens]
        child = Request(name, prompt, parent.sampling_params, media=parent.media)
        child.extra_keys = parent.extra_keys
        before = self.picture()
        if not manager.fork(parent, child, num_shared):
            assert self.picture() == before, "a refusal changed something"
            return
        for source, destination in manager.take_block_copies():
            for group in range(len(self.windows)):
                for offset in range(self.size):
                    held = self.slots.get((group, source * self.size + offset))
                    self.slots[group, destination * self.size + offset] = held
        self.live[name] = child
        child.num_computed_tokens = num_shared

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data):
        request = self.some(data)
        self.manager.free(self.live.pop(request.request_id))

    @rule()
    def reset(self):
        unused = self.manager.num_free_blocks == self.manager.block_pool.num_usable_blocks
        before = self.picture()
        assert self.manager.reset_prefix_cache() is unused
        if unused:
            assert self.manager.block_pool.num_cached_blocks == 0
        else:
            assert self.picture() == before

    # What holds at any time.

    @invariant()
    def all_agrees(self):
        if not hasattr(self, "manager"):
            return
        check_manager(self.manager)
        for request in self.live.values():
            for group in range(len(self.windows)):
                for position in self.visible(group, request.num_computed_tokens):
                    held = self.slots[self.place(request, group, position)]
                    assert held == contents(request, position), (request, group, position)
        for (name, group), blocks in self.manager.block_pool._cached.items():
            for block_id in blocks:
                start = block_id * self.size
                held = [self.slots[group, start + offset] for offset in range(self.size)]
                assert held == self.named[name, group], f"block {block_id} is not what it is called"

    def teardown(self):
        if hasattr(self, "manager"):
            for request in self.live.values():
                self.manager.free(request)
            self.live = {}
            check_manager(self.manager)
            pool = self.manager.block_pool
            assert pool.num_free_blocks == pool.num_usable_blocks
            assert self.manager.num_requests == 0
            assert self.manager.reset_prefix_cache()


def run(examples, steps):
    run_state_machine_as_test(
        CacheMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_BP13_any_order_of_calls_leaves_names_tables_and_contents_in_agreement():
    run(examples=70, steps=30)


@pytest.mark.slow
def test_BP13_any_order_of_calls_at_length():
    run(examples=1500, steps=60)
