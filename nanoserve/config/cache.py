"""Settings of the paged KV cache."""

from dataclasses import dataclass

from nanoserve.errors import ConfigError


@dataclass
class CacheConfig:
    """The KV cache's shape and size.

    Attributes:
        block_size: tokens a block holds.
        kv_cache_memory: bytes for all KV blocks; None lets the platform decide.
        num_blocks: exact number of blocks (the null block included), over kv_cache_memory.
        gpu_memory_utilization: share of the device's memory the engine may use (GPU only).
        enable_prefix_caching: keep full blocks findable after their requests have ended.
        prefix_caching_hash_algo: what names a block: "sha256", or "xxhash" among trusted users.
    """

    block_size: int = 16
    kv_cache_memory: int | None = None
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool = True
    prefix_caching_hash_algo: str = "sha256"

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size must be at least 1, not {self.block_size}")
        if self.kv_cache_memory is not None and self.kv_cache_memory <= 0:
            raise ConfigError(f"kv_cache_memory must be positive, not {self.kv_cache_memory}")
        if self.num_blocks is not None and self.num_blocks < 2:
            raise ConfigError(
                f"num_blocks must be at least 2 (block 0 is the null block), not {self.num_blocks}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization}"
            )
