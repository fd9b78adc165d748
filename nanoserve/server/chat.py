"""POST /v1/chat/completions: a conversation in, the assistant's next turn out."""

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob
from starlette.responses import Response

from nanoserve.errors import InvalidRequestError
from nanoserve.outputs import CompletionOutput
from nanoserve.server.generation import Generation
from nanoserve.server.lifecycle import CLIENT_GONE, ClientGoneError, finish
from nanoserve.server.logprobs import chat_logprobs
from nanoserve.server.protocol import ChatBody
from nanoserve.server.sampling import chat_params, name_the_limit
from nanoserve.server.sse import EventStream
from nanoserve.server.state import request_name, server_state
from nanoserve.server.usage import StreamUsage
from nanoserve.tokenizer.tokenizer import Tokenizer

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatBody, request: Request) -> Response:
    """Answer a conversation."""
    server = server_state(request)
    model = server.check(body)
    params = chat_params(body, server.defaults)
    prompt = await server.prompts.chat(
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        add_special_tokens=bool(body.add_special_tokens),
        kwargs=body.chat_template_kwargs,
        continue_final_message=bool(body.continue_final_message),
    )
    head: dict[str, Any] = {
        "id": f"chatcmpl-{request_name(request, body)}",
        "created": int(time.time()),
        "model": model,
    }
    try:
        generation = Generation(
            server.engine,
            [prompt],
            params,
            head["id"],
            body.priority or 0,
            cache_salt=body.cache_salt,
        )
    except InvalidRequestError as error:
        raise _for_chat(error, body) from None
    tokenizer = server.engine.tokenizer
    if body.stream:
        events = _events(body, generation, head, params.n, tokenizer)
        return EventStream(events, generation.abort, server.stopping)
    try:
        [output] = await finish(generation.final(), request.receive, server.stopping)
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    answer = ChatCompletion(
        **head,
        object="chat.completion",
        choices=[_choice(body, completion, tokenizer) for completion in output.outputs],
        usage=generation.usage(),
        **_prompt_ids(body, prompt),
    )
    return Response(answer.model_dump_json(), media_type="application/json")


def _for_chat(error: InvalidRequestError, body: ChatBody) -> InvalidRequestError:
    """The engine's complaint in the words of a chat body."""
    if error.param == "prompt":
        return InvalidRequestError(error.message, "messages", error.status, error.code)
    return name_the_limit(error, body)


def _extras(body: ChatBody, completion: CompletionOutput) -> dict[str, Any]:
    """The fields of a choice that vLLM adds to OpenAI's."""
    extras: dict[str, Any] = {"stop_reason": completion.stop_reason}
    if body.return_token_ids:
        extras["token_ids"] = completion.token_ids
    return extras


def _prompt_ids(body: ChatBody, prompt: list[int]) -> dict[str, Any]:
    return {"prompt_token_ids": prompt} if body.return_token_ids else {}


def _logprobs(
    body: ChatBody, completion: CompletionOutput, tokenizer: Tokenizer
) -> list[ChatCompletionTokenLogprob] | None:
    if not body.logprobs or completion.logprobs is None:
        return None
    top = body.top_logprobs or 0
    return chat_logprobs(completion.logprobs, completion.token_ids, top, tokenizer)


def _choice(body: ChatBody, completion: CompletionOutput, tokenizer: Tokenizer) -> Choice:
    entries = _logprobs(body, completion, tokenizer)
    return Choice(
        index=completion.index,
        message=ChatCompletionMessage(role="assistant", content=completion.text),
        logprobs=None if entries is None else ChoiceLogprobs(content=entries),
        finish_reason=completion.finish_reason,  # type: ignore[arg-type]
        **_extras(body, completion),
    )


async def _events(
    body: ChatBody, generation: Generation, head: dict[str, Any], n: int, tokenizer: Tokenizer
) -> AsyncGenerator[str, None]:
    """The chunks of a streamed answer, as JSON: the roles, then what comes, then the usage."""
    head = {**head, "object": "chat.completion.chunk"}
    usage = StreamUsage(body.stream_options, generation)
    opened = False
    async for _, output in generation.deltas():
        if not opened:
            opened = True
            extras = _prompt_ids(body, output.prompt_token_ids)
            for index in range(n):
                delta = ChoiceDelta(role="assistant", content="")
                choice = ChunkChoice(index=index, delta=delta, finish_reason=None, logprobs=None)
                chunk = ChatCompletionChunk(**head, choices=[choice], **usage.fields(), **extras)
                yield chunk.model_dump_json(exclude_unset=True)
        for completion in output.outputs:
            silent = not completion.text and completion.finish_reason is None
            if silent and completion.logprobs is None and not body.return_token_ids:
                continue  # the text of these tokens is still held back
            entries = _logprobs(body, completion, tokenizer)
            choice = ChunkChoice(
                index=completion.index,
                delta=ChoiceDelta(content=completion.text),
                finish_reason=completion.finish_reason,  # type: ignore[arg-type]
                logprobs=None if entries is None else ChunkLogprobs(content=entries),
                **_extras(body, completion),
            )
            chunk = ChatCompletionChunk(**head, choices=[choice], **usage.fields())
            yield chunk.model_dump_json(exclude_unset=True)
    if usage.wanted:
        last = ChatCompletionChunk(**head, choices=[], usage=generation.usage())
        yield last.model_dump_json(exclude_unset=True)
