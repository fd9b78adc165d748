"""Chat messages as clients send them, made into what chat templates can render.

Templates were written for plain turns: a role and a string. So text parts are joined, a null
content becomes an empty string (never the word None), `developer` becomes `system` where a template
does not know it, and tool calls are spelled out as text where a template would drop them.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from nanoserve.errors import InvalidRequestError
from nanoserve.server.fields import note_unknown_field
from nanoserve.server.protocol import ChatMessage
from nanoserve.tokenizer.tokenizer import RESERVED_TEMPLATE_ARGUMENTS

# Parts of a content list that carry text, and the key they carry it under.
_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_HARMLESS_MESSAGE_FIELDS = frozenset({"annotations", "audio", "function_call", "refusal"})

# What a template call sets itself; a client that could set these could replace the template or the
# conversation under it.
_RESERVED_KWARGS = RESERVED_TEMPLATE_ARGUMENTS | {
    "add_generation_prompt",
    "add_special_tokens",
    "continue_final_message",
    "documents",
    "messages",
    "tools",
}


def template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The client's `chat_template_kwargs`, refused if one reaches past the template's variables.

    Raises:
        InvalidRequestError: for a reserved name, with it in `param`.
    """
    for name in kwargs or {}:
        if name in _RESERVED_KWARGS or name.startswith("_"):
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {name!r}", f"chat_template_kwargs.{name}"
            )
    return dict(kwargs or {})


def template_messages(messages: Sequence[ChatMessage], template: str) -> list[dict[str, Any]]:
    """Messages ready for a chat template.

    Args:
        messages: the conversation as the client sent it.
        template: the template's source, to see which fields and roles it knows.

    Raises:
        InvalidRequestError: a content part that is not text; `param` names the part.
    """
    rendered = []
    for index, message in enumerate(messages):
        for name in message.model_extra or {}:
            if name not in _HARMLESS_MESSAGE_FIELDS:
                note_unknown_field(name, "messages.")
        role = message.role
        if role == "developer" and "developer" not in template:
            role = "system"
        turn: dict[str, Any] = {"role": role, "content": _text(message.content, index)}
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            calls = [_tool_call(call, index) for call in message.tool_calls]
            if "tool_calls" in template:
                turn["tool_calls"] = calls
            else:
                turn["content"] += _spelled_out(calls, after=turn["content"])
        rendered.append(turn)
    return rendered


def _text(content: str | list[dict[str, Any]] | None, index: int) -> str:
    """A content as one string; parts are joined with a newline between them, as vLLM joins them."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content):
        where = f"messages.{index}.content.{number}"
        kind = part.get("type", "text" if "text" in part else None)
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise InvalidRequestError(
                f"{where}: content parts of type {kind!r} are not supported; only text is", where
            )
        text = part.get(_TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where}: a {kind} part needs its text as a string", where)
        texts.append(text)
    return "\n".join(texts)


def _tool_call(call: dict[str, Any], index: int) -> dict[str, Any]:
    """A tool call with its arguments as an object, which is what templates expect."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        where = f"messages.{index}.tool_calls"
        raise InvalidRequestError(f"{where}: a tool call needs a function with a name", where)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What a model once wrote need not be JSON; then the template gets to see it as it is.
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments) if arguments else {}
    return {
        **call,
        "type": "function",
        "function": {**function, "arguments": {} if arguments is None else arguments},
    }


def _spelled_out(calls: list[dict[str, Any]], after: str) -> str:
    """Tool calls in the Hermes notation that most small models were taught."""
    blocks = [
        "<tool_call>\n"
        + json.dumps(
            {"name": c["function"]["name"], "arguments": c["function"]["arguments"]},
            ensure_ascii=False,
        )
        + "\n</tool_call>"
        for c in calls
    ]
    return ("\n" if after else "") + "\n".join(blocks)
