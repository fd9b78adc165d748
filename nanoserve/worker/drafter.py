"""The seam of speculative decoding: something that guesses a request's next tokens.

The runner asks for guesses after each step, the scheduler hands them back with the next one as
tokens to compute, and the runner keeps those that the model would have drawn itself. A guess can
only cost or save time, never change an answer. The null drafter guesses nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from nanoserve.config.engine import EngineConfig
from nanoserve.registry import Registry
from nanoserve.worker.graph import CausalLM
from nanoserve.worker.request_rows import RequestRows


@dataclass
class DraftInputs:
    """What a drafter may look at after a step. Requests that drew no token are left out.

    Attributes:
        request_ids: the requests, in batch order.
        rows: their rows in `request_rows`, where all their known tokens are.
        request_rows: every row; `state(row).num_tokens` counts a row's known tokens.
        hidden: [num_requests, hidden_size], the model's state at each request's last known token
            but one (the token that the newest was drawn from).
    """

    request_ids: Sequence[str]
    rows: Sequence[int]
    request_rows: RequestRows
    hidden: torch.Tensor


class Drafter(Protocol):
    """Proposes tokens."""

    def __init__(self, config: EngineConfig, model: CausalLM) -> None: ...

    def propose(self, inputs: DraftInputs) -> dict[str, list[int]]:
        """Request id -> guessed next tokens, in order; requests may be left out."""
        ...


class NullDrafter:
    """Guesses nothing."""

    def __init__(self, config: EngineConfig, model: CausalLM) -> None:
        pass

    def propose(self, inputs: DraftInputs) -> dict[str, list[int]]:
        """No guesses."""
        return {}


DRAFTERS = Registry("drafter", {"none": "nanoserve.worker.drafter:NullDrafter"})
