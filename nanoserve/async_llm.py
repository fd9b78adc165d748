"""`AsyncLLM`: many concurrent streams over one engine in a process of its own.

The front of the HTTP server. Requests are checked and tokenized here, computed in the engine's
process, and detokenized here again; each caller reads its own stream, and a slow reader delays no
one. It must not know HTTP.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from nanoserve.config.args import EngineArgs
from nanoserve.config.engine import EngineConfig
from nanoserve.engine.client import ProcessClient
from nanoserve.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from nanoserve.engine.messages import EngineCoreOutputs, EngineInfo, SchedulerStats
from nanoserve.engine.output_processor import OutputProcessor
from nanoserve.engine.stats import IterationStats
from nanoserve.errors import EngineDeadError
from nanoserve.outputs import CompletionOutput, RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.tokenizer.tokenizer import Tokenizer

Listener = Callable[[SchedulerStats | None, IterationStats], None]


class RequestStream:
    """One request's results, as they come: an async iterator of RequestOutput.

    If the reader is slow, what has piled up is handed out merged: deltas joined, cumulative outputs
    replaced by the newest. The iterator raises what ended the request, if an error did.

    Attributes:
        processed: the request as it was checked.
    """

    def __init__(self, processed: ProcessedRequest, abort: Callable[[], None]) -> None:
        self.processed = processed
        self._abort = abort
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._finished = False
        self._event = asyncio.Event()

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt's token ids."""
        return self.processed.prompt_token_ids

    def abort(self) -> None:
        """Stop the request and free what it holds; nothing happens if it has ended."""
        if not self._finished:
            self._abort()

    def put(self, item: RequestOutput | Exception) -> None:
        """Hand in the next result (the engine's side)."""
        if isinstance(item, Exception):
            self._error, self._finished = item, True
        else:
            delta = self.processed.params.output_kind is RequestOutputKind.DELTA
            if self._pending is not None and delta:
                _merge(self._pending, item)
            else:
                self._pending = item
            self._finished = item.finished
        self._event.set()

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            if self._pending is not None:
                output, self._pending = self._pending, None
                return output
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            self._event.clear()
            await self._event.wait()


def _merge(first: RequestOutput, then: RequestOutput) -> None:
    """Append the deltas of `then` to those of `first`."""
    by_index = {completion.index: completion for completion in first.outputs}
    for new in then.outputs:
        old = by_index.get(new.index)
        if old is None:
            first.outputs.append(new)
        else:
            _append(old, new)
    first.finished = then.finished
    first.num_cached_tokens = then.num_cached_tokens


def _append(old: CompletionOutput, new: CompletionOutput) -> None:
    old.text += new.text
    old.token_ids = old.token_ids + new.token_ids
    if old.logprobs is not None and new.logprobs is not None:
        old.logprobs = old.logprobs + new.logprobs
    old.cumulative_logprob = new.cumulative_logprob
    old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason


class AsyncLLM:
    """An engine in its own process, for use inside an event loop.

    Args:
        config: the engine's configuration.
        progress: called with a line at each stage of loading (from another thread).

    The process starts loading at once; `await start()` before the first request.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.tokenizer = Tokenizer.from_folder(config.model.tokenizer_path)
        config.model.tokenizer_size = self.tokenizer.size
        self.stats = SchedulerStats()
        self._output_processor = OutputProcessor(self.tokenizer)
        self._listeners: list[Listener] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: EngineDeadError | None = None
        self._info: EngineInfo | None = None
        self._input_processor: InputProcessor | None = None
        self._client = ProcessClient(
            config,
            on_outputs=lambda outputs: self._in_loop(self._on_outputs, outputs),
            on_death=lambda error: self._in_loop(self._on_death, error),
            on_progress=progress,
        )

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "AsyncLLM":
        """From the flat list of settings."""
        return cls(args.create_engine_config())

    async def start(self) -> None:
        """Wait until the engine is ready.

        Raises:
            ModelLoadError, ConfigError: the engine's reason for not starting.
            EngineDeadError: its process ended while loading.
        """
        self._loop = asyncio.get_running_loop()
        self._info = await asyncio.wrap_future(self._client.ready)
        self._input_processor = InputProcessor(self.config, self.tokenizer, self._info)

    @property
    def info(self) -> EngineInfo:
        """What the engine says of itself; RuntimeError before `start`."""
        if self._info is None:
            raise RuntimeError("the engine has not been started: await start() first")
        return self._info

    @property
    def engine_pid(self) -> int:
        """Process id of the engine."""
        return self._client.pid

    @property
    def is_dead(self) -> bool:
        """True once the engine's process has ended."""
        return self._dead is not None

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine is gone."""
        if self._dead is not None:
            raise self._dead

    def add_listener(self, listener: Listener) -> None:
        """Call listener(scheduler stats or None, iteration stats) after every step and abort."""
        self._listeners.append(listener)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
        strict_length: bool = False,
        cache_salt: str | None = None,
    ) -> RequestStream:
        """Check a request and send it to the engine.

        Args:
            prompt: text, token ids, or a mapping with one of them.
            params: its output_kind says what the stream hands out.
            request_id: the caller's name for it; need not be unique.
            priority: lower is served first under the priority policy.
            strict_length: refuse prompt + max_tokens past the model's length.
            cache_salt: only requests with the same salt share cached prefixes.

        Raises:
            InvalidRequestError: it cannot be served.
            EngineDeadError: the engine is gone.
        """
        if self._dead is not None:
            raise self._dead
        if self._input_processor is None:
            raise RuntimeError("the engine has not been started: await start() first")
        processed = self._input_processor.process(
            prompt, params, request_id, priority, strict_length, cache_salt
        )
        ids = [sequence.request_id for sequence in processed.sequences]
        stream = RequestStream(processed, lambda: self._abort(ids))
        self._output_processor.add(processed, stream.put)
        try:
            for sequence in processed.sequences:
                self._client.add_request(sequence)
        except BaseException:
            # What could not be packed must not be waited for either.
            stream.abort()
            raise
        return stream

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """Stream a request's outputs; leaving the loop early aborts the request."""
        stream = self.add_request(prompt, params, request_id, priority)
        try:
            async for output in stream:
                yield output
        finally:
            stream.abort()

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing changed, while requests hold blocks."""
        await self.check_health()
        return await asyncio.wrap_future(self._client.reset_prefix_cache())

    def shutdown(self) -> None:
        """End the engine's process; whoever still waits gets EngineDeadError."""
        if self._dead is None:
            self._dead = EngineDeadError("the engine has been shut down")
        self._output_processor.fail_all(self._dead)
        self._client.shutdown()

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _in_loop(self, function: Callable[..., None], *args: object) -> None:
        """From the reader thread into the event loop."""
        loop = self._loop
        if loop is None:
            if isinstance(args[0], EngineDeadError):
                self._dead = args[0]
            return
        try:
            loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    def _on_outputs(self, outputs: EngineCoreOutputs) -> None:
        to_abort, iteration = self._output_processor.process(outputs)
        if to_abort:
            self._client.abort_requests(to_abort)
        if outputs.scheduler_stats is not None:
            self.stats = outputs.scheduler_stats
        self._tell(outputs.scheduler_stats, iteration)

    def _on_death(self, error: EngineDeadError) -> None:
        self._dead = error
        self._output_processor.fail_all(error)

    def _abort(self, internal_ids: list[str]) -> None:
        live, iteration = self._output_processor.abort(internal_ids)
        if live and self._dead is None:
            self._client.abort_requests(live)
        self._tell(None, iteration)

    def _tell(self, stats: SchedulerStats | None, iteration: IterationStats) -> None:
        for listener in self._listeners:
            listener(stats, iteration)
