"""The request bodies of the HTTP API, as pydantic models.

Only fields that are served are declared; all others land in `model_extra` and are judged by
`fields`. Values are strict: a number sent as a string is an error, not a number. Every field may be
null, which means the same as leaving it out. Ranges are checked by SamplingParams and the engine.
Names and meanings are OpenAI's and, for the extras, vLLM's.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from nanoserve.sampling_params import MAX_STOP_STRINGS

MAX_PROMPTS = 1024


class Body(BaseModel):
    """Base of every request body."""

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())

    model: str | None = Field(None, description="A served name; absent means the server's model.")


class StreamOptions(BaseModel):
    """`stream_options` of a streamed request."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(Body):
    """What chat and text completions share."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = Field(
        None, description=f"At most {MAX_STOP_STRINGS} strings that end the text."
    )
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: int | None = None
    cache_salt: str | None = Field(
        None, min_length=1, description="Only requests with the same salt share cached prefixes."
    )
    skip_reading_prefix_cache: bool | None = None
    request_id: str | None = Field(None, max_length=128, pattern=r"^[\w.:/-]+$")

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_is_text(cls, value: Any) -> Any:
        listed = isinstance(value, list) and all(isinstance(s, str) for s in value)
        if value is not None and not isinstance(value, str) and not listed:
            raise ValueError("must be a string or a list of strings")
        return value


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompt_is_text_or_ids(cls, value: Any) -> Any:
        return check_prompt(value)


class ChatMessage(BaseModel):
    """One turn of the conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _content_is_text_or_parts(cls, value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        if not isinstance(value, list) or not all(isinstance(part, dict) for part in value):
            raise ValueError("must be a string, a list of parts (objects with a type), or null")
        return value


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(
        None, description="Most tokens to generate; takes precedence over max_tokens."
    )
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(Body):
    """POST /tokenize: either `prompt` or `messages`."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: list[int]


def check_prompt(value: Any) -> Any:
    """Refuse a `prompt` that is none of its four forms, in one sentence rather than four."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise ValueError(
            "must be a non-empty string, list of strings, list of token ids, or list of lists of "
            "token ids"
        )
    if all(_is_id(item) for item in value):
        return value
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"at most {MAX_PROMPTS} prompts in one request")
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and all(_is_id(i) for i in item) for item in value):
        return value
    raise ValueError("the items must be all strings, all token ids, or all lists of token ids")


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
