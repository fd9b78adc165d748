"""Settings of the scheduler: how much one step may carry, and in what order."""

from dataclasses import dataclass

from nanoserve.errors import ConfigError


@dataclass
class SchedulerConfig:
    """Budgets and policy of one step.

    Attributes:
        max_num_seqs: most requests running at once.
        max_num_batched_tokens: most tokens computed in one step.
        enable_chunked_prefill: let a prompt be computed over several steps.
        long_prefill_token_threshold: most tokens of one request in one step; 0 is off.
        policy: "fcfs" (first come, first served) or "priority" (lower value first).
        scheduler_cls: registry name of the scheduler.
    """

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    policy: str = "fcfs"
    scheduler_cls: str = "default"

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if self.max_num_batched_tokens < 1:
            raise ConfigError(
                f"max_num_batched_tokens must be at least 1, not {self.max_num_batched_tokens}"
            )
        if self.long_prefill_token_threshold < 0:
            raise ConfigError("long_prefill_token_threshold must not be negative")
        if self.policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy must be 'fcfs' or 'priority', not {self.policy!r}")
