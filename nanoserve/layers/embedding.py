"""Token ids to vectors and back: the embedding table and the language-model head.

Over a group's ranks both are split by vocabulary rows. The two may share one table (tied
embeddings), which saves a fifth of a small model's memory.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.layers.gemm import LinearProduct
from nanoserve.layers.group import ParallelGroup, SingleRank
from nanoserve.layers.ops import get_op
from nanoserve.layers.weights import WeightSlot


class VocabParallelEmbedding(nn.Module):
    """The embedding table, its rows split over ranks (the last rank's share may be padded).

    Attributes:
        start: the first token id this rank holds.
        rows: ids this rank holds, padding not counted.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, group: ParallelGroup | None = None
    ) -> None:
        super().__init__()
        self.group = group or SingleRank()
        self.vocab_size = vocab_size
        share = -(-vocab_size // self.group.size)
        self.start = min(self.group.rank * share, vocab_size)
        self.rows = min(share, vocab_size - self.start)
        self.weight = nn.Parameter(torch.zeros(share, hidden_size), requires_grad=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] int64 -> [num_tokens, hidden]."""
        if self.group.size == 1:
            return F.embedding(input_ids, self.weight)
        local = input_ids - self.start
        elsewhere = (local < 0) | (local >= self.rows)
        vectors = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        return self.group.all_reduce(vectors.masked_fill_(elsewhere.unsqueeze(-1), 0.0))

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        """The table, split by rows."""
        full_shape = (self.vocab_size, self.weight.shape[1])
        return {
            f"{name}.weight": WeightSlot(self.weight.data[: self.rows], full_shape, 0, self.start)
        }


class ParallelLMHead(VocabParallelEmbedding):
    """Hidden states to logits, with a table of its own or the embedding's.

    Args:
        tied: share this embedding's table instead of having one.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        group: ParallelGroup | None = None,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        # A tied head never allocates: for a small model the table is a fifth of the weights.
        super().__init__(0 if tied is not None else vocab_size, hidden_size, group)
        self._product: LinearProduct | None = None
        self.tied = tied is not None
        if tied is not None:
            self.vocab_size = vocab_size
            self.weight = tied.weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, vocab_size], whole on every rank."""
        if self._product is None:
            self.process_weights_after_loading()
        assert self._product is not None
        logits = self.group.all_gather(self._product(hidden), dim=-1)
        return logits[:, : self.vocab_size]

    def process_weights_after_loading(self) -> None:
        """Bring the table into the form this device multiplies fastest.

        A tied table stays as well, since the embedding reads rows from it.
        """
        self._product = get_op("linear", self.weight.device)(self.weight)
        if not (self.tied or self._product.keeps_weight):
            self.weight.data = self.weight.data.new_empty(0)

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        """The table; none when it is the embedding's."""
        return {} if self.tied else super().weight_slots(name)
