"""From a request body to SamplingParams, and where a value comes from when the client sends none.

A field that is absent takes the model's own default from generation_config.json, as vLLM does with
`--generation-config auto`: the people who trained a model know at which temperature it speaks well.
With `--generation-config vllm` (vLLM's name for it) the defaults are neutral: temperature 1 and no
cuts.
"""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanoserve.errors import InvalidRequestError
from nanoserve.sampling_params import MAX_LOGPROBS, RequestOutputKind, SamplingParams
from nanoserve.server.protocol import ChatBody, CompletionBody, GenerationBody

logger = logging.getLogger("nanoserve.server")

COMPLETION_MAX_TOKENS = 16  # the OpenAI API's default for text completions


@dataclass(frozen=True)
class DefaultSampling:
    """Sampling values for fields that a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @classmethod
    def from_folder(cls, path: str) -> "DefaultSampling":
        """The defaults that a model folder's generation_config.json states.

        A model that states `do_sample: false` still answers with temperature 1 here: transformers
        writes that value into files whose authors never chose it.
        """
        file = Path(path) / "generation_config.json"
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except ValueError as error:
            logger.warning("ignored %s, which is not valid JSON: %s", file, error)
            return cls()
        penalty = config.get("repetition_penalty")
        if penalty not in (None, 1, 1.0):
            logger.warning(
                "the model asks for repetition_penalty %s, which is not supported: ignored", penalty
            )
        stated = {
            name: config[name]
            for name in ("temperature", "top_p", "top_k", "min_p")
            if config.get(name) is not None
        }
        try:
            SamplingParams(**stated)
        except InvalidRequestError as error:
            logger.warning("ignored the sampling defaults of %s: %s", file, error)
            return cls()
        return cls(**stated)


def completion_params(body: CompletionBody, defaults: DefaultSampling) -> SamplingParams:
    """The sampling parameters of a text completion.

    Raises:
        InvalidRequestError: a value is out of range, or echo and logprobs are asked for together.
    """
    if body.echo and body.logprobs is not None:
        raise InvalidRequestError(
            "echo with logprobs needs the log-probabilities of the prompt, which this server does "
            "not compute; leave out one of the two",
            "logprobs",
        )
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and body.echo:
        max_tokens = 1  # nothing will be generated; the other fields are still checked
    return _params(body, defaults, max_tokens, body.logprobs)


def chat_params(body: ChatBody, defaults: DefaultSampling) -> SamplingParams:
    """The sampling parameters of a chat completion.

    `max_completion_tokens` wins over `max_tokens`, its deprecated name; with neither, the answer
    may fill the model's context.
    """
    logprobs = None
    if body.logprobs:
        logprobs = body.top_logprobs or 0
        if not 0 <= logprobs <= MAX_LOGPROBS:
            raise InvalidRequestError(
                f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {logprobs}", "top_logprobs"
            )
    elif body.top_logprobs is not None:
        raise InvalidRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.max_completion_tokens is None:
        return _params(body, defaults, body.max_tokens, logprobs)
    try:
        return _params(body, defaults, body.max_completion_tokens, logprobs)
    except InvalidRequestError as error:
        raise name_the_limit(error, body) from None


def name_the_limit(error: InvalidRequestError, body: GenerationBody) -> InvalidRequestError:
    """Rename `max_tokens` in an error to the field that the client really sent."""
    sent = getattr(body, "max_completion_tokens", None)
    if error.param == "max_tokens" and sent is not None:
        message = error.message.replace("max_tokens", "max_completion_tokens")
        return InvalidRequestError(message, "max_completion_tokens", error.status, error.code)
    return error


def _params(
    body: GenerationBody, defaults: DefaultSampling, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    def sent(name: str, default: Any) -> Any:
        value = getattr(body, name)
        return default if value is None else value

    return SamplingParams(
        n=sent("n", 1),
        temperature=sent("temperature", defaults.temperature),
        top_p=sent("top_p", defaults.top_p),
        top_k=sent("top_k", defaults.top_k),
        min_p=sent("min_p", defaults.min_p),
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=sent("min_tokens", 0),
        stop=sent("stop", []),
        stop_token_ids=sent("stop_token_ids", []),
        ignore_eos=sent("ignore_eos", False),
        logprobs=logprobs,
        skip_special_tokens=sent("skip_special_tokens", True),
        include_stop_str_in_output=sent("include_stop_str_in_output", False),
        skip_reading_prefix_cache=sent("skip_reading_prefix_cache", False),
        output_kind=RequestOutputKind.DELTA if body.stream else RequestOutputKind.FINAL_ONLY,
    )
