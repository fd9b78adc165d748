"""The way out: tokens from the core become text, completions and requests again.

One `OutputProcessor` serves a front (LLM or AsyncLLM). For each sequence it detokenizes, looks for
stop strings, collects log-probabilities; for each request it puts the n completions together and
hands them to the request's sink in the form that was asked for. It must not know who reads.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from nanoserve.engine.input_processor import ProcessedRequest
from nanoserve.engine.messages import (
    EngineCoreOutput,
    EngineCoreOutputs,
    FinishReason,
)
from nanoserve.engine.stats import FinishedRequestStats, IterationStats
from nanoserve.outputs import (
    CompletionOutput,
    Logprob,
    LogprobsAtPosition,
    RequestMetrics,
    RequestOutput,
)
from nanoserve.sampling_params import RequestOutputKind
from nanoserve.scheduler_output import TokenLogprobs
from nanoserve.tokenizer.detokenizer import IncrementalDetokenizer
from nanoserve.tokenizer.tokenizer import Tokenizer


class RequestFailedError(RuntimeError):
    """The engine gave this request up; the message says why. Other requests go on."""


# Where a request's results go: the next output, or the error that ends it.
Sink = Callable[[RequestOutput | Exception], None]


@dataclass
class _Sequence:
    """One completion in the making."""

    internal_id: str
    index: int
    request: "_Request"
    detokenizer: IncrementalDetokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsAtPosition] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_emitted: int = 0
    last_token_time: float | None = None


@dataclass
class _Request:
    """One request and its sequences."""

    processed: ProcessedRequest
    sink: Sink
    metrics: RequestMetrics
    sequences: list[_Sequence] = field(default_factory=list)
    num_cached_tokens: int = 0
    preemptions: dict[int, int] = field(default_factory=dict)

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)


class OutputProcessor:
    """Turns engine outputs into RequestOutputs for one front.

    Args:
        tokenizer: turns ids into text; requests with detokenize=False do not use it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sequences: dict[str, _Sequence] = {}

    @property
    def num_unfinished(self) -> int:
        """Sequences that have not ended."""
        return len(self._sequences)

    def add(self, processed: ProcessedRequest, sink: Sink) -> None:
        """Expect outputs for a request; they go to sink."""
        metrics = RequestMetrics(arrival_time=processed.arrival_time)
        request = _Request(processed, sink, metrics)
        for index, core_request in enumerate(processed.sequences):
            params = core_request.sampling_params
            sequence = _Sequence(
                core_request.request_id,
                index,
                request,
                IncrementalDetokenizer(self._tokenizer, params, processed.prompt_token_ids)
                if params.detokenize
                else None,
                logprobs=None if params.logprobs is None else [],
                cumulative_logprob=None if params.logprobs is None else 0.0,
            )
            request.sequences.append(sequence)
            self._sequences[sequence.internal_id] = sequence

    def process(self, outputs: EngineCoreOutputs) -> tuple[list[str], IterationStats]:
        """Take one step's outputs and feed the sinks.

        Returns:
            The internal ids that the core must abort (a stop string ended them here), and what is
            to be counted.
        """
        stats = IterationStats()
        to_abort: list[str] = []
        # A request whose completions all advanced in this step gets one output, not n.
        touched: dict[int, tuple[_Request, list[_Sequence]]] = {}
        for output in outputs.outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue  # aborted by the front while this step was under way
            if output.finish_reason is FinishReason.ERROR:
                to_abort += self._fail(sequence.request, output.error or "internal error")
                continue
            self._time(sequence, output, outputs.timestamp, stats)
            if self._advance(sequence, output):
                to_abort.append(sequence.internal_id)
            request, sequences = touched.setdefault(id(sequence.request), (sequence.request, []))
            sequences.append(sequence)
        for request, sequences in touched.values():
            for sequence in sequences:
                if sequence.finish_reason is not None:
                    self._sequences.pop(sequence.internal_id, None)
            self._emit(request, sequences, stats)
        return to_abort, stats

    def abort(self, internal_ids: Iterable[str]) -> tuple[list[str], IterationStats]:
        """End sequences that the front no longer wants; their request gets what there is.

        Returns:
            The ids that were still live (to be aborted in the core), and what is to be counted.
        """
        stats = IterationStats()
        live = [i for i in internal_ids if i in self._sequences]
        touched: dict[int, tuple[_Request, list[_Sequence]]] = {}
        for internal_id in live:
            sequence = self._sequences.pop(internal_id)
            if sequence.detokenizer is not None:
                sequence.detokenizer.finish()
            sequence.finish_reason = str(FinishReason.ABORT)
            _, sequences = touched.setdefault(id(sequence.request), (sequence.request, []))
            sequences.append(sequence)
        for request, sequences in touched.values():
            self._emit(request, sequences, stats)
        return live, stats

    def fail_all(self, error: Exception) -> None:
        """Give every request that waits this error; used when the engine is gone."""
        requests = {id(s.request): s.request for s in self._sequences.values()}
        self._sequences.clear()
        for request in requests.values():
            request.sink(error)

    def _fail(self, request: _Request, message: str) -> list[str]:
        """End all of one request with an error; returns the ids to abort in the core."""
        ids = [s.internal_id for s in request.sequences if s.internal_id in self._sequences]
        for internal_id in ids:
            del self._sequences[internal_id]
        request.sink(RequestFailedError(message))
        return ids

    def _time(
        self, sequence: _Sequence, output: EngineCoreOutput, now: float, stats: IterationStats
    ) -> None:
        request = sequence.request
        metrics = request.metrics
        request.num_cached_tokens = max(request.num_cached_tokens, output.num_cached_tokens)
        request.preemptions[sequence.index] = output.num_preemptions
        metrics.num_preemptions = sum(request.preemptions.values())
        if metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = output.first_scheduled_time
        if not output.new_token_ids:
            return
        if metrics.first_token_time is None:
            # Once a request, as in its usage, however many completions it has.
            metrics.first_token_time = now
            stats.num_prompt_tokens += len(request.processed.prompt_token_ids)
            stats.time_to_first_tokens.append(now - metrics.arrival_time)
        if sequence.last_token_time is not None:
            stats.inter_token_latencies.append(now - sequence.last_token_time)
        stats.num_generation_tokens += len(output.new_token_ids)
        sequence.last_token_time = metrics.last_token_time = now

    def _advance(self, sequence: _Sequence, output: EngineCoreOutput) -> bool:
        """Add a step's tokens. True if a stop string ended the sequence before the core did."""
        new_ids, new_logprobs = output.new_token_ids, output.new_logprobs or []
        stopped_by_token = output.finish_reason is FinishReason.STOP
        stop_string = None
        if sequence.detokenizer is not None:
            # Token by token, so that tokens past a stop string are dropped with it.
            for count, token_id in enumerate(new_ids, start=1):
                last = stopped_by_token and count == len(new_ids)
                stop_string = sequence.detokenizer.update([token_id], last)
                if stop_string is not None:
                    new_ids, new_logprobs = new_ids[:count], new_logprobs[:count]
                    break
        sequence.token_ids += new_ids
        if sequence.logprobs is not None:
            for position in new_logprobs:
                sequence.logprobs.append(self._logprobs(position))
                sequence.cumulative_logprob = (
                    sequence.cumulative_logprob or 0.0
                ) + position.logprobs[0]
        if stop_string is not None:
            sequence.finish_reason = str(FinishReason.STOP)
            sequence.stop_reason = stop_string
        elif output.finish_reason is not None:
            sequence.finish_reason = str(output.finish_reason)
            sequence.stop_reason = output.stop_reason
        if sequence.finish_reason is not None and sequence.detokenizer is not None:
            sequence.detokenizer.finish()
        return stop_string is not None and output.finish_reason is None

    def _logprobs(self, position: TokenLogprobs) -> LogprobsAtPosition:
        ids = position.token_ids
        table: LogprobsAtPosition = {}
        # The chosen token comes first with its own rank; the likeliest follow in rank order.
        for rank, (token_id, logprob) in enumerate(
            zip(ids[1:], position.logprobs[1:], strict=True), 1
        ):
            table[token_id] = Logprob(logprob, rank, self._tokenizer.token_text(token_id))
        chosen = Logprob(position.logprobs[0], position.rank, self._tokenizer.token_text(ids[0]))
        return {ids[0]: chosen, **{t: lp for t, lp in table.items() if t != ids[0]}}

    def _emit(self, request: _Request, changed: list[_Sequence], stats: IterationStats) -> None:
        finished = request.finished
        kind = request.processed.params.output_kind
        if kind is RequestOutputKind.DELTA:
            completions = [self._delta(sequence) for sequence in changed]
        elif kind is RequestOutputKind.CUMULATIVE or finished:
            completions = [self._whole(sequence) for sequence in request.sequences]
        else:
            completions = []
        if finished:
            stats.finished_requests.append(self._finished_stats(request))
        if completions:
            processed = request.processed
            request.sink(
                RequestOutput(
                    request_id=processed.request_id,
                    prompt=processed.prompt,
                    prompt_token_ids=processed.prompt_token_ids,
                    outputs=completions,
                    finished=finished,
                    num_cached_tokens=request.num_cached_tokens,
                    metrics=request.metrics,
                )
            )

    @staticmethod
    def _whole(sequence: _Sequence) -> CompletionOutput:
        return CompletionOutput(
            index=sequence.index,
            text=sequence.detokenizer.text if sequence.detokenizer is not None else "",
            token_ids=list(sequence.token_ids),
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=None if sequence.logprobs is None else list(sequence.logprobs),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    @staticmethod
    def _delta(sequence: _Sequence) -> CompletionOutput:
        start, sequence.num_emitted = sequence.num_emitted, len(sequence.token_ids)
        return CompletionOutput(
            index=sequence.index,
            text=sequence.detokenizer.next_delta() if sequence.detokenizer is not None else "",
            token_ids=sequence.token_ids[start:],
            cumulative_logprob=sequence.cumulative_logprob,
            logprobs=None if sequence.logprobs is None else sequence.logprobs[start:],
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    @staticmethod
    def _finished_stats(request: _Request) -> FinishedRequestStats:
        metrics, processed = request.metrics, request.processed
        end = metrics.last_token_time or metrics.arrival_time
        scheduled = metrics.first_scheduled_time or end
        first = metrics.first_token_time or end
        return FinishedRequestStats(
            request_id=processed.request_id,
            finish_reasons=[s.finish_reason or "abort" for s in request.sequences],
            num_prompt_tokens=len(processed.prompt_token_ids),
            num_generation_tokens=sum(len(s.token_ids) for s in request.sequences),
            num_cached_tokens=request.num_cached_tokens,
            e2e_latency=end - metrics.arrival_time,
            queued_time=scheduled - metrics.arrival_time,
            prefill_time=first - scheduled,
            decode_time=end - first,
            n=processed.params.n,
            max_tokens=processed.params.max_tokens,
        )
