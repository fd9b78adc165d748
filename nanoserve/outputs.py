"""What comes back for a request. Plain data, with vLLM's names.

`RequestOutput` is what `LLM.generate` returns and `AsyncLLM.generate` yields; one
`CompletionOutput` for each of the request's n completions.
"""

from dataclasses import dataclass, field


@dataclass
class Logprob:
    """Log-probability (natural log, raw distribution) of one token at one position.

    `rank` is 1 for the likeliest token of the vocabulary.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


# One position: token id -> Logprob, the chosen token always included.
LogprobsAtPosition = dict[int, Logprob]


@dataclass
class CompletionOutput:
    """One completion.

    Attributes:
        index: which of the request's n completions this is.
        text, token_ids: what was generated (all of it, or only what is new, by output_kind).
        cumulative_logprob: sum of the chosen tokens' log-probabilities, when logprobs were asked.
        logprobs: one dict a generated token, when asked.
        finish_reason: None while running, else "stop", "length" or "abort".
        stop_reason: the stop string or stop token id that ended it; None for end-of-sequence.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[LogprobsAtPosition] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """True once this completion has ended."""
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request, seconds of time.monotonic()."""

    arrival_time: float = 0.0
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0


@dataclass
class RequestOutput:
    """All that is known of one request.

    Attributes:
        request_id: the caller's id.
        prompt: the prompt's text, None if it came as token ids.
        prompt_token_ids: the prompt's token ids.
        outputs: one entry a completion (in a stream, only those that have something new).
        finished: True once every completion has ended.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
