"""Beam search: the likeliest continuations, found by keeping several open at once.

Each step extends every beam by one token through the engine's ordinary path and keeps the best. The
beams of a prompt share all but their last tokens, so with prefix caching a step computes one block
a beam at most. Names are those of vLLM's `LLM.beam_search`; scores are transformers', over the
continuation alone. This module must not know how the engine runs a request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nanoserve.engine.input_processor import Prompt
from nanoserve.errors import InvalidRequestError
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import MAX_LOGPROBS, SamplingParams
from nanoserve.tokenizer.tokenizer import Tokenizer

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""Each beam offers its 2 * width likeliest tokens, so that ends of sequence leave enough others."""


@dataclass
class BeamSearchParams:
    """What to search for.

    Attributes:
        beam_width: beams kept at each step, and sequences returned.
        max_tokens: longest continuation.
        ignore_eos: treat an end of sequence as any other token.
        length_penalty: a sequence's score is its log-probability over its length to this power.
        include_stop_str_in_output: keep the end-of-sequence token in the result.

    Raises:
        InvalidRequestError: for a value out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_BEAM_WIDTH), ("max_tokens", 2**31 - 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise InvalidRequestError(
                    f"{name} must be an integer between 1 and {most}, not {value!r}", name
                )


@dataclass
class BeamSearchSequence:
    """One continuation.

    Attributes:
        tokens: the prompt's token ids, then the continuation's.
        cum_logprob: sum of the continuation's log-probabilities, its end of sequence included.
        text: the continuation.
        finish_reason: "stop" at an end of sequence, "length" at max_tokens.
        ended: 1 if the last step was an end of sequence.
    """

    tokens: list[int]
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: str | None = None
    ended: int = 0


@dataclass
class BeamSearchOutput:
    """A prompt's continuations, best first."""

    sequences: list[BeamSearchSequence]


@dataclass
class _Search:
    prompt_length: int
    beams: list[BeamSearchSequence]
    completed: list[BeamSearchSequence] = field(default_factory=list)


class Generator(Protocol):
    """What a search needs of an `LLM`."""

    tokenizer: Tokenizer

    def generate(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams
    ) -> list[RequestOutput]:
        """One finished output a prompt."""
        ...

    def prompt_token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids; InvalidRequestError if it cannot be served."""
        ...

    @property
    def eos_token_ids(self) -> list[int]:
        """The ids that end a sequence."""
        ...

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and continuation together."""
        ...


def beam_search(
    llm: Generator, prompts: Sequence[Prompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Search every prompt's continuations, all prompts side by side.

    Returns:
        One output a prompt, each with at most `beam_width` sequences, best first.
    """
    searches = []
    for prompt in prompts:
        ids = llm.prompt_token_ids(prompt)
        searches.append(_Search(len(ids), [BeamSearchSequence(ids)]))
    step = SamplingParams(
        temperature=0.0,
        max_tokens=1,
        logprobs=2 * params.beam_width,
        ignore_eos=True,
        detokenize=False,
    )
    ends = set() if params.ignore_eos else set(llm.eos_token_ids)
    for _ in range(params.max_tokens):
        growing = [s for s in searches if s.beams and len(s.beams[0].tokens) < llm.max_model_len]
        if not growing:
            break
        beams = [(search, beam) for search in growing for beam in search.beams]
        outputs = llm.generate([beam.tokens for _, beam in beams], step)
        candidates: dict[int, list[BeamSearchSequence]] = {id(search): [] for search in growing}
        for (search, beam), output in zip(beams, outputs, strict=True):
            candidates[id(search)] += _extend(search, beam, output, ends, params)
        for search in growing:
            found = sorted(candidates[id(search)], key=_score(search, params), reverse=True)
            search.beams = found[: params.beam_width]
    return [_finish(llm, search, params) for search in searches]


def _extend(
    search: _Search,
    beam: BeamSearchSequence,
    output: RequestOutput,
    ends: set[int],
    params: BeamSearchParams,
) -> list[BeamSearchSequence]:
    """A beam's continuations by one token; those that end go to the search's completed ones."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    going_on = []
    for token, entry in logprobs[0].items():
        total = beam.cum_logprob + entry.logprob
        if token in ends:
            kept = [token] if params.include_stop_str_in_output else []
            tokens = beam.tokens + kept
            ended = 1 - len(kept)
            done = BeamSearchSequence(tokens, total, finish_reason="stop", ended=ended)
            search.completed.append(done)
        else:
            going_on.append(BeamSearchSequence([*beam.tokens, token], total))
    return going_on


def _score(search: _Search, params: BeamSearchParams) -> Callable[[BeamSearchSequence], float]:
    def score(sequence: BeamSearchSequence) -> float:
        # The end of sequence counts as a token, whether it is kept or not.
        length = len(sequence.tokens) - search.prompt_length + sequence.ended
        return sequence.cum_logprob / max(1, length) ** params.length_penalty

    return score


def _finish(llm: Generator, search: _Search, params: BeamSearchParams) -> BeamSearchOutput:
    for beam in search.beams:
        beam.finish_reason = "length"
    found = sorted(search.completed + search.beams, key=_score(search, params), reverse=True)
    best = found[: params.beam_width]
    for sequence in best:
        sequence.text = llm.tokenizer.decode(sequence.tokens[search.prompt_length :])
    return BeamSearchOutput(best)
