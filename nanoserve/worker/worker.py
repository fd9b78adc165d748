"""One device's share of the engine: it loads the model, owns the cache, and runs the steps.

The worker is the composition root of its side: it alone reads from the configuration which
attention backend, drafter and connector are meant. It must not know the scheduler or the executor
above it.
"""

import gc
from collections.abc import Callable
from typing import Any

import torch

from nanoserve.config.engine import EngineConfig
from nanoserve.engine.connector import KV_CONNECTORS, KVConnector, KVConnectorRole, NullConnector
from nanoserve.errors import ConfigError
from nanoserve.forward import ATTENTION_BACKENDS, AttentionBackend
from nanoserve.kvcache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    SlidingWindowSpec,
    group_layers,
)
from nanoserve.layers.attention import Attention
from nanoserve.models.loader import load_model
from nanoserve.platforms.platform import resolve_platform
from nanoserve.registry import Registry, load_plugins
from nanoserve.scheduler_output import ModelRunnerOutput, SchedulerOutput
from nanoserve.worker.drafter import DRAFTERS
from nanoserve.worker.graph import EagerRunner
from nanoserve.worker.runner import ModelRunner

WARM_UP_TOKENS = 16


class Worker:
    """A loaded model on a device.

    Args:
        config: the engine's configuration.
        progress: told, in words, how far loading has come.

    Raises:
        ModelLoadError, ConfigError: one line, when the model or the settings cannot be used.
    """

    def __init__(self, config: EngineConfig, progress: Callable[[str], None] | None = None) -> None:
        load_plugins()
        self._config = config
        self._platform = resolve_platform(config.device.device)
        self._platform.configure_process()
        self._device = self._platform.device()
        dtype = config.model.dtype
        if dtype == "auto":
            dtype = self._platform.default_dtype(config.model.arch.dtype)
        self._dtype: torch.dtype = getattr(torch, dtype)
        name = config.device.attention_backend or self._platform.attention_backend()
        self._backend: AttentionBackend = _load(ATTENTION_BACKENDS, name)()
        model: Any = load_model(
            config.model, self._dtype, self._device, self._backend, progress=progress
        )
        self._layers: list[Attention] = list(model.attention_layers)
        self._connector: KVConnector = _load(KV_CONNECTORS, config.kv_transfer.kv_connector)(
            config, KVConnectorRole.WORKER
        )
        if type(self._connector) is not NullConnector:
            attach_connector(self._connector, self._layers)
        self._runner: ModelRunner | None = ModelRunner(
            config,
            model,
            self._backend,
            EagerRunner(model),
            _load(DRAFTERS, config.speculative.method)(config, model),
            self._connector,
            self._device,
        )

    @property
    def runner(self) -> ModelRunner:
        """What runs the steps; RuntimeError after shutdown."""
        if self._runner is None:
            raise RuntimeError("the worker has been shut down")
        return self._runner

    @property
    def device(self) -> str:
        """The device the model is on."""
        return str(self._device)

    @property
    def dtype(self) -> str:
        """The type the model computes in, by torch's name."""
        return str(self._dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._config.model.arch.vocab_size

    def get_kv_cache_specs(self) -> list[KVCacheSpec]:
        """One spec a layer, in layer order."""
        windows = {layer.shape.sliding_window for layer in self._layers}
        # A block takes memory in every layer. Where some layers need all tokens, a second table for
        # the others would cost blocks, not save them.
        window = windows.pop() if len(windows) == 1 else None
        specs: list[KVCacheSpec] = []
        for layer in self._layers:
            shape, size = layer.shape, self._config.cache.block_size
            page = (size, shape.num_kv_heads, shape.head_dim, self._dtype.itemsize)
            specs.append(
                FullAttentionSpec(*page) if window is None else SlidingWindowSpec(*page, window)
            )
        return specs

    def determine_available_memory(self) -> int:
        """Bytes free for KV blocks."""
        return self._platform.kv_memory_budget(self._config, self._profile)

    def initialize_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate every layer's cache, tell the layers their groups, and warm up."""
        for number, group in enumerate(kv_cache_config.groups):
            for layer in group.layers:
                self._layers[layer].kv_group = number
        kv_caches = self._allocate(kv_cache_config)
        self.runner.set_cache(kv_cache_config, kv_caches)
        self._connector.register_kv_caches(kv_caches)
        tokens = min(WARM_UP_TOKENS, self._config.scheduler.max_num_batched_tokens)
        block_sizes = [group.spec.block_size for group in kv_cache_config.groups]
        self.runner.dummy_run(tokens, kv_caches, block_sizes)
        self.runner.capture()
        self._platform.synchronize()

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        return self.runner.execute(scheduler_output)

    def shutdown(self) -> None:
        """Free the model and the cache. May be called more than once."""
        if self._runner is None:
            return
        self._connector.shutdown()
        # Layers and hooks refer to each other in circles, which only the collector unties.
        self._runner = None
        self._layers = []
        del self._backend, self._connector
        gc.collect()
        self._platform.release_memory()

    def _allocate(self, kv_cache_config: KVCacheConfig) -> list[torch.Tensor]:
        """One cache tensor a layer, in layer order."""
        by_layer: dict[int, torch.Tensor] = {}
        for group in kv_cache_config.groups:
            spec = group.spec
            shape = self._backend.kv_cache_shape(
                kv_cache_config.num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim
            )
            for layer in group.layers:
                by_layer[layer] = self._platform.allocate_cache(shape, self._dtype)
        return [by_layer[layer] for layer in sorted(by_layer)]

    def _profile(self) -> None:
        """The largest step there can be, over a cache of the null block alone."""
        groups = group_layers(self.get_kv_cache_specs())
        config = KVCacheConfig(num_blocks=1, groups=groups)
        block_sizes = [group.spec.block_size for group in groups]
        budget = self._config.scheduler.max_num_batched_tokens
        self.runner.dummy_run(budget, self._allocate(config), block_sizes)


def attach_connector(connector: KVConnector, layers: list[Attention]) -> None:
    """Let the connector act layer by layer: wait before a layer attends, save after it did."""

    def before(layer: Attention, args: tuple[Any, ...]) -> None:
        connector.wait_for_layer_load(layer.layer_index)

    def after(layer: Attention, args: tuple[Any, ...], output: torch.Tensor) -> None:
        kv_caches, batch = args[3], args[4]
        index = layer.layer_index
        connector.save_kv_layer(index, kv_caches[index], batch.attn[layer.kv_group])

    for layer in layers:
        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)


def _load(registry: Registry, name: str) -> Any:
    """A registry's entry; a name it does not know is the user's mistake, told in one line."""
    try:
        return registry.load(name)
    except KeyError as error:
        raise ConfigError(error.args[0]) from error
