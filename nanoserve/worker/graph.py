"""How the model's forward pass is launched: operation by operation, or replayed as a whole.

The runner hands over a batch and takes hidden states; what stands between is a `GraphRunner`. The
eager one simply calls the model. A runner that replays recorded graphs pads the batch (slot -1,
which attention writes nowhere) and returns the rows that are real.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from nanoserve.forward import ForwardBatch


class CausalLM(Protocol):
    """What a runner needs of a model; see `nanoserve.models.registry`."""

    def __call__(self, batch: ForwardBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """[num_tokens, hidden_size]."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size]."""
        ...


class GraphRunner(Protocol):
    """Launches forward passes."""

    def __init__(self, model: CausalLM) -> None: ...

    def capture(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Get ready, once, when the cache has its final place."""
        ...

    def run(self, batch: ForwardBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """One forward pass: [num_tokens, hidden_size] for the batch's own tokens."""
        ...


class EagerRunner:
    """Calls the model."""

    def __init__(self, model: CausalLM) -> None:
        self._model = model

    def capture(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Nothing to record."""

    def run(self, batch: ForwardBatch, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `GraphRunner.run`."""
        return self._model(batch, kv_caches)
