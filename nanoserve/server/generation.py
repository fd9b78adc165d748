"""The engine requests behind one API request: one for each prompt, each with n completions."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from openai.types import CompletionUsage
from openai.types.completion_usage import PromptTokensDetails

from nanoserve.async_llm import AsyncLLM, RequestStream
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.sampling_params import SamplingParams


class Generation:
    """Requests admitted together; if one of them is refused, none runs.

    Args:
        engine: where they run.
        prompts: token ids, one list a prompt.
        params: the same for every prompt.
        request_id: the API request's id.
        priority: lower is served first under the priority policy.
        strict_length: refuse prompt + max_tokens past the model's length.
        prompt_only: nothing is to be generated; the engine, whose least is one token, checks the
            prompt, and that token is thrown away.

    Raises:
        InvalidRequestError, EngineDeadError: as AsyncLLM.add_request.
    """

    def __init__(
        self,
        engine: AsyncLLM,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        request_id: str,
        priority: int = 0,
        strict_length: bool = True,
        prompt_only: bool = False,
        cache_salt: str | None = None,
    ) -> None:
        self.prompts = prompts
        self._prompt_only = prompt_only
        self._n = params.n
        self._streams: list[RequestStream] = []
        self._completion_tokens: Counter[int] = Counter()
        self._cached_tokens: dict[int, int] = {}
        try:
            for number, prompt in enumerate(prompts):
                name = request_id if len(prompts) == 1 else f"{request_id}-{number}"
                stream = engine.add_request(
                    prompt,
                    params,
                    name,
                    priority=priority,
                    strict_length=strict_length,
                    cache_salt=cache_salt,
                )
                self._streams.append(stream)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Stop whatever still runs."""
        for stream in self._streams:
            stream.abort()

    def choice_index(self, prompt_number: int, completion: CompletionOutput) -> int:
        """Where a completion stands among the choices: prompt by prompt, n for each."""
        return prompt_number * self._n + completion.index

    async def final(self) -> list[RequestOutput]:
        """Every prompt's complete output, in order (the streams must be final-only ones)."""
        try:
            finals = []
            for number, stream in enumerate(self._streams):
                async for output in stream:
                    last = output
                self._count(number, last)
                finals.append(last)
            return finals
        finally:
            self.abort()

    async def deltas(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        """(prompt number, what is new) as it comes, from all prompts."""
        try:
            if len(self._streams) == 1:
                async for output in self._streams[0]:
                    self._count(0, output)
                    yield 0, output
                return
            async with aclosing(self._merged()) as merged:
                async for number, output in merged:
                    self._count(number, output)
                    yield number, output
        finally:
            self.abort()

    async def _merged(self) -> AsyncGenerator[tuple[int, RequestOutput], None]:
        # One step of every stream is awaited at a time, so that a slow reader lets the streams
        # merge their deltas instead of filling a queue here.
        iterators = [aiter(stream) for stream in self._streams]
        steps = {asyncio.ensure_future(_step(i)): n for n, i in enumerate(iterators)}
        try:
            while steps:
                done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=lambda t: steps[t]):
                    number = steps.pop(task)
                    output = task.result()
                    if output is not None:
                        steps[asyncio.ensure_future(_step(iterators[number]))] = number
                        yield number, output
        finally:
            for task in steps:
                task.cancel()

    def _count(self, number: int, output: RequestOutput) -> None:
        self._cached_tokens[number] = output.num_cached_tokens
        for completion in output.outputs:
            if self._prompt_only:
                completion.text, completion.token_ids, completion.logprobs = "", [], None
                completion.finish_reason, completion.stop_reason = "length", None
            index = self.choice_index(number, completion)
            self._completion_tokens[index] += len(completion.token_ids)

    def usage(self) -> CompletionUsage:
        """Tokens so far: every prompt once, and the sum of all choices."""
        prompt = sum(len(ids) for ids in self.prompts)
        completion = sum(self._completion_tokens.values())
        return CompletionUsage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(self._cached_tokens.values())
            ),
        )


async def _step(iterator: AsyncIterator[RequestOutput]) -> RequestOutput | None:
    return await anext(iterator, None)
