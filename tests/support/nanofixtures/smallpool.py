"""SMALLPOOL: TINY in a pool so small that requests chunk, mix and preempt each other all the time.

`Driver` runs requests through an engine step by step, so that a test can abort in the middle and
look at every step's schedule.
"""

from collections.abc import Callable
from typing import Any

from nanoserve.llm import LLM
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.scheduler_output import ModelRunnerOutput, SchedulerOutput

SMALLPOOL = {
    "block_size": 4,
    "num_gpu_blocks_override": 9,  # 8 of 4 tokens, and the null block
    "max_num_batched_tokens": 8,
    "max_num_seqs": 4,
    "max_model_len": 32,
}
ROOMY = {
    "block_size": 16,
    "num_gpu_blocks_override": 256,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 16,
    "max_model_len": 32,
}


def assert_all_free(llm: LLM) -> None:
    """The residue rule: nothing running, nothing waiting, every block back in the pool."""
    scheduler = llm.core.scheduler
    assert not scheduler.has_unfinished_requests()
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.num_free_blocks == pool.num_blocks - 1
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    stats = scheduler.make_stats()
    assert stats.num_running_reqs == stats.num_waiting_reqs == 0
    assert stats.kv_cache_usage == 0.0


class Driver:
    """Steps an engine by hand.

    Attributes:
        steps: every step's SchedulerOutput.
        before: request id -> tokens computed before a step, one dict a step.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.steps: list[SchedulerOutput] = []
        self.outputs: dict[str, RequestOutput] = {}
        self.internal: dict[str, list[str]] = {}
        executor: Any = llm.core._executor
        self._execute: Callable[[SchedulerOutput], ModelRunnerOutput] = executor.execute_model
        executor.execute_model = self._recorded
        self._executor = executor

    def _recorded(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(scheduled)
        return self._execute(scheduled)

    def add(self, name: str, prompt: Any, params: SamplingParams, priority: int = 0) -> None:
        """Send a request."""
        processed = self.llm._input_processor.process(prompt, params, name, priority)
        processed.params.output_kind = RequestOutputKind.CUMULATIVE
        self.internal[name] = [sequence.request_id for sequence in processed.sequences]

        def sink(item: RequestOutput | Exception) -> None:
            if isinstance(item, Exception):
                raise item
            self.outputs[name] = item

        self.llm._output_processor.add(processed, sink)
        for sequence in processed.sequences:
            self.llm.core.add_request(sequence)

    def step(self) -> None:
        """One engine step."""
        to_abort, _ = self.llm._output_processor.process(self.llm.core.step())
        self.llm.core.abort_requests(to_abort)

    def abort(self, name: str) -> None:
        """Abort a request, wherever it is."""
        live, _ = self.llm._output_processor.abort(self.internal[name])
        self.llm.core.abort_requests(live)

    def run(self, max_steps: int = 5000) -> None:
        """Step until nothing is left."""
        for _ in range(max_steps):
            if not self.llm.core.has_work():
                return
            self.step()
        raise AssertionError(f"still working after {max_steps} steps")

    def close(self) -> None:
        """Stop recording."""
        self._executor.execute_model = self._execute

    @property
    def num_preemptions(self) -> int:
        """Preemptions over all steps."""
        return sum(len(step.preempted_req_ids) for step in self.steps)

    def num_mixed_steps(self) -> int:
        """Steps with a decode (one token) and a prefill chunk (several) side by side."""
        return sum(
            min(s.num_scheduled_tokens.values()) == 1 and max(s.num_scheduled_tokens.values()) > 1
            for s in self.steps
            if s.num_scheduled_tokens
        )

    def num_partial_chunks(self) -> int:
        """Times a new request was given less than all its known tokens."""
        return sum(
            step.num_scheduled_tokens[new.request_id] < len(new.token_ids) - new.num_computed_tokens
            for step in self.steps
            for new in step.scheduled_new_reqs
        )
