"""Who answers in `nanoserve chat`: a server over HTTP, or an engine started for it."""

import logging
import sys
from collections.abc import AsyncGenerator
from typing import Any, Protocol

from nanoserve.config.engine import EngineConfig

Messages = list[dict[str, str]]
DEFAULT_URL = "http://127.0.0.1:8000/v1"
PROBE_SECONDS = 1.0


class ChatError(RuntimeError):
    """A turn that could not be answered; the message is for the person at the terminal."""


class ChatBackend(Protocol):
    """Answers conversations.

    Attributes:
        name: of the model.
        tokens: generated in the last answer.
    """

    name: str
    tokens: int

    def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """The next turn, piece by piece; closing the generator stops the model."""

    async def close(self) -> None:
        """Free everything."""


class ServerBackend:
    """A server of the OpenAI API.

    Args:
        url: its base, ending in /v1.
        api_key: sent as it is; None sends a placeholder.
        sampling: fields of the request body.
    """

    def __init__(self, url: str, api_key: str | None, sampling: dict[str, Any]) -> None:
        from openai import AsyncOpenAI

        self._client = AsyncOpenAI(base_url=url, api_key=api_key or "none", max_retries=0)
        standard = {"max_tokens", "temperature", "top_p", "seed"}
        self._sampling = {k: v for k, v in sampling.items() if k in standard}
        self._extra = {k: v for k, v in sampling.items() if k not in standard}
        self.name = ""
        self.tokens = 0

    async def connect(self) -> None:
        """Ask for the served model. Raises ChatError if nobody answers."""
        from openai import OpenAIError

        try:
            models = await self._client.with_options(timeout=PROBE_SECONDS).models.list()
        except OpenAIError as error:
            raise ChatError(f"no server answers at {self._client.base_url}: {error}") from error
        self.name = models.data[0].id

    async def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """The next turn, piece by piece; closing the generator closes the connection."""
        from openai import OpenAIError

        self.tokens = 0
        turns: list[Any] = list(messages)
        try:
            stream = await self._client.chat.completions.create(
                model=self.name,
                messages=turns,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=self._extra,
                **self._sampling,
            )
            async with stream:
                async for chunk in stream:
                    if chunk.usage is not None:
                        self.tokens = chunk.usage.completion_tokens
                    if chunk.choices and chunk.choices[0].delta.content:
                        yield chunk.choices[0].delta.content
        except OpenAIError as error:
            raise ChatError(str(error)) from error

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()


class EngineBackend:
    """An engine of our own, in a process beside this one.

    Args:
        config: the engine's configuration.
        sampling: SamplingParams fields.
    """

    def __init__(self, config: EngineConfig, sampling: dict[str, Any]) -> None:
        from nanoserve.async_llm import AsyncLLM
        from nanoserve.sampling_params import RequestOutputKind, SamplingParams

        logger = logging.getLogger("nanoserve")
        self._engine = AsyncLLM(config, progress=lambda line: logger.debug("%s", line))
        self._params = SamplingParams(
            **{"max_tokens": None, **sampling}, output_kind=RequestOutputKind.DELTA
        )
        self.name = config.model.served_model_name[0]
        self.tokens = 0

    async def start(self) -> None:
        """Wait for the engine. Raises ModelLoadError or ConfigError."""
        try:
            await self._engine.start()
        except BaseException:
            self._engine.shutdown()
            raise

    async def answer(self, messages: Messages) -> AsyncGenerator[str, None]:
        """The next turn, piece by piece; closing the generator aborts the request."""
        from nanoserve.engine.output_processor import RequestFailedError
        from nanoserve.errors import InvalidRequestError

        self.tokens = 0
        try:
            prompt = self._engine.tokenizer.encode_chat(messages)
            stream = self._engine.add_request(prompt, self._params)
            try:
                async for output in stream:
                    self.tokens += len(output.outputs[0].token_ids)
                    yield output.outputs[0].text
            finally:
                stream.abort()
        except (InvalidRequestError, RequestFailedError) as error:
            raise ChatError(str(error)) from error

    async def close(self) -> None:
        """End the engine's process."""
        self._engine.shutdown()


async def find_backend(
    url: str | None,
    api_key: str | None,
    config: Any,
    sampling: dict[str, Any],
    prefer_engine: bool,
) -> ChatBackend:
    """A server if one was named or answers at the usual place, else an engine.

    Args:
        url: the server that was asked for; it must answer.
        api_key: the server's.
        config: called for the EngineConfig when an engine is needed.
        sampling: SamplingParams fields.
        prefer_engine: a model was named, so no server is looked for.

    Raises:
        ChatError: the server named does not answer.
        ModelLoadError, ConfigError: the engine cannot start.
    """
    if url is not None or not prefer_engine:
        server = ServerBackend(url or DEFAULT_URL, api_key, sampling)
        try:
            await server.connect()
            return server
        except ChatError:
            await server.close()
            if url is not None:
                raise
    print("no server found: starting an engine here ...", file=sys.stderr)
    engine = EngineBackend(config(), sampling)
    await engine.start()
    return engine
