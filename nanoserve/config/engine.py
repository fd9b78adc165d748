"""All sections together: what one engine is made from."""

from dataclasses import dataclass, field

from nanoserve.config.cache import CacheConfig
from nanoserve.config.device import DeviceConfig
from nanoserve.config.kv_transfer import KVTransferConfig
from nanoserve.config.model import ModelConfig
from nanoserve.config.parallel import ParallelConfig
from nanoserve.config.scheduler import SchedulerConfig
from nanoserve.config.speculative import SpeculativeConfig
from nanoserve.errors import ConfigError


@dataclass
class EngineConfig:
    """The whole configuration. Plain data: it crosses process borders as it is."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)
    kv_transfer: KVTransferConfig = field(default_factory=KVTransferConfig)

    def __post_init__(self) -> None:
        budget, length = self.scheduler.max_num_batched_tokens, self.model.max_model_len
        if not self.scheduler.enable_chunked_prefill and budget < length:
            raise ConfigError(
                f"without chunked prefill a step must hold a whole prompt: max_num_batched_tokens "
                f"({budget}) is smaller than max_model_len ({length})"
            )
