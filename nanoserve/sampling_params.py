"""What a caller may ask of one request: how tokens are chosen and when to stop.

Plain data, checked once, when it is made. Names and defaults are those of vLLM's SamplingParams.
It must not know the vocabulary or the model: limits that depend on them are checked at admission.
"""

from dataclasses import dataclass, field, replace
from enum import IntEnum

from nanoserve.errors import InvalidRequestError

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
SAMPLING_EPS = 1e-5  # a temperature below this is greedy, as in vLLM


class RequestOutputKind(IntEnum):
    """How results are handed out: all so far, only what is new, or once at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """Sampling and stopping settings of one request.

    Attributes:
        n: number of completions; each is a sequence of its own, with seed `seed + index`.
        temperature: divides the logits; below 1e-5 the choice is greedy.
        top_p: keep the smallest set of tokens whose probability reaches this; 1 is off.
        top_k: keep the k likeliest tokens; 0 or -1 is off.
        min_p: drop tokens less likely than this share of the likeliest; 0 is off.
        seed: makes the draws reproducible, whatever else is in the batch; None draws one.
        max_tokens: most tokens to generate; None means up to the model's length.
        min_tokens: no end token and no stop is taken before this many tokens.
        stop: strings that end the text (cut off from it unless include_stop_str_in_output).
        stop_token_ids: token ids that end the sequence.
        ignore_eos: go on past the model's end-of-sequence token.
        logprobs: number of likeliest tokens to report per position (of the raw distribution,
            before temperature and masks), beside the chosen one; None reports nothing.
        detokenize: produce text; without it only token ids come back and `stop` is refused.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string at the end of the text.
        output_kind: cumulative, delta or final-only results.
        skip_reading_prefix_cache: compute the whole prompt, whatever is cached of it.

    Raises:
        InvalidRequestError: for a value out of range, with the field's name as `param`.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    skip_reading_prefix_cache: bool = False

    def __post_init__(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        self.stop_token_ids = list(self.stop_token_ids or [])
        self._verify()

    @property
    def greedy(self) -> bool:
        """True when the next token is simply the likeliest one."""
        return self.temperature < SAMPLING_EPS

    def child(self, index: int) -> "SamplingParams":
        """The settings of completion `index` of this request: one sequence, seed + index."""
        seed = None if self.seed is None else self.seed + index
        return replace(
            self, n=1, seed=seed, stop=list(self.stop), stop_token_ids=list(self.stop_token_ids)
        )

    def _verify(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, 0.0, float("inf"))
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, -1, 2**31 - 1)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            # A 64-bit integer, and the last completion's seed + index one too.
            _integer("seed", self.seed, -(2**63), 2**63 - self.n)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})",
                "min_tokens",
            )
        if not isinstance(self.stop, list) or not all(isinstance(s, str) for s in self.stop):
            raise InvalidRequestError("stop must be a string or a list of strings", "stop")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"at most {MAX_STOP_STRINGS} stop strings", "stop")
        if any(s == "" for s in self.stop):
            raise InvalidRequestError("a stop string must not be empty", "stop")
        if any("\ud800" <= char <= "\udfff" for s in self.stop for char in s):
            # No text can hold it, and no process border lets it through.
            raise InvalidRequestError("a stop string holds half of a surrogate pair", "stop")
        if self.stop and not self.detokenize:
            raise InvalidRequestError("stop strings need detokenize=True", "stop")
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, not {value!r}", name)
    if not low <= value <= high:
        raise InvalidRequestError(f"{name} must be between {low} and {high}, not {value}", name)


def _number(name: str, value: object, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidRequestError(f"{name} must be a number, not {value!r}", name)
    # Written so that NaN fails too.
    if not (
        (low < value if low_open else low <= value) and value <= high and value != float("inf")
    ):
        bounds = f"{'above' if low_open else 'at least'} {low:g}"
        bounds += "" if high == float("inf") else f" and at most {high:g}"
        raise InvalidRequestError(f"{name} must be finite, {bounds}; not {value}", name)
