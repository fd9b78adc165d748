"""What the engine asks of the machine it runs on, and how the machine is chosen.

Importing this module imports no torch.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nanoserve.config.engine import EngineConfig
from nanoserve.errors import ConfigError
from nanoserve.registry import Registry

if TYPE_CHECKING:
    import torch

PLATFORMS = Registry(
    "device",
    {
        "cpu": "nanoserve.platforms.cpu:CpuPlatform",
        "cuda": "nanoserve.platforms.cuda:CudaPlatform",
    },
)


class Platform(ABC):
    """One kind of device.

    Attributes:
        name: what `--device` calls it.
    """

    name: str

    @abstractmethod
    def configure_process(self) -> None:
        """Set this process up to compute here (threads). Called once, before the model loads."""

    @abstractmethod
    def device(self) -> "torch.device":
        """The device that tensors live on."""

    @abstractmethod
    def default_dtype(self, arch_dtype: str) -> str:
        """The type that `auto` means for weights stored as arch_dtype (torch's names)."""

    @abstractmethod
    def attention_backend(self) -> str:
        """Registry name of the attention backend that suits this device."""

    @abstractmethod
    def kv_memory_budget(self, config: EngineConfig, profile: Callable[[], None]) -> int:
        """Bytes that the KV cache may take, the model being loaded.

        Args:
            config: `cache.kv_cache_memory` is obeyed where it is set.
            profile: runs the largest step there can be; called where its memory must be measured.

        Raises:
            ConfigError: nothing is left for the cache.
        """

    @abstractmethod
    def allocate_cache(self, shape: Sequence[int], dtype: "torch.dtype") -> "torch.Tensor":
        """A zeroed cache tensor on the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was asked of it."""

    @abstractmethod
    def release_memory(self) -> None:
        """Give memory that no tensor uses back to the machine."""


def resolve_platform(device: str) -> Platform:
    """The platform for "auto" (a GPU if there is one, else the CPU), "cpu" or "cuda".

    Raises:
        ConfigError: one line, when the device is not known or not there.
    """
    if device != "auto" and device not in PLATFORMS:
        raise ConfigError(f"device must be auto, {', '.join(PLATFORMS.names())}, not {device!r}")
    if device in ("auto", "cuda"):
        import torch

        if torch.cuda.is_available():
            device = "cuda"
        elif device == "auto":
            device = "cpu"
        else:
            raise ConfigError("device 'cuda' was asked for, but torch finds no usable GPU here")
    platform: Platform = PLATFORMS.load(device)()
    return platform
