"""The door between scheduler and worker: what a step computes, and what came of it.

Plain data only, no tensors and no references to live requests: it can cross a process border, and
neither side can change the other's state through it.
"""

from dataclasses import dataclass, field
from typing import Any

from nanoserve.sampling_params import SamplingParams


@dataclass
class NewRequestData:
    """A request the worker has no row for: never seen, or dropped when it was preempted.

    Attributes:
        token_ids: every known token (prompt and, after a preemption, output).
        num_prompt_tokens: how many of them are the prompt.
        block_ids: the request's blocks, one list a KV cache group.
        num_computed_tokens: tokens whose KV is in those blocks already.
        seed: the request's seed, always set (drawn at admission when the caller gave none).
        eos_token_ids: the model's end-of-sequence tokens, which min_tokens holds back.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    seed: int
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    eos_token_ids: list[int] = field(default_factory=list)


@dataclass
class CachedRequestData:
    """A request the worker has a row for: only what changed.

    `new_block_ids` are to be appended, one list a KV cache group.
    """

    request_id: str
    new_block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class SchedulerOutput:
    """One step.

    Attributes:
        scheduled_new_reqs, scheduled_cached_reqs: the step's requests; the batch's row order is
            the order of `num_scheduled_tokens`.
        num_scheduled_tokens: request id -> tokens to compute in this step.
        scheduled_spec_decode_tokens: request id -> draft tokens among them.
        finished_req_ids: ended since the last step: their rows are to be freed.
        preempted_req_ids: lost their blocks in this step: their rows are to be freed too.
        block_copies: (source, destination) block ids to copy before the step, in order.
        kv_connector_metadata: the KV connector's word to its worker side.
    """

    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_cached_reqs: list[CachedRequestData] = field(default_factory=list)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    block_copies: list[tuple[int, int]] = field(default_factory=list)
    kv_connector_metadata: Any = None

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens in the step."""
        return sum(self.num_scheduled_tokens.values())


@dataclass
class TokenLogprobs:
    """Log-probabilities (raw distribution) at one position.

    `token_ids[0]` is the chosen token; the likeliest ones follow, likeliest first.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


@dataclass
class ModelRunnerOutput:
    """What a step gave.

    Attributes:
        sampled_token_ids: request id -> new tokens; empty for a prompt that is not complete yet.
        logprobs: request id -> one entry a new token, for requests that asked.
        draft_token_ids: request id -> tokens proposed for the next step.
        kv_connector_output: the connector worker side's answer.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    draft_token_ids: dict[str, list[int]] = field(default_factory=dict)
    kv_connector_output: Any = None
