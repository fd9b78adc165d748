"""Pool, manager and scheduler under random requests, checked after every step.

The harness compares every token with what the request would have got alone, every reference count
with the tables, the free queue both ways, and every cached block with its contents.
"""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)
from nanofixtures.scheduling import (
    ChainIndex,
    Harness,
    RecordingCache,
    make_request,
    make_scheduler,
    make_siblings,
)


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go and are aborted in any order between steps."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        max_model_len=st.sampled_from([12, 20, 33]),
        spare_blocks=st.integers(0, 12),
        windows=st.sampled_from([(None,), (None,), (None, None), (3,), (7,), (None, 5), (6, 2)]),
        max_num_seqs=st.sampled_from([1, 2, 5]),
        budget=st.sampled_from([1, 2, 5, 8, 40]),
        chunked=st.booleans(),
        threshold=st.sampled_from([0, 0, 1, 3]),
        policy=st.sampled_from(["fcfs", "priority"]),
        index=st.sampled_from([None, ChainIndex, RecordingCache, RecordingCache]),
        num_drafts=st.sampled_from([0, 0, 2, 4]),
        seed=st.integers(0, 1000),
    )
    def start(
        self,
        block_size,
        max_model_len,
        spare_blocks,
        windows,
        max_num_seqs,
        budget,
        chunked,
        threshold,
        policy,
        index,
        num_drafts,
        seed,
    ):
        if index is ChainIndex and any(windows):
            index = RecordingCache  # the small one knows no windows
        # As small as an engine may be: the longest request just fits.
        num_blocks = 1 + len(windows) * -(-max_model_len // block_size) + spare_blocks
        self.max_model_len = max_model_len
        self.harness = Harness(
            make_scheduler(
                num_blocks=num_blocks,
                block_size=block_size,
                windows=windows,
                max_model_len=max_model_len,
                prefix_index=index,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
                enable_chunked_prefill=chunked,
                long_prefill_token_threshold=threshold,
                policy=policy,
            ),
            num_drafts,
            seed,
        )
        self.work = 0
        self.chunk = min(budget, threshold or budget)

    @rule(
        length=st.integers(0, 36),
        shared=st.booleans(),
        max_tokens=st.sampled_from([None, 1, 2, 7, 30]),
        min_tokens=st.sampled_from([0, 0, 1]),
        priority=st.integers(-1, 2),
        arrival=st.integers(0, 3),
        eos=st.sampled_from([[], [3], [3, 4, 5, 6]]),
        stop=st.sampled_from([[], [7, 8]]),
    )
    def add(self, length, shared, max_tokens, min_tokens, priority, arrival, eos, stop):
        name = f"r{len(self.harness.requests)}"
        self.harness.add(
            make_request(
                name,
                [1] * length if shared else length,
                max_tokens,
                priority,
                float(arrival),
                eos,
                min_tokens=min_tokens,
                stop_token_ids=stop,
            )
        )
        outputs = min(max_tokens or self.max_model_len, self.max_model_len)
        self.work += -(-length // self.chunk) + outputs

    @rule(
        length=st.integers(1, 36),
        shared=st.booleans(),
        n=st.integers(2, 4),
        max_tokens=st.sampled_from([1, 3, 9]),
        salt=st.sampled_from([None, "a", "b"]),
        skip=st.booleans(),
    )
    def add_siblings(self, length, shared, n, max_tokens, salt, skip):
        name = f"s{len(self.harness.requests)}"
        prompt = [1] * length if shared else length
        siblings = make_siblings(
            name,
            prompt,
            n,
            max_tokens=max_tokens,
            cache_salt=salt,
            skip_reading_prefix_cache=skip,
        )
        for request in siblings:
            self.harness.add(request)
        # At worst none of them finds its sibling's blocks.
        self.work += n * (-(-length // self.chunk) + max_tokens)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data):
        self.harness.abort(data.draw(st.sampled_from(sorted(self.harness.requests))))

    @rule(count=st.integers(1, 6))
    def steps(self, count):
        for _ in range(count):
            self.harness.step()

    def teardown(self):
        if hasattr(self, "harness"):
            # Every request ends, and within a bound: what all would take one after another, thrice
            # over for what preemptions compute again.
            self.harness.run(3 * self.work + 20)
            self.harness.check_end()


def run(examples, steps):
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_BP13_any_order_of_events_leaves_the_right_tokens_and_a_whole_pool():
    run(examples=60, steps=20)


@pytest.mark.slow
def test_BP13_any_order_of_events_at_length():
    run(examples=400, steps=50)
