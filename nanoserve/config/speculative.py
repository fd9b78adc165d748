"""Settings of speculative decoding."""

from dataclasses import dataclass


@dataclass
class SpeculativeConfig:
    """Attributes:
    method: registry name of the drafter; "none" drafts nothing.
    """

    method: str = "none"
