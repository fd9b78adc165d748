"""The periodic line that says how busy the server is, in vLLM's words."""

import asyncio
import logging
import time

from nanoserve.async_llm import AsyncLLM
from nanoserve.engine.messages import SchedulerStats
from nanoserve.engine.stats import IterationStats

logger = logging.getLogger("nanoserve.server")
INTERVAL_SECONDS = 10.0


class StatsLog:
    """Adds up tokens and says their rate; silent while there is nothing to say.

    Args:
        engine: whose steps are counted.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        engine.add_listener(self._count)

    def _count(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        if scheduler is not None:
            self._prefix_queries += scheduler.prefix_cache_queries
            self._prefix_hits += scheduler.prefix_cache_hits
        self._prompt_tokens += iteration.num_prompt_tokens
        self._generation_tokens += iteration.num_generation_tokens

    async def run(self) -> None:
        """Log until cancelled."""
        since = time.monotonic()
        while True:
            await asyncio.sleep(INTERVAL_SECONDS)
            now = time.monotonic()
            self.log(now - since)
            since = now

    def log(self, seconds: float) -> None:
        """Say what happened in the last `seconds`, and start over."""
        prompt, generation = self._prompt_tokens, self._generation_tokens
        queries, hits = self._prefix_queries, self._prefix_hits
        stats = self._engine.stats
        if not (prompt or generation or stats.num_running_reqs or stats.num_waiting_reqs):
            return
        self._prompt_tokens = self._generation_tokens = 0
        self._prefix_queries = self._prefix_hits = 0
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, "
            "Running: %d reqs, Waiting: %d reqs, KV cache usage: %.1f%%, "
            "Prefix cache hit rate: %.1f%%",
            prompt / seconds,
            generation / seconds,
            stats.num_running_reqs,
            stats.num_waiting_reqs,
            100 * stats.kv_cache_usage,
            100 * hits / max(1, queries),
        )
