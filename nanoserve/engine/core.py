"""The engine core: one scheduler, one executor, one step after another.

This is the composition root: it alone reads from the configuration which scheduler, executor and
connector are meant, and finds them in their registries. It must not know text, tokenizers or HTTP,
nor whether it runs in its caller's process or in its own.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial

from nanoserve.config.engine import EngineConfig
from nanoserve.engine.connector import KV_CONNECTORS, KVConnectorRole
from nanoserve.engine.executor import EXECUTORS, Executor
from nanoserve.engine.messages import EngineCoreOutputs, EngineCoreRequest, EngineInfo
from nanoserve.kvcache.prefix_index import PREFIX_INDEXES, PrefixIndexFactory
from nanoserve.kvcache.spec import make_kv_cache_config
from nanoserve.registry import load_plugins
from nanoserve.request import Request, RequestStatus
from nanoserve.scheduler import SCHEDULERS
from nanoserve.version import source_hash, source_path


class EngineCore:
    """Holds the model and the scheduler, and runs steps.

    Args:
        config: the whole configuration.
        progress: called with a short line at each stage of loading.

    Raises:
        ModelLoadError, ConfigError: when the model or the settings cannot be used.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None) -> None:
        load_plugins()
        self._executor: Executor = EXECUTORS.load(config.parallel.executor)(config, progress)
        try:
            kv_cache_config = make_kv_cache_config(
                self._executor.get_kv_cache_specs(),
                self._executor.determine_available_memory(),
                config.model.max_model_len,
                config.cache.num_blocks,
                config.scheduler.max_num_seqs,
            )
            self._executor.initialize_cache(kv_cache_config)
        except BaseException:
            self._executor.shutdown()
            raise
        connector = KV_CONNECTORS.load(config.kv_transfer.kv_connector)(
            config, KVConnectorRole.SCHEDULER
        )
        try:
            self.scheduler = SCHEDULERS.load(config.scheduler.scheduler_cls)(
                config, kv_cache_config, connector, _prefix_index(config)
            )
        except BaseException:
            self._executor.shutdown()
            raise
        self.info = EngineInfo(
            num_blocks=kv_cache_config.num_blocks,
            block_size=kv_cache_config.block_size,
            num_usable_tokens=kv_cache_config.num_usable_tokens,
            vocab_size=self._executor.vocab_size,
            device=self._executor.device,
            dtype=self._executor.dtype,
            source_path=source_path(),
            source_hash=source_hash(),
        )

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue one sequence; the front has checked it."""
        self.scheduler.add_request(Request.from_engine_core_request(request))

    def abort_requests(self, request_ids: Iterable[str]) -> None:
        """End these sequences and free their blocks; ids that are gone already are ignored."""
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix; False, and nothing changed, while requests hold blocks."""
        return self.scheduler.kv_cache_manager.reset_prefix_cache()

    def has_work(self) -> bool:
        """True while a step would do something."""
        return self.scheduler.has_unfinished_requests() or self.scheduler.has_finished_requests()

    def step(self) -> EngineCoreOutputs:
        """Schedule, compute, and account for one step."""
        scheduler_output = self.scheduler.schedule()
        runner_output = self._executor.execute_model(scheduler_output)
        outputs = self.scheduler.update_from_output(scheduler_output, runner_output)
        return EngineCoreOutputs(outputs, self.scheduler.make_stats(), time.monotonic())

    def shutdown(self) -> None:
        """Free the model and the cache. May be called more than once."""
        self._executor.shutdown()


def _prefix_index(config: EngineConfig) -> PrefixIndexFactory:
    """What makes the prefix index that the configuration means."""
    if not config.cache.enable_prefix_caching:
        null: PrefixIndexFactory = PREFIX_INDEXES.load("null")
        return null
    return partial(PREFIX_INDEXES.load("hash"), hash_name=config.cache.prefix_caching_hash_algo)
