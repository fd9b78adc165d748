"""`LLM`: the engine in the caller's own process, for scripts and notebooks.

Takes prompts, returns finished outputs in the same order. It runs under a running event loop too,
and gives its memory back when it is closed.
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from nanoserve.beam_search import BeamSearchOutput, BeamSearchParams, beam_search
from nanoserve.config.args import EngineArgs
from nanoserve.engine.core import EngineCore
from nanoserve.engine.input_processor import InputProcessor, ProcessedRequest, Prompt
from nanoserve.engine.output_processor import OutputProcessor, RequestFailedError
from nanoserve.errors import InvalidRequestError
from nanoserve.outputs import RequestOutput
from nanoserve.sampling_params import RequestOutputKind, SamplingParams
from nanoserve.tokenizer.tokenizer import Tokenizer

Conversation = Sequence[Mapping[str, Any]]


class LLM:
    """An engine to call.

    Args:
        model: Hub id or folder; None is the embedded model.
        progress: called with a line at each stage of loading.
        engine_args: any field of EngineArgs.

    Raises:
        ModelLoadError, ConfigError: when the model or the settings cannot be used.
    """

    def __init__(
        self,
        model: str | None = None,
        *,
        progress: Callable[[str], None] | None = None,
        **engine_args: Any,
    ) -> None:
        self.config = EngineArgs.from_dict({"model": model, **engine_args}).create_engine_config()
        self.tokenizer = Tokenizer.from_folder(self.config.model.tokenizer_path)
        self.config.model.tokenizer_size = self.tokenizer.size
        self._core: EngineCore | None = EngineCore(self.config, progress)
        self.info = self._core.info
        self._input_processor = InputProcessor(self.config, self.tokenizer, self.info)
        self._output_processor = OutputProcessor(self.tokenizer)

    @property
    def core(self) -> EngineCore:
        """The engine core; RuntimeError once closed."""
        if self._core is None:
            raise RuntimeError("this LLM has been closed")
        return self._core

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt.

        Args:
            prompts: one prompt or a list of them: text, token ids, or mappings with
                `prompt` or `prompt_token_ids`.
            sampling_params: one for all, or one a prompt; None is SamplingParams().
            use_tqdm: show a progress bar.

        Returns:
            One finished output a prompt, in the order given.

        Raises:
            InvalidRequestError: a prompt or parameter cannot be served; nothing has run then.
        """
        items = _prompt_list(prompts)
        params = _params_list(sampling_params, len(items))
        processed = []
        for index, (prompt, param) in enumerate(zip(items, params, strict=True)):
            try:
                processed.append(self._input_processor.process(prompt, param))
            except InvalidRequestError as error:
                if len(items) > 1:
                    raise InvalidRequestError(
                        f"prompt {index}: {error.message}", error.param, error.status, error.code
                    ) from error
                raise
        return self._run(processed, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of a list of them, through the chat template.

        Args:
            messages: a list of {"role", "content"}, or a list of such lists.
            sampling_params: as for `generate`.
            use_tqdm: show a progress bar.
            add_generation_prompt: end the prompt with the header of the assistant's turn.
            template_kwargs: handed to the chat template.
        """
        conversations: Sequence[Any] = (
            [messages] if messages and isinstance(messages[0], Mapping) else messages
        )
        prompts: list[Prompt] = []
        for conversation in conversations:
            text = self.tokenizer.render_chat(
                list(conversation), add_generation_prompt=add_generation_prompt, **template_kwargs
            )
            ids = self.tokenizer.encode_chat(
                list(conversation), add_generation_prompt=add_generation_prompt, **template_kwargs
            )
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of every prompt; see `nanoserve.beam_search`."""
        return beam_search(self, _prompt_list(prompts), params)

    def prompt_token_ids(self, prompt: Prompt) -> list[int]:
        """A prompt's token ids.

        Raises:
            InvalidRequestError: it cannot be served.
        """
        checked = self._input_processor.process(prompt, SamplingParams(max_tokens=1))
        return list(checked.prompt_token_ids)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing changed, while requests hold blocks."""
        return self.core.reset_prefix_cache()

    @property
    def eos_token_ids(self) -> list[int]:
        """The ids that end a sequence."""
        return self._input_processor.eos_token_ids

    @property
    def max_model_len(self) -> int:
        """Most tokens of prompt and continuation together."""
        return self.config.model.max_model_len

    def close(self) -> None:
        """Free the model and the cache. May be called more than once."""
        if self._core is not None:
            self._core.shutdown()
            self._core = None
            gc.collect()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, requests: list[ProcessedRequest], use_tqdm: bool) -> list[RequestOutput]:
        results: list[RequestOutput | None] = [None] * len(requests)
        failures: list[Exception] = []
        bar = _progress_bar(len(requests)) if use_tqdm else None

        def sink_for(index: int) -> Callable[[RequestOutput | Exception], None]:
            def sink(item: RequestOutput | Exception) -> None:
                if isinstance(item, Exception):
                    failures.append(item)
                else:
                    results[index] = item
                if bar is not None:
                    bar.update(1)

            return sink

        ids: list[str] = []
        try:
            for index, request in enumerate(requests):
                # Only the finished output is wanted, whatever the caller's params say of streams.
                request.params.output_kind = RequestOutputKind.FINAL_ONLY
                self._output_processor.add(request, sink_for(index))
                for sequence in request.sequences:
                    ids.append(sequence.request_id)
                    self.core.add_request(sequence)
            while self._output_processor.num_unfinished:
                to_abort, _ = self._output_processor.process(self.core.step())
                if to_abort:
                    self.core.abort_requests(to_abort)
        except BaseException:
            # An interrupted cell must not leave requests behind for the next one.
            live, _ = self._output_processor.abort(ids)
            if self._core is not None:
                self._core.abort_requests(live)
            raise
        finally:
            if bar is not None:
                bar.close()
        if failures:
            raise RequestFailedError(str(failures[0])) from failures[0]
        return [result for result in results if result is not None]


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    items: list[Any] = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # one prompt, given as token ids
    return items


def _params_list(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{count} prompts but {len(params)} sampling parameters", "sampling_params"
        )
    return list(params)


def _progress_bar(total: int) -> Any:
    from tqdm.auto import tqdm

    return tqdm(total=total, desc="requests", unit="req")
