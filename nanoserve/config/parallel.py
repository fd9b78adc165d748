"""How the engine is spread over processes and devices."""

from dataclasses import dataclass


@dataclass
class ParallelConfig:
    """Attributes:
    executor: registry name of the executor that drives the workers.
    """

    executor: str = "inproc"
