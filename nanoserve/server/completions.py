"""POST /v1/completions: text in, text out, with no chat template between."""

import time
from collections.abc import AsyncGenerator
from typing import Any, Literal

from fastapi import APIRouter, Request
from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs
from starlette.responses import Response

from nanoserve.outputs import CompletionOutput
from nanoserve.server.generation import Generation
from nanoserve.server.lifecycle import CLIENT_GONE, ClientGoneError, finish
from nanoserve.server.logprobs import completion_logprobs
from nanoserve.server.protocol import CompletionBody
from nanoserve.server.sampling import completion_params
from nanoserve.server.sse import EventStream
from nanoserve.server.state import ServerState, request_name, server_state
from nanoserve.server.usage import StreamUsage

router = APIRouter()


class StreamedChoice(CompletionChoice):
    """A choice whose finish_reason is null until its last chunk."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]


class StreamedCompletion(Completion):
    """One chunk of a streamed completion."""

    choices: list[StreamedChoice]  # type: ignore[assignment]


class _Writer:
    """Builds the responses to one request."""

    def __init__(self, body: CompletionBody, server: ServerState, model: str, name: str) -> None:
        self._body = body
        self._server = server
        self.head: dict[str, Any] = {
            "id": f"cmpl-{name}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, int] = {}

    def echoed(self, number: int, prompts: list[list[int]]) -> str:
        """A prompt's text as it goes in front of its completions."""
        if not self._body.echo:
            return ""
        prompt = self._body.prompt
        if isinstance(prompt, str):
            return prompt
        if isinstance(prompt[0], str):
            return str(prompt[number])
        skip = self._body.skip_special_tokens is not False
        return self._server.engine.tokenizer.decode(prompts[number], skip_special_tokens=skip)

    def logprobs(self, index: int, completion: CompletionOutput) -> Logprobs | None:
        if self._body.logprobs is None or completion.logprobs is None:
            return None
        offset = self._offsets.get(index, 0)
        lists, self._offsets[index] = completion_logprobs(
            completion.logprobs, completion.token_ids, offset
        )
        return lists

    def extras(self, completion: CompletionOutput, prompt_ids: list[int] | None) -> dict[str, Any]:
        """The fields of a choice that vLLM adds to OpenAI's."""
        extras: dict[str, Any] = {"stop_reason": completion.stop_reason}
        if self._body.return_token_ids:
            extras["token_ids"] = completion.token_ids
            if prompt_ids is not None:
                extras["prompt_token_ids"] = prompt_ids
        return extras


@router.post("/v1/completions")
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Complete one or more prompts."""
    server = server_state(request)
    model = server.check(body)
    params = completion_params(body, server.defaults)
    prompts = await _prompts(body, server)
    writer = _Writer(body, server, model, request_name(request, body))
    generation = Generation(
        server.engine,
        prompts,
        params,
        writer.head["id"],
        body.priority or 0,
        cache_salt=body.cache_salt,
        # The API's default of 16 tokens gives way to what fits; a number the client sent does not.
        strict_length=body.max_tokens is not None,
        prompt_only=body.max_tokens == 0,
    )
    if body.stream:
        events = _events(body, prompts, generation, writer)
        return EventStream(events, generation.abort, server.stopping)
    try:
        outputs = await finish(generation.final(), request.receive, server.stopping)
    except ClientGoneError:
        return Response(status_code=CLIENT_GONE)
    choices = [
        CompletionChoice(
            index=generation.choice_index(number, completion),
            text=writer.echoed(number, prompts) + completion.text,
            logprobs=writer.logprobs(generation.choice_index(number, completion), completion),
            finish_reason=completion.finish_reason,  # type: ignore[arg-type]
            **writer.extras(completion, prompts[number]),
        )
        for number, output in enumerate(outputs)
        for completion in output.outputs
    ]
    answer = Completion(**writer.head, choices=choices, usage=generation.usage())
    return Response(answer.model_dump_json(), media_type="application/json")


async def _prompts(body: CompletionBody, server: ServerState) -> list[list[int]]:
    """Token ids of every prompt of the request."""
    prompt = body.prompt
    special = body.add_special_tokens is not False
    if isinstance(prompt, str):
        return [await server.prompts.text(prompt, special)]
    prompts: list[list[int]] = []
    for item in prompt:
        if isinstance(item, int):
            return [list(prompt)]  # type: ignore[arg-type]
        prompts.append(await server.prompts.text(item, special) if isinstance(item, str) else item)
    return prompts


async def _events(
    body: CompletionBody, prompts: list[list[int]], generation: Generation, writer: _Writer
) -> AsyncGenerator[str, None]:
    """The chunks of a streamed completion, as JSON."""
    usage = StreamUsage(body.stream_options, generation)
    started: set[int] = set()
    async for number, output in generation.deltas():
        for completion in output.outputs:
            index = generation.choice_index(number, completion)
            first = index not in started
            started.add(index)
            text = completion.text
            if first:
                text = writer.echoed(number, prompts) + text
            silent = not text and completion.finish_reason is None
            if silent and completion.logprobs is None and not body.return_token_ids:
                continue  # the text of these tokens is still held back
            choice = StreamedChoice(
                index=index,
                text=text,
                logprobs=writer.logprobs(index, completion),
                finish_reason=completion.finish_reason,  # type: ignore[arg-type]
                **writer.extras(completion, prompts[number] if first else None),
            )
            chunk = StreamedCompletion(**writer.head, choices=[choice], **usage.fields())
            yield chunk.model_dump_json(exclude_unset=True)
    if usage.wanted:
        last = StreamedCompletion(**writer.head, choices=[], usage=generation.usage())
        yield last.model_dump_json(exclude_unset=True)
