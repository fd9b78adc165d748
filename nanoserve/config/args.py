"""The flat list of engine settings: keywords of `LLM(...)`, flags of the command line."""

from dataclasses import dataclass, field, fields
from typing import Any

from nanoserve.config.arch import ModelArch
from nanoserve.config.cache import CacheConfig
from nanoserve.config.device import DeviceConfig
from nanoserve.config.engine import EngineConfig
from nanoserve.config.kv_transfer import KVTransferConfig
from nanoserve.config.model import ModelConfig
from nanoserve.config.parallel import ParallelConfig
from nanoserve.config.scheduler import SchedulerConfig
from nanoserve.config.speculative import SpeculativeConfig
from nanoserve.errors import ConfigError
from nanoserve.hub.resolve import resolve_model

DEFAULT_MAX_MODEL_LEN = 8192


@dataclass
class EngineArgs:
    """Every engine setting by its flag's name (see each section's docstring for the meaning).

    `create_engine_config` finds the model's folder, reads its config.json, and sorts the settings
    into their sections; it needs no torch.
    """

    model: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    served_model_name: list[str] = field(default_factory=list)
    dtype: str = "auto"
    max_model_len: int | None = None
    load_format: str = "auto"
    seed: int | None = None
    block_size: int = 16
    kv_cache_memory: int | None = None
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"
    max_num_seqs: int = 128
    max_num_batched_tokens: int | None = None
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    device: str = "auto"
    attention_backend: str | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "EngineArgs":
        """From keywords; an unknown name is a ConfigError that lists the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise ConfigError(f"unknown setting {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**values)

    def create_engine_config(self) -> EngineConfig:
        """Resolve the model and build the configuration.

        Raises:
            ModelLoadError: the model's folder, config.json or architecture is missing or unknown.
            ConfigError: settings out of range or in conflict.
        """
        resolved = resolve_model(
            self.model,
            revision=self.revision,
            need_weights=self.load_format != "dummy",
            need_tokenizer=self.tokenizer is None,
        )
        arch = ModelArch.from_folder(resolved.path)
        tokenizer_path = resolved.path
        if self.tokenizer is not None:
            tokenizer_path = resolve_model(
                self.tokenizer, revision=self.revision, need_config=False, need_weights=False
            ).path
        max_model_len = self._max_model_len(arch)
        budget = self.max_num_batched_tokens
        if budget is None:
            budget = 2048 if self.enable_chunked_prefill else max(2048, max_model_len)
        return EngineConfig(
            model=ModelConfig(
                model=resolved.name,
                path=resolved.path,
                tokenizer_path=tokenizer_path,
                served_model_name=self.served_model_name or [resolved.name],
                arch=arch,
                dtype=self.dtype,
                max_model_len=max_model_len,
                load_format=self.load_format,
                seed=self.seed,
            ),
            cache=CacheConfig(
                block_size=self.block_size,
                kv_cache_memory=self.kv_cache_memory,
                num_blocks=self.num_gpu_blocks_override,
                gpu_memory_utilization=self.gpu_memory_utilization,
                enable_prefix_caching=self.enable_prefix_caching,
                prefix_caching_hash_algo=self.prefix_caching_hash_algo,
            ),
            scheduler=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=budget,
                enable_chunked_prefill=self.enable_chunked_prefill,
                long_prefill_token_threshold=self.long_prefill_token_threshold,
                policy=self.scheduling_policy,
            ),
            device=DeviceConfig(device=self.device, attention_backend=self.attention_backend),
            parallel=ParallelConfig(),
            speculative=SpeculativeConfig(),
            kv_transfer=KVTransferConfig(),
        )

    def _max_model_len(self, arch: ModelArch) -> int:
        limit = arch.context_length
        if self.max_model_len is None:
            return min(limit, DEFAULT_MAX_MODEL_LEN)
        if self.max_model_len > limit:
            raise ConfigError(
                f"max_model_len ({self.max_model_len}) is larger than the {limit} positions the "
                f"model was made for (max_position_embeddings and rope scaling in config.json)"
            )
        return self.max_model_len
