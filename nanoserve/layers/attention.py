"""The attention layer: what one layer is, handed to whichever backend computes it."""

from collections.abc import Sequence

import torch
from torch import nn

from nanoserve.forward import AttentionBackend, AttentionShape, ForwardBatch


class Attention(nn.Module):
    """One layer's attention over its own KV cache. It has no weights.

    Args:
        shape: heads (this rank's), head size, scale and window.
        layer_index: this layer's place in `kv_caches`.
        backend: what computes it; one object serves all layers.

    Attributes:
        kv_group: the KV cache group whose block table this layer uses. The worker sets it once
            the groups are known.
    """

    def __init__(self, shape: AttentionShape, layer_index: int, backend: AttentionBackend) -> None:
        super().__init__()
        self.shape = shape
        self.layer_index = layer_index
        self.kv_group = 0
        self.backend = backend

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Write the new keys and values, attend, and return [num_tokens, num_heads, head_dim].

        Args:
            query: [num_tokens, num_heads, head_dim].
            key, value: [num_tokens, num_kv_heads, head_dim].
            kv_caches: one tensor a layer.
        """
        return self.backend.forward(
            query,
            key,
            value,
            kv_caches[self.layer_index],
            self.shape,
            batch.attn[self.kv_group],
        )
