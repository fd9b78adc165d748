"""The way in: a prompt and its parameters, checked once, become sequences for the engine core.

Everything that one request could send to harm another is refused here, with the field's name: token
ids past the vocabulary, empty or over-long prompts, limits that cannot be met. What leaves this
module is safe for the engine. It must not know HTTP.
"""

import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanoserve.config.engine import EngineConfig
from nanoserve.engine.messages import EngineCoreRequest, EngineInfo
from nanoserve.errors import InvalidRequestError
from nanoserve.request import check_admissible
from nanoserve.sampling_params import SamplingParams
from nanoserve.tokenizer.tokenizer import Tokenizer

# A prompt as callers may give it: text, token ids, or {"prompt": ...} / {"prompt_token_ids": ...},
# either with "cache_salt".
Prompt = str | Sequence[int] | Mapping[str, Any]


@dataclass
class ProcessedRequest:
    """One checked request: what the front remembers of it, and the sequences the core gets."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float
    sequences: list[EngineCoreRequest]


class InputProcessor:
    """Checks and tokenizes requests for one engine.

    Args:
        config: the engine's configuration.
        tokenizer: the model's tokenizer.
        info: what the engine says of itself. A token id at or past its vocab_size is refused, and
            so is a prompt that its cache could never hold.
    """

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = config.model.max_model_len
        self._num_usable_tokens = info.num_usable_tokens
        self._vocab_size = info.vocab_size
        self._random = random.Random(config.model.seed)
        eos = set(config.model.arch.eos_token_ids)
        if tokenizer.eos_token_id is not None:
            eos.add(tokenizer.eos_token_id)
        self.eos_token_ids = sorted(eos)

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        strict_length: bool = False,
        cache_salt: str | None = None,
    ) -> ProcessedRequest:
        """Check a request and split it into its n sequences.

        Args:
            prompt: text, token ids, or a mapping with `prompt` or `prompt_token_ids`.
            params: sampling parameters; max_tokens None becomes all the room that is left.
            request_id: the caller's name for it; need not be unique.
            priority: lower is served first under the priority policy.
            strict_length: refuse a prompt + max_tokens past the model's length, as the HTTP API
                does; otherwise the output simply ends there.
            cache_salt: only requests with the same salt share cached prefixes; a mapping's own
                `cache_salt` comes first.

        Raises:
            InvalidRequestError: for anything that cannot be served.
        """
        text, token_ids = self._tokens(prompt)
        salt = _checked_salt(prompt, cache_salt)
        self._check_tokens(token_ids)
        params = self._limit(params, len(token_ids), strict_length)
        for token_id in params.stop_token_ids:
            if token_id >= self._vocab_size:
                raise InvalidRequestError(
                    f"stop_token_ids has {token_id}, which is not in the vocabulary "
                    f"(0 to {self._vocab_size - 1})",
                    "stop_token_ids",
                )
        if params.seed is None:
            # Every sequence draws from a seed of its own, so that no draw depends on the batch.
            seed = self._random.getrandbits(62)
        else:
            seed = params.seed
        external = request_id if request_id is not None else uuid.uuid4().hex
        # The caller's id may be used twice at once; the engine's must not be.
        internal = f"{external}-{uuid.uuid4().hex[:12]}"
        arrival = time.monotonic()
        sequences = [
            EngineCoreRequest(
                request_id=f"{internal}-{index}",
                prompt_token_ids=token_ids,
                sampling_params=params.child(index) if params.n > 1 else params,
                seed=seed + index,
                eos_token_ids=self.eos_token_ids,
                arrival_time=arrival,
                priority=priority,
                cache_salt=salt,
                fork_of=f"{internal}-0" if index else None,
            )
            for index in range(params.n)
        ]
        return ProcessedRequest(external, text, token_ids, params, arrival, sequences)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), self._ids(prompt["prompt_token_ids"])
            if "prompt" in prompt:
                return self._tokens(prompt["prompt"])
            raise InvalidRequestError(
                "a prompt given as a mapping needs 'prompt' or 'prompt_token_ids'", "prompt"
            )
        if isinstance(prompt, str):
            return prompt, self._tokenizer.encode(prompt)
        return None, self._ids(prompt)

    @staticmethod
    def _ids(token_ids: Any) -> list[int]:
        if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
            raise InvalidRequestError("prompt must be text or a list of token ids", "prompt")
        ids = list(token_ids)
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int):
                raise InvalidRequestError(
                    f"prompt has {token_id!r} where a token id was expected", "prompt"
                )
        return ids

    def _check_tokens(self, token_ids: list[int]) -> None:
        bad = next((t for t in token_ids if not 0 <= t < self._vocab_size), None)
        if bad is not None:
            raise InvalidRequestError(
                f"token id {bad} is not in the vocabulary (0 to {self._vocab_size - 1})", "prompt"
            )

    def _limit(self, params: SamplingParams, prompt_len: int, strict: bool) -> SamplingParams:
        check_admissible(
            prompt_len,
            params.max_tokens if strict else None,
            self._max_model_len,
            self._num_usable_tokens,
        )
        room = self._max_model_len - prompt_len
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        return replace(params, max_tokens=limit)


def _checked_salt(prompt: Prompt, default: str | None) -> str | None:
    salt = prompt.get("cache_salt", default) if isinstance(prompt, Mapping) else default
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise InvalidRequestError("cache_salt must be a text that is not empty", "cache_salt")
    return salt
