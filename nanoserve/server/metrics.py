"""Prometheus metrics under vLLM's names, so that vLLM's dashboards read this server.

Counters and histograms are fed by the engine's listener; gauges are what the last step said.
Prometheus adds `_total` to a counter's name.
"""

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.responses import Response

from nanoserve.async_llm import AsyncLLM
from nanoserve.engine.messages import SchedulerStats
from nanoserve.engine.stats import FinishedRequestStats, IterationStats

LABELS = ("model_name", "engine")
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_STEP_TOKENS = tuple(float(2**i) for i in range(15))


def _one_two_five(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to limit."""
    values, power = [], 1
    while power <= limit:
        values += [float(m * power) for m in (1, 2, 5) if m * power <= limit]
        power *= 10
    return tuple(values)


class Metrics:
    """All metrics of one server, in a registry of their own.

    Args:
        model_name: the `model_name` label.
        engine: its cache's shape is told once, as `vllm:cache_config_info`.
    """

    def __init__(self, model_name: str, engine: AsyncLLM) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        ProcessCollector(registry=self._registry)
        lengths = _one_two_five(engine.config.model.max_model_len)
        self._running = self._gauge("num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("num_requests_waiting", "Requests waiting to be scheduled.")
        self._kv_usage = self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.")
        self._preemptions = self._counter("num_preemptions", "Preemptions.")
        self._prefix_queries = self._counter(
            "prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self._prefix_hits = self._counter("prefix_cache_hits", "Tokens found in the prefix cache.")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens processed.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._success = Counter(
            "vllm:request_success",
            "Completions ended, by reason.",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(*self._labels, reason)
        self._ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self._itl = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a sequence.", _BETWEEN_TOKENS
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens computed in one step.", _STEP_TOKENS
        )
        self._times = {
            name: self._histogram(f"{metric}_seconds", text, _REQUEST)
            for name, metric, text in (
                ("e2e_latency", "e2e_request_latency", "From arrival to the last token."),
                ("queued_time", "request_queue_time", "From arrival to the first step."),
                ("prefill_time", "request_prefill_time", "From the first step to a token."),
                ("decode_time", "request_decode_time", "From the first token to the last."),
                ("inference_time", "request_inference_time", "From the first step to the end."),
            )
        }
        self._counts = {
            name: self._histogram(f"request_{name.removeprefix('num_')}", text, lengths)
            for name, text in (
                ("num_prompt_tokens", "Prompt tokens of a request."),
                ("num_generation_tokens", "Tokens generated for a request."),
            )
        }
        self._params_n = self._histogram("request_params_n", "n of a request.", (1, 2, 5, 10, 20))
        self._params_max = self._histogram(
            "request_params_max_tokens", "max_tokens of a request.", lengths
        )
        self._tell_cache_config(engine)

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """Count one step, or an abort between two steps (the engine's listener)."""
        if scheduler is not None:
            self._running.set(scheduler.num_running_reqs)
            self._waiting.set(scheduler.num_waiting_reqs)
            self._kv_usage.set(scheduler.kv_cache_usage)
            self._preemptions.inc(scheduler.num_preemptions)
            self._prefix_queries.inc(scheduler.prefix_cache_queries)
            self._prefix_hits.inc(scheduler.prefix_cache_hits)
            if scheduler.num_scheduled_tokens:
                self._step_tokens.observe(scheduler.num_scheduled_tokens)
        self._prompt_tokens.inc(iteration.num_prompt_tokens)
        self._generation_tokens.inc(iteration.num_generation_tokens)
        for seconds in iteration.time_to_first_tokens:
            self._ttft.observe(seconds)
        for seconds in iteration.inter_token_latencies:
            self._itl.observe(seconds)
        for finished in iteration.finished_requests:
            self._record_finished(finished)

    def _record_finished(self, finished: FinishedRequestStats) -> None:
        for reason in finished.finish_reasons:
            self._success.labels(*self._labels, reason).inc()
        for name, histogram in (*self._times.items(), *self._counts.items()):
            histogram.observe(getattr(finished, name))
        self._params_n.observe(finished.n)
        if finished.max_tokens is not None:
            self._params_max.observe(finished.max_tokens)

    def response(self) -> Response:
        """The metrics in Prometheus' text format."""
        return Response(
            generate_latest(self._registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    def _tell_cache_config(self, engine: AsyncLLM) -> None:
        info = engine.info
        facts = {
            "block_size": info.block_size,
            "num_gpu_blocks": info.num_blocks,
            "kv_cache_size_tokens": info.num_usable_tokens,
            "gpu_memory_utilization": engine.config.cache.gpu_memory_utilization,
            "enable_prefix_caching": engine.config.cache.enable_prefix_caching,
            "prefix_caching_hash_algo": engine.config.cache.prefix_caching_hash_algo,
        }
        gauge = Gauge(
            "vllm:cache_config_info",
            "The KV cache's shape, as labels.",
            ("engine", *facts),
            registry=self._registry,
        )
        gauge.labels("0", *(str(value) for value in facts.values())).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        metric = Gauge(f"vllm:{name}", text, LABELS, registry=self._registry)
        return metric.labels(*self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        metric = Counter(f"vllm:{name}", text, LABELS, registry=self._registry)
        return metric.labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        metric = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self._registry)
        return metric.labels(*self._labels)
