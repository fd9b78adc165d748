"""Where the engine computes."""

from dataclasses import dataclass


@dataclass
class DeviceConfig:
    """The device, and which attention backend serves it.

    Attributes:
        device: "auto" (a GPU if there is one, else the CPU), "cpu" or "cuda".
        attention_backend: registry name of the backend; None lets the platform choose.
    """

    device: str = "auto"
    attention_backend: str | None = None
