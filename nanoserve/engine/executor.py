"""How the engine core reaches its workers: one call, whether there is one worker or many.

The in-process executor runs one worker in the core's own process. Executors over several processes
or machines are further entries of the registry; the core must not know which one it drives.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from nanoserve.config.engine import EngineConfig
from nanoserve.kvcache.spec import KVCacheConfig, KVCacheSpec
from nanoserve.registry import Registry
from nanoserve.scheduler_output import ModelRunnerOutput, SchedulerOutput
from nanoserve.worker.worker import Worker

EXECUTORS = Registry("executor", {"inproc": "nanoserve.engine.executor:InProcessExecutor"})


class Executor(ABC):
    """Drives the worker or workers of one engine."""

    @abstractmethod
    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None) -> None:
        """Start the workers and load the model."""

    @abstractmethod
    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        """One spec a layer, in layer order."""

    @abstractmethod
    def determine_available_memory(self) -> int:
        """Bytes free for KV blocks, once the model is loaded."""

    @abstractmethod
    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache and warm up."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""

    @property
    @abstractmethod
    def device(self) -> str:
        """The device the model runs on."""

    @property
    @abstractmethod
    def dtype(self) -> str:
        """The type the model computes in."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Columns of the logits."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free everything. May be called more than once."""


class InProcessExecutor(Executor):
    """One worker, in this process."""

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None) -> None:
        self._worker: Worker | None = Worker(config, progress)

    @property
    def worker(self) -> Worker:
        """The worker; RuntimeError after shutdown."""
        if self._worker is None:
            raise RuntimeError("the executor has been shut down")
        return self._worker

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        return self.worker.get_kv_cache_specs()

    def determine_available_memory(self) -> int:
        return self.worker.determine_available_memory()

    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        self.worker.initialize_cache(kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.worker.execute_model(scheduler_output)

    @property
    def device(self) -> str:
        return self.worker.device

    @property
    def dtype(self) -> str:
        return self.worker.dtype

    @property
    def vocab_size(self) -> int:
        return self.worker.vocab_size

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None
