"""An NVIDIA GPU. Importing this module touches no driver; making a `CudaPlatform` does."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from nanoserve.config.engine import EngineConfig
from nanoserve.errors import ConfigError
from nanoserve.platforms.platform import Platform

GIB = 2**30


@dataclass(frozen=True)
class DeviceMemory:
    """A GPU's memory, bytes.

    Attributes:
        total: what the GPU has.
        free_before: what was free before this engine took any.
        used: the most this engine takes besides the cache (weights, and the largest step).
    """

    total: int
    free_before: int
    used: int


class CudaPlatform(Platform):
    """The current CUDA device. Make it before the model is loaded: it notes what is free."""

    name = "cuda"

    def __init__(self) -> None:
        self._free_before, self._total = torch.cuda.mem_get_info()
        self._allocated_before = torch.cuda.memory_allocated()
        self._reserved_before = torch.cuda.memory_reserved()

    def configure_process(self) -> None:
        """Nothing to set: the host only launches work."""

    def device(self) -> torch.device:
        """The current GPU, by number."""
        return torch.device("cuda", torch.cuda.current_device())

    def default_dtype(self, arch_dtype: str) -> str:
        """The type the weights are stored in, or float16 where the GPU has no bfloat16."""
        return choose_dtype(arch_dtype, torch.cuda.get_device_capability()[0])

    def attention_backend(self) -> str:
        """The Triton kernels, or torch operations where Triton is absent."""
        return "triton_paged" if find_spec("triton") else "torch_paged"

    def kv_memory_budget(self, config: EngineConfig, profile: Callable[[], None]) -> int:
        """`kv_cache_memory`, else what `gpu_memory_utilization` leaves; see `kv_budget`."""
        if config.cache.kv_cache_memory is not None:
            return config.cache.kv_cache_memory
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        profile()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        peak = torch.cuda.max_memory_allocated() - self._allocated_before
        # Libraries take memory that torch does not count (cuBLAS workspaces, loaded kernels).
        growth = self._free_before - torch.cuda.mem_get_info()[0]
        outside = max(0, growth - (torch.cuda.memory_reserved() - self._reserved_before))
        memory = DeviceMemory(self._total, self._free_before, peak + outside)
        return kv_budget(memory, config.cache.gpu_memory_utilization)

    def allocate_cache(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed memory on the GPU."""
        return torch.zeros(*shape, dtype=dtype, device=self.device())

    def synchronize(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize()

    def release_memory(self) -> None:
        """Return cached memory to the driver."""
        torch.cuda.empty_cache()


def choose_dtype(arch_dtype: str, capability_major: int) -> str:
    """What `auto` means on a GPU: bfloat16 needs compute capability 8.0."""
    if arch_dtype == "bfloat16" and capability_major < 8:
        return "float16"
    return arch_dtype


def kv_budget(memory: DeviceMemory, utilization: float) -> int:
    """Bytes for the cache: utilization * total - others' use - this engine's own.

    It is sized from what is free, so another process on the same GPU makes the cache smaller
    instead of making its allocation fail.

    Raises:
        ConfigError: nothing is left; the numbers are named.
    """
    others = memory.total - memory.free_before
    budget = int(utilization * memory.total) - others - memory.used
    if budget <= 0:
        raise ConfigError(
            f"no GPU memory is left for the KV cache: {utilization:g} of {memory.total / GIB:.1f} "
            f"GiB may be used, others hold {others / GIB:.1f} GiB, and the model with its largest "
            f"step needs {memory.used / GIB:.1f} GiB: free memory, raise gpu_memory_utilization or "
            f"lower max_num_batched_tokens"
        )
    return budget
