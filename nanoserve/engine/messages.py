"""The door between the front (LLM, AsyncLLM, the server) and the engine core.

Plain dataclasses; msgspec packs them when the core lives in a process of its own.
"""

from dataclasses import dataclass, field
from enum import IntEnum

from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler_output import TokenLogprobs


class FinishReason(IntEnum):
    """Why a sequence ended; `str()` gives the API's word."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass
class EngineCoreRequest:
    """One sequence to generate (a request with n completions sends n of these).

    Attributes:
        request_id: unique inside the engine, whatever the caller named the request.
        seed: always set.
        eos_token_ids: the model's end-of-sequence tokens.
        arrival_time: seconds of time.monotonic().
        priority: lower is served first under the priority policy.
        cache_salt: only requests with the same salt share cached prefixes.
        fork_of: the sequence of the same request whose prompt this one shares, if there is one.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    eos_token_ids: list[int]
    arrival_time: float
    priority: int = 0
    cache_salt: str | None = None
    fork_of: str | None = None


@dataclass
class EngineCoreOutput:
    """What one step gave one sequence.

    `error` is set with finish_reason ERROR: a sentence for the client.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_scheduled_time: float | None = None
    error: str | None = None


@dataclass
class SchedulerStats:
    """The engine's state after a step, and what the step added to the counters."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    num_scheduled_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclass
class EngineCoreOutputs:
    """Everything one step says to the front."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0


@dataclass
class EngineInfo:
    """What the front must know of an engine that is ready.

    Attributes:
        num_blocks, block_size: of the KV cache.
        num_usable_tokens: tokens that fit the cache.
        vocab_size: rows of the output layer.
        device, dtype: what the engine resolved "auto" to.
        source_path, source_hash: the package the engine's process runs.
    """

    num_blocks: int
    block_size: int
    num_usable_tokens: int
    vocab_size: int
    device: str
    dtype: str
    source_path: str
    source_hash: str
