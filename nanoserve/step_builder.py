"""A step while it is being planned: what has been given to whom, and what is left of the budget.

The scheduler fills it and then has it written out as a `SchedulerOutput`. It keeps the books and
decides nothing: it must not know policies, blocks or the queue.
"""

from dataclasses import dataclass, field

from nanoserve.request import Request
from nanoserve.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass
class StepBuilder:
    """One step in the making.

    Attributes:
        budget: tokens that may still be handed out.
        cursor: position among the running requests of the one being served; it moves down when a
            request before it is preempted.
        new, cached: what the worker is told of each request, by id.
        num_scheduled_tokens: request id -> tokens to compute, in batch order.
        drafts: request id -> draft tokens among them.
        preempted: requests that lose their blocks in this step.
    """

    budget: int
    cursor: int = 0
    new: dict[str, NewRequestData] = field(default_factory=dict)
    cached: dict[str, CachedRequestData] = field(default_factory=dict)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    preempted: set[str] = field(default_factory=set)

    def add_running(
        self, request: Request, num_tokens: int, new_block_ids: tuple[list[int], ...]
    ) -> None:
        """A request that the worker has a row for computes num_tokens tokens, drafts among them."""
        request_id = request.request_id
        self.budget -= num_tokens
        self.num_scheduled_tokens[request_id] = num_tokens
        self.cached[request_id] = CachedRequestData(
            request_id, new_block_ids, request.num_computed_tokens
        )
        if request.spec_token_ids:
            num_drafts = request.num_computed_tokens + num_tokens - request.num_tokens
            if num_drafts > 0:
                self.drafts[request_id] = request.spec_token_ids[:num_drafts]
            # They were proposed for this step: what did not fit is not kept for another.
            request.spec_token_ids = []

    def add_new(self, request: Request, num_tokens: int, block_ids: tuple[list[int], ...]) -> None:
        """A request that the worker has no row for computes num_tokens tokens."""
        self.budget -= num_tokens
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.new[request.request_id] = NewRequestData(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.sampling_params,
            seed=request.seed,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            eos_token_ids=request.eos_token_ids,
        )

    def preempt(self, request_id: str) -> None:
        """A running request loses its blocks; if it was served already, its tokens come back."""
        self.budget += self.num_scheduled_tokens.pop(request_id, 0)
        self.cached.pop(request_id, None)
        self.drafts.pop(request_id, None)
        self.preempted.add(request_id)

    def output(
        self, finished_req_ids: set[str], block_copies: list[tuple[int, int]]
    ) -> SchedulerOutput:
        """The step as the worker is to see it."""
        return SchedulerOutput(
            scheduled_new_reqs=list(self.new.values()),
            scheduled_cached_reqs=list(self.cached.values()),
            num_scheduled_tokens=self.num_scheduled_tokens,
            scheduled_spec_decode_tokens=self.drafts,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=self.preempted,
            block_copies=block_copies,
        )
