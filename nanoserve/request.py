"""One sequence while the engine works on it: its tokens, how far they are computed, how it stands.

The scheduler owns requests and changes them; the worker never sees one. There is no prefill and no
decode here: a request has known tokens, some of them computed, and is done when it says so. This
module must not know blocks or batches.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from nanoserve.engine.messages import EngineCoreRequest, FinishReason
from nanoserve.errors import InvalidRequestError
from nanoserve.sampling_params import SamplingParams


class RequestStatus(IntEnum):
    """Where a request stands. Every status from FINISHED_STOPPED on is final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH_CAPPED = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        """True when nothing more will come."""
        return self >= RequestStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> FinishReason | None:
        """What the client is told; None while the request goes on."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


class MediaItem(NamedTuple):
    """An image or the like: all such items have the same placeholder tokens in the prompt.

    Attributes:
        identifier: names its contents, as a hash of them does.
        offset: position of its first placeholder token.
        length: how many there are.
    """

    identifier: str
    offset: int
    length: int


class Request:
    """One sequence.

    Attributes:
        request_id: unique inside the engine.
        sampling_params: how its tokens are chosen and when it ends.
        seed: seeds its draws; always set.
        eos_token_ids: the model's end-of-sequence tokens.
        arrival_time: seconds of time.monotonic().
        priority: lower is served first under the priority policy.
        sequence: its place in the order of arrival at the scheduler, which sets it; it breaks ties.
        token_ids: every known token, prompt and output. Drafts are not among them.
        num_prompt_tokens: how many of them are the prompt.
        num_computed_tokens: tokens whose KV is in the cache once every step handed out is done. It
            runs ahead of the worker, and goes back when drafts are rejected.
        spec_token_ids: draft tokens proposed for the next step.
        num_output_placeholders: tokens that steps still under way will give and a scheduler counts
            in advance; always 0 when a step is planned only after the last one's results are in.
        num_inflight_steps: steps handed out whose results are not in yet.
        num_cached_tokens: tokens found in a cache when it was first admitted; -1 before that.
        num_preemptions: how often it has lost its blocks.
        first_scheduled_time: when it was first admitted, seconds of time.monotonic().
        stop_reason: the stop token id that ended it, if one did.
        error: why it failed, in a sentence for the client, when its status is FINISHED_ERROR.
        extra_keys: what all its KV depends on besides its tokens, and who may share it.
        media: what stands behind the placeholder tokens of its prompt.
        fork_of: id of the request whose prompt it takes over once that is computed; None when it
            computes its own.
        block_hashes: hashes of its full blocks, kept by the prefix index.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "eos_token_ids",
        "error",
        "extra_keys",
        "first_scheduled_time",
        "fork_of",
        "media",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_inflight_steps",
        "num_output_placeholders",
        "num_preemptions",
        "num_prompt_tokens",
        "priority",
        "request_id",
        "sampling_params",
        "seed",
        "sequence",
        "spec_token_ids",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        seed: int = 0,
        eos_token_ids: list[int] | None = None,
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        fork_of: str | None = None,
        lora_name: str | None = None,
        media: Sequence[MediaItem] = (),
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.seed = seed
        self.eos_token_ids = list(eos_token_ids or [])
        self.arrival_time = arrival_time
        self.priority = priority
        self.sequence = 0
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.spec_token_ids: list[int] = []
        self.num_output_placeholders = 0
        self.num_inflight_steps = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.first_scheduled_time: float | None = None
        self.stop_reason: int | None = None
        self.error: str | None = None
        keys = (("lora", lora_name), ("salt", cache_salt))
        self.extra_keys = tuple(f"{kind}:{key}" for kind, key in keys if key is not None)
        self.media = tuple(media)
        self.fork_of = fork_of
        self.block_hashes: list[bytes] = []

    @classmethod
    def from_engine_core_request(cls, request: EngineCoreRequest) -> "Request":
        """The scheduler's view of what the front has sent."""
        return cls(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            seed=request.seed,
            eos_token_ids=request.eos_token_ids,
            arrival_time=request.arrival_time,
            priority=request.priority,
            cache_salt=request.cache_salt,
            fork_of=request.fork_of,
        )

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.status.name}, computed "
            f"{self.num_computed_tokens}/{self.num_tokens}, prompt {self.num_prompt_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The tokens generated so far (a copy)."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """True when nothing more will come."""
        return self.status.is_finished

    @property
    def sort_key(self) -> tuple[int, float, int]:
        """Order under the priority policy: the smallest is served first and preempted last."""
        return self.priority, self.arrival_time, self.sequence

    def max_num_tokens(self, max_model_len: int) -> int:
        """Tokens it has when it ends by length, the last of which is never computed."""
        max_tokens = self.sampling_params.max_tokens
        if max_tokens is None:
            return max_model_len
        return min(max_model_len, self.num_prompt_tokens + max_tokens)

    def append_output_tokens(self, new_token_ids: list[int], max_model_len: int) -> list[int]:
        """Append tokens one by one until one of them ends the request.

        Returns:
            The tokens kept: a step that verifies drafts may give tokens past the end.
        """
        for kept, token_id in enumerate(new_token_ids, start=1):
            self.token_ids.append(token_id)
            if self._check_stop(token_id, max_model_len):
                return new_token_ids[:kept]
        return new_token_ids

    def _check_stop(self, token_id: int, max_model_len: int) -> bool:
        """Whether the newest token ends the request; sets status and stop_reason if so.

        In this order: end of sequence, stop token ids, max_tokens, the model's length. min_tokens
        holds back the first two only. Stop strings are found where text is, by the front, which
        then aborts the request.
        """
        params = self.sampling_params
        num_output = self.num_output_tokens
        if num_output >= params.min_tokens:
            if not params.ignore_eos and token_id in self.eos_token_ids:
                self.status = RequestStatus.FINISHED_STOPPED
                return True
            if token_id in params.stop_token_ids:
                self.status = RequestStatus.FINISHED_STOPPED
                self.stop_reason = token_id
                return True
        if self.num_tokens >= self.max_num_tokens(max_model_len):
            self.status = RequestStatus.FINISHED_LENGTH_CAPPED
            return True
        return False


def check_admissible(
    num_prompt_tokens: int,
    max_tokens: int | None,
    max_model_len: int,
    num_usable_tokens: int,
) -> None:
    """Refuse a request that could never be served, before it waits for ever and blocks the rest.

    Args:
        num_prompt_tokens: tokens of its prompt.
        max_tokens: most tokens it may generate; None means as many as there is room for.
        max_model_len: most tokens of prompt and output together.
        num_usable_tokens: tokens that fit the KV cache when one sequence has it all.

    Raises:
        InvalidRequestError: says which limit, and both counts.
    """
    if num_prompt_tokens < 1:
        raise InvalidRequestError("the prompt is empty: it must have at least one token", "prompt")
    prompt = f"the prompt has {num_prompt_tokens} tokens"
    if num_prompt_tokens >= max_model_len:
        raise _too_long(
            f"{prompt}, but this model's maximum context length is {max_model_len} tokens and at "
            "least one must be left for the output",
            "prompt",
        )
    if num_prompt_tokens > num_usable_tokens:
        raise _too_long(f"{prompt}, but the KV cache holds {num_usable_tokens}", "prompt")
    if max_tokens is None:
        return
    total = num_prompt_tokens + max_tokens
    asked = (
        f"{total} were asked for: {num_prompt_tokens} in the prompt and {max_tokens} in the output"
    )
    if total > max_model_len:
        raise _too_long(
            f"this model's maximum context length is {max_model_len} tokens, but {asked}",
            "max_tokens",
        )
    # The last token is never computed, so it takes no slot.
    if total - 1 > num_usable_tokens:
        raise _too_long(f"the KV cache holds {num_usable_tokens} tokens, but {asked}", "max_tokens")


def _too_long(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param, code="context_length_exceeded")
