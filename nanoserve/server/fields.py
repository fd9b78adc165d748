"""Request fields beyond those that are served: which are harmless, and which must be refused.

The rule: a field that would change the answer and that the engine cannot honour is refused by name,
unless it is sent with its neutral value, because an answer that silently ignores it is wrong with a
200. A field that changes nothing about the text (bookkeeping, billing, speed) is accepted. A field
nobody knows is ignored, as the reference API's clients expect, and named once in the log.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from nanoserve.errors import InvalidRequestError

logger = logging.getLogger("nanoserve.server")

# Accepted and without effect here: none of them changes the text that is generated.
HARMLESS = frozenset(
    {
        "guided_decoding_backend",
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "session_id",
        "store",
        "user",
    }
)


def _is(*neutral: Any) -> Callable[[Any], bool]:
    # 1 == True in Python, so types are compared too; 0 and 0.0 are the same number.
    def check(value: Any) -> bool:
        return any(
            value == n and isinstance(value, bool) == isinstance(n, bool) for n in (None, *neutral)
        )

    return check


# name -> is this value neutral (as if the field were absent)?
UNSUPPORTED: dict[str, Callable[[Any], bool]] = {
    "allowed_token_ids": _is([]),
    "audio": _is(),
    "bad_words": _is([]),
    "chat_template": _is(),
    "documents": _is([]),
    "frequency_penalty": _is(0),
    "function_call": _is("none"),
    "functions": _is([]),
    "guided_choice": _is(),
    "guided_grammar": _is(),
    "guided_json": _is(),
    "guided_regex": _is(),
    "guided_whitespace_pattern": _is(),
    "kv_transfer_params": _is(),
    "length_penalty": _is(1),
    "logit_bias": _is({}),
    "logits_processors": _is([]),
    "logprob_token_ids": _is([]),
    "mm_processor_kwargs": _is({}),
    "modalities": _is([], ["text"]),
    "presence_penalty": _is(0),
    "prompt_embeds": _is(),
    "prompt_logprobs": _is(),
    "reasoning_effort": _is(),
    "repetition_detection": _is(),
    "repetition_penalty": _is(1),
    "response_format": _is({"type": "text"}),
    "return_tokens_as_token_ids": _is(False),
    "spaces_between_special_tokens": _is(True),
    "structured_outputs": _is(),
    "suffix": _is(""),
    "thinking_token_budget": _is(),
    "tool_choice": _is("none", "auto"),
    "truncate_prompt_tokens": _is(),
    "use_beam_search": _is(False),
    "verbosity": _is("medium"),
    "vllm_xargs": _is({}),
    "web_search_options": _is(),
}

_MAX_LOGGED_NAMES = 256
_logged: set[str] = set()


def check_extra_fields(extra: Mapping[str, Any], n: int | None) -> None:
    """Go through the fields of a request body that its model does not declare.

    Args:
        extra: name -> value of each such field.
        n: the number of completions asked for (`best_of` may repeat it).

    Raises:
        InvalidRequestError: for a field that would change the answer; `param` is its name.
    """
    if extra.get("tools") and extra.get("tool_choice") != "none":
        raise InvalidRequestError(
            "tools are not supported by this server (tool_choice 'none' is)", "tools"
        )
    for name, value in extra.items():
        if name in HARMLESS or name == "tools":
            continue
        if name == "best_of":
            if value is not None and value != (n or 1):
                raise InvalidRequestError("best_of is supported only where it equals n", "best_of")
        elif name in UNSUPPORTED:
            if not UNSUPPORTED[name](value):
                raise InvalidRequestError(f"{name} is not supported by this server", name)
        else:
            note_unknown_field(name)


def note_unknown_field(name: str, where: str = "") -> None:
    """Log a field that is ignored: once a name, and only so many names."""
    key = f"{where}{name}"[:80]
    if key in _logged or len(_logged) >= _MAX_LOGGED_NAMES:
        return
    _logged.add(key)
    logger.warning("ignored the unknown request field %r (said once)", key)
