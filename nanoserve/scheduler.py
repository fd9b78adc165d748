"""The scheduler: which requests compute how many tokens in the next step. One loop, no phases.

A request has known tokens and computed tokens; a step hands each request as many of the difference
as the token budget and the free blocks allow, running requests first, then waiting ones. Prompts in
chunks, prefix hits, drafts and recomputation after a preemption all fall out of that one rule. The
structure is that of vLLM's v1 scheduler. This module must not know tensors, text or processes.
"""

import logging
import time
from collections.abc import Iterable
from enum import Enum, auto

from nanoserve.config.engine import EngineConfig
from nanoserve.engine.connector import KVConnector
from nanoserve.engine.messages import EngineCoreOutput, SchedulerStats
from nanoserve.errors import InvalidRequestError
from nanoserve.kvcache.manager import GroupBlocks, KVCacheManager
from nanoserve.kvcache.prefix_index import PrefixIndexFactory
from nanoserve.kvcache.spec import KVCacheConfig
from nanoserve.registry import Registry
from nanoserve.request import Request, RequestStatus, check_admissible
from nanoserve.request_queue import RequestQueue, make_request_queue
from nanoserve.scheduler_output import ModelRunnerOutput, SchedulerOutput
from nanoserve.step_builder import StepBuilder

logger = logging.getLogger(__name__)

SCHEDULERS = Registry("scheduler", {"default": "nanoserve.scheduler:Scheduler"})

# A request that has lost its blocks this often comes back only when all it may ever need is free.
MAX_EAGER_READMISSIONS = 3


class _Admission(Enum):
    """What became of an attempt to admit the request at the head of the queue."""

    ADMITTED = auto()
    NO_ROOM = auto()  # it, and all behind it, must wait
    LATER = auto()  # it waits for something else; those behind it need not
    ENDED = auto()


class Scheduler:
    """Plans steps and accounts for their results.

    A step is `schedule()`, the worker, `update_from_output()`. Several steps may be under way at
    once: a request whose next token is not known yet is then passed over, and one that was
    preempted meanwhile comes back only when all its results are in.

    A request is admitted only while those ahead of it leave budget over, and none of those asks for
    more in a later step (drafts apart). So every running request that has its blocks advances in
    every step, however many prompts arrive.

    A request that ends is freed at once; the worker learns of it from `finished_req_ids` of the
    next step. `has_finished_requests()` stays true until then, so that an otherwise idle engine
    runs one more, empty step.

    Args:
        config: model length, budgets, policy.
        kv_cache_config: the pool and its groups.
        connector: the KV connector's scheduler side.
        prefix_index: makes the prefix index; None caches no prefixes.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv_cache_config: KVCacheConfig,
        connector: KVConnector,
        prefix_index: PrefixIndexFactory | None = None,
    ) -> None:
        self.config = config.scheduler
        self.max_model_len = config.model.max_model_len
        self.kv_cache_config = kv_cache_config
        self.kv_cache_manager = KVCacheManager(kv_cache_config, prefix_index)
        self.connector = connector
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: RequestQueue = make_request_queue(self.config.policy)
        self._num_arrived = 0
        # Ended since the last step was handed out.
        self._finished_req_ids: set[str] = set()
        # Ended by the scheduler itself, not yet told to the front.
        self._ended: dict[str, EngineCoreOutput] = {}
        # Ended, but their blocks are kept until the connector has sent them.
        self._sending: dict[str, Request] = {}
        self._stats = SchedulerStats()

    # Requests come and go.

    def add_request(self, request: Request) -> None:
        """Queue a request. One that could never be served ends at once, with an error.

        Raises:
            ValueError: a live request has this id.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request id {request.request_id!r} is in use")
        request.sequence = self._num_arrived
        self._num_arrived += 1
        self.requests[request.request_id] = request
        try:
            # max_tokens may reach past the model's length: the output then ends there.
            check_admissible(
                request.num_prompt_tokens,
                None,
                self.max_model_len,
                self.kv_cache_config.num_usable_tokens,
            )
        except InvalidRequestError as error:
            self._end(request, RequestStatus.FINISHED_ERROR, error.message)
            return
        self.waiting.add(request)

    def finish_requests(self, request_ids: Iterable[str], status: RequestStatus) -> None:
        """End requests from outside, as an abort does; nothing is emitted. Ignores unknown ids."""
        assert status.is_finished
        for request_id in request_ids:
            self._ended.pop(request_id, None)
            request = self.requests.get(request_id)
            if request is None:
                continue
            if request.status == RequestStatus.RUNNING:
                self.running.remove(request)
            else:
                self.waiting.remove(request)
            request.status = status
            self._free_request(request)

    def has_unfinished_requests(self) -> bool:
        """True while a request waits or runs."""
        return bool(self.requests)

    def has_finished_requests(self) -> bool:
        """True while an ended request has not been told to the worker, or to the front."""
        return bool(self._finished_req_ids or self._ended)

    def make_stats(self) -> SchedulerStats:
        """The state now, and what was counted since the last call."""
        stats, self._stats = self._stats, SchedulerStats()
        stats.num_running_reqs = len(self.running)
        stats.num_waiting_reqs = len(self.waiting)
        stats.kv_cache_usage = self.kv_cache_manager.usage
        return stats

    # Planning a step.

    def schedule(self) -> SchedulerOutput:
        """Plan the next step. It may be empty, and may still have something to tell the worker."""
        step = StepBuilder(self.config.max_num_batched_tokens)
        self._schedule_running(step)
        if not step.preempted:
            # A step that had to take blocks away has none to give: what it admitted would be the
            # next victim.
            self._schedule_waiting(step)
        output = step.output(self._finished_req_ids, self.kv_cache_manager.take_block_copies())
        self._finished_req_ids = set()
        output.kv_connector_metadata = self.connector.build_connector_meta(output)
        self._update_after_schedule(output)
        return output

    def _schedule_running(self, step: StepBuilder) -> None:
        while step.cursor < len(self.running) and step.budget > 0:
            request = self.running[step.cursor]
            # Never past the model's length: the last token a request can have is never computed.
            num_new_tokens = min(
                self._limit_chunk(self._num_tokens_to_compute(request)),
                step.budget,
                self.max_model_len - 1 - request.num_computed_tokens,
            )
            if num_new_tokens <= 0:
                # Its next token is still being computed. Those behind it can go on.
                step.cursor += 1
                continue
            new_blocks = self._allocate_or_preempt(request, num_new_tokens, step)
            if new_blocks is None:
                continue  # it is no longer running, and the cursor stands at its successor
            step.add_running(request, num_new_tokens, _ids(new_blocks))
            step.cursor += 1

    def _num_tokens_to_compute(self, request: Request) -> int:
        return (
            len(request.token_ids)
            + len(request.spec_token_ids)
            + request.num_output_placeholders
            - request.num_computed_tokens
        )

    def _limit_chunk(self, num_tokens: int) -> int:
        threshold = self.config.long_prefill_token_threshold
        if threshold and num_tokens > threshold and self.config.enable_chunked_prefill:
            return threshold
        return num_tokens

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, step: StepBuilder
    ) -> GroupBlocks | None:
        """Room for a running request, at the cost of others if need be; None if it had to go.

        One that holds the whole pool and needs more goes too, and ends when it asks to come back.
        """
        while True:
            blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            if blocks is not None:
                return blocks
            victim = self._select_victim()
            self._preempt(victim, step)
            if victim is request:
                return None

    def _select_victim(self) -> Request:
        if self.config.policy == "priority":
            return max(self.running, key=lambda request: request.sort_key)
        return self.running[-1]

    def _preempt(self, victim: Request, step: StepBuilder) -> None:
        """Take all blocks from a running request; it will compute its tokens anew."""
        position = self.running.index(victim)
        del self.running[position]
        if position < step.cursor:
            step.cursor -= 1
        step.preempt(victim.request_id)
        self.kv_cache_manager.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.fork_of = None
        victim.spec_token_ids = []
        victim.num_preemptions += 1
        self._stats.num_preemptions += 1
        self.waiting.put_back([victim])

    def _schedule_waiting(self, step: StepBuilder) -> None:
        passed_over: list[Request] = []
        while self.waiting and step.budget > 0 and len(self.running) < self.config.max_num_seqs:
            request = self.waiting.peek()
            admission = self._try_admit(request, step)
            if admission is _Admission.NO_ROOM:
                break
            self.waiting.pop()
            if admission is _Admission.ADMITTED:
                self.running.append(request)
            elif admission is _Admission.LATER:
                passed_over.append(request)
        self.waiting.put_back(passed_over)

    def _try_admit(self, request: Request, step: StepBuilder) -> _Admission:
        if request.num_inflight_steps:
            # Preempted while a step was under way: the token it will give is not known yet.
            return _Admission.LATER
        if request.fork_of is not None:
            parent = self.requests.get(request.fork_of)
            if parent is not None and request.num_prompt_tokens > 1:
                if parent.num_computed_tokens < parent.num_prompt_tokens:
                    return _Admission.LATER  # the prompt is still being computed, or will be again
                if self.kv_cache_manager.can_fork(parent, request.num_prompt_tokens - 1):
                    return self._try_fork(request, parent, step)
            request.fork_of = None  # nobody to take it over from
        manager = self.kv_cache_manager
        hits, num_hit_tokens = manager.get_computed_blocks(request)
        num_external, loads_between_steps = self.connector.get_num_new_matched_tokens(
            request, num_hit_tokens
        )
        if num_external is None:
            return _Admission.LATER
        assert not loads_between_steps, "this scheduler knows only loads within a step"
        num_computed = num_hit_tokens + num_external
        num_new_tokens = self._limit_chunk(request.num_tokens - num_computed)
        if num_new_tokens > step.budget:
            if not self.config.enable_chunked_prefill:
                return _Admission.NO_ROOM
            num_new_tokens = step.budget
        blocks = manager.allocate_slots(
            request,
            num_new_tokens,
            num_computed,
            hits,
            must_fit_tokens=self._must_fit_tokens(request),
        )
        if blocks is None:
            if manager.fits_empty_pool(request.num_tokens):
                return _Admission.NO_ROOM
            self._end_outgrown(request)
            return _Admission.ENDED
        block_ids = manager.get_block_ids(request.request_id)
        self.connector.update_state_after_alloc(request, block_ids, num_external)
        self._admit(request, num_computed, num_hit_tokens)
        step.add_new(request, num_new_tokens, block_ids)
        return _Admission.ADMITTED

    def _try_fork(self, request: Request, parent: Request, step: StepBuilder) -> _Admission:
        """Let a sequence take over the prompt its sibling has computed, all but the last token.

        That token it computes itself, for the logits that its own first token is drawn from.
        """
        num_shared = request.num_prompt_tokens - 1
        if not self.kv_cache_manager.fork(parent, request, num_shared):
            return _Admission.NO_ROOM
        request.num_computed_tokens = num_shared
        if self.kv_cache_manager.allocate_slots(request, 1) is None:
            # There was no partly filled block to copy, so nothing is left to copy either.
            self.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            return _Admission.NO_ROOM
        request.fork_of = None
        request.num_cached_tokens = 0  # counted once, for the sibling that looked them up
        request.first_scheduled_time = time.monotonic()
        self._admit(request, num_shared, 0)
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        self.connector.update_state_after_alloc(request, block_ids, 0)
        step.add_new(request, 1, block_ids)
        return _Admission.ADMITTED

    def _must_fit_tokens(self, request: Request) -> int:
        """Tokens that must fit before a request is admitted, whatever its first chunk needs.

        All that are known: a prompt whose later chunks find no room would only be preempted. After
        three preemptions, all that it can ever have computed: it can then be preempted again only
        once another request has outgrown it, and comes back only once one has ended.
        """
        if request.num_preemptions >= MAX_EAGER_READMISSIONS:
            return request.max_num_tokens(self.max_model_len) - 1
        return request.num_tokens

    def _admit(self, request: Request, num_computed: int, num_hit_tokens: int) -> None:
        request.num_computed_tokens = num_computed
        request.status = RequestStatus.RUNNING
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_computed
            request.first_scheduled_time = time.monotonic()
            # Once a request: a lookup that led to nothing, or one after a preemption, is no query.
            skips = request.sampling_params.skip_reading_prefix_cache
            if self.kv_cache_manager.enable_caching and not skips:
                self._stats.prefix_cache_queries += request.num_tokens
                self._stats.prefix_cache_hits += num_hit_tokens

    def _update_after_schedule(self, output: SchedulerOutput) -> None:
        """Count the step's tokens as computed, so that the next can be planned without its results.

        The first hook of a scheduler that overlaps steps.
        """
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            request.num_computed_tokens += num_tokens
            request.num_inflight_steps += 1
        self._stats.num_scheduled_tokens += output.total_num_scheduled_tokens

    # Accounting for a step.

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Take in a step's results, in the order in which the steps were planned.

        Returns:
            One output a request that has new tokens or has ended.
        """
        outputs = list(self._ended.values())
        self._ended = {}
        if model_runner_output.kv_connector_output is not None:
            self._update_from_connector(model_runner_output)
        ended_running: set[str] = set()
        for request_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None:
                continue  # it ended while the step was under way
            request.num_inflight_steps -= 1
            was_running = request.status == RequestStatus.RUNNING
            output = self._update_request(request, scheduler_output, model_runner_output)
            if request.is_finished:
                if was_running:
                    ended_running.add(request_id)
                else:
                    self.waiting.remove(request)
                self._free_request(request)
            if output is not None:
                outputs.append(output)
        if ended_running:
            self.running = [r for r in self.running if r.request_id not in ended_running]
        return outputs

    def _update_request(
        self, request: Request, step: SchedulerOutput, results: ModelRunnerOutput
    ) -> EngineCoreOutput | None:
        request_id = request.request_id
        running = request.status == RequestStatus.RUNNING
        new_token_ids = results.sampled_token_ids.get(request_id, [])
        drafts = step.scheduled_spec_decode_tokens.get(request_id)
        if drafts and new_token_ids and running:
            # One token more than were accepted. What the others computed is written over.
            request.num_computed_tokens -= len(drafts) - (len(new_token_ids) - 1)
        if new_token_ids:
            new_token_ids = self._update_request_with_output(request, new_token_ids)
        if running:
            # A preempted request is told its token, but its blocks are gone. Drafts may have been
            # computed past the last known token; what they left is not final.
            self.kv_cache_manager.cache_blocks(
                request, min(request.num_computed_tokens, request.num_tokens)
            )
            if new_token_ids and not request.is_finished:
                # Drafts that follow a part of a prompt would stand where the rest belongs.
                request.spec_token_ids = results.draft_token_ids.get(request_id, [])
        if not new_token_ids:
            return None
        output = self._output(request, new_token_ids)
        logprobs = results.logprobs.get(request_id)
        if logprobs is not None:
            output.new_logprobs = logprobs[: len(new_token_ids)]
        return output

    def _update_request_with_output(self, request: Request, new_token_ids: list[int]) -> list[int]:
        """Append a step's tokens to a request and see whether they end it; returns those kept.

        The second hook of a scheduler that overlaps steps.
        """
        return request.append_output_tokens(new_token_ids, self.max_model_len)

    def _update_from_connector(self, results: ModelRunnerOutput) -> None:
        self.connector.update_connector_output(results.kv_connector_output)
        for request_id in results.kv_connector_output.finished_sending:
            request = self._sending.pop(request_id, None)
            if request is not None:
                self.kv_cache_manager.free(request)

    # Endings.

    def _end_outgrown(self, request: Request) -> None:
        """End a waiting request that the whole pool cannot hold, instead of blocking those behind.

        A pool that holds max_model_len tokens, which the engine insists on, never comes to this.
        """
        capacity = self.kv_cache_config.num_usable_tokens
        logger.warning("%s has outgrown the KV cache of %d tokens", request, capacity)
        if request.num_output_tokens:
            self._end(request, RequestStatus.FINISHED_LENGTH_CAPPED)
        else:
            message = f"{request.num_tokens} tokens do not fit the KV cache, which holds {capacity}"
            self._end(request, RequestStatus.FINISHED_ERROR, message)

    def _end(self, request: Request, status: RequestStatus, error: str | None = None) -> None:
        request.status = status
        request.error = error
        self._ended[request.request_id] = self._output(request, [])
        self._free_request(request)

    def _free_request(self, request: Request) -> None:
        block_ids = self.kv_cache_manager.get_block_ids(request.request_id)
        keep_blocks, _ = self.connector.request_finished(request, block_ids)
        if keep_blocks:
            self._sending[request.request_id] = request
        else:
            self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self._finished_req_ids.add(request.request_id)

    @staticmethod
    def _output(request: Request, new_token_ids: list[int]) -> EngineCoreOutput:
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=new_token_ids,
            finish_reason=request.status.finish_reason,
            stop_reason=request.stop_reason,
            num_cached_tokens=max(0, request.num_cached_tokens),
            num_preemptions=request.num_preemptions,
            first_scheduled_time=request.first_scheduled_time,
            error=request.error,
        )


def _ids(blocks: GroupBlocks) -> tuple[list[int], ...]:
    return tuple([[block.block_id for block in group] for group in blocks])
