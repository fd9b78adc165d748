"""What is counted of a step and of a request, as seen by the front.

Times are seconds of time.monotonic(); durations are seconds.
"""

from dataclasses import dataclass, field


@dataclass
class FinishedRequestStats:
    """One request (all its completions) that has ended.

    Attributes:
        finish_reasons: one for each completion: "stop", "length", "abort" or "error".
        e2e_latency: from arrival to the last token.
        queued_time: from arrival to the first step it was part of.
        prefill_time: from that step to the first token.
        decode_time: from the first token to the last.
        max_tokens: what the caller asked for, if it did.
    """

    request_id: str
    finish_reasons: list[str]
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    e2e_latency: float
    queued_time: float
    prefill_time: float
    decode_time: float
    n: int
    max_tokens: int | None

    @property
    def inference_time(self) -> float:
        """From the first step to the last token."""
        return self.prefill_time + self.decode_time


@dataclass
class IterationStats:
    """One step's news.

    Attributes:
        num_prompt_tokens: prompt tokens of the requests that gave their first token.
        num_generation_tokens: tokens generated, of all completions.
        time_to_first_tokens: one a request that gave its first token.
        inter_token_latencies: one a sequence that went on.
        finished_requests: requests that ended.
    """

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    time_to_first_tokens: list[float] = field(default_factory=list)
    inter_token_latencies: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
