"""One forward pass, as data: what a step computes, and how attention finds the past.

`ForwardBatch` is handed down through the model as an argument; there is no global context to look
anything up in. The `AttentionBackend` protocol is the one thing a layer calls to attend. This
module must not know requests, schedulers or block pools.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nanoserve.registry import Registry


@dataclass
class AttentionMetadata:
    """Where each row's past lies, for one KV cache group. Rows are requests, in batch order.

    Attributes:
        query_start_loc: [num_reqs + 1] int32, row i's new tokens are [start[i], start[i + 1]).
        seq_lens: [num_reqs] int32, tokens of row i after this step (past and new).
        block_table: [num_reqs, max_blocks] int32, row i's j-th block; unused entries are 0.
        slot_mapping: [num_tokens] int64, block * block_size + offset where each new token's KV
            goes; -1 writes nowhere (padding).
        block_size: tokens a block holds.
        query_lens, seq_lens_cpu: the same lengths on the host, [num_reqs].
        scratch: a backend's own per-step work (gather indices, masks), made in `prepare`.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    block_size: int
    query_lens: list[int]
    seq_lens_cpu: list[int]
    scratch: Any = None

    @property
    def num_reqs(self) -> int:
        """Rows in the batch."""
        return len(self.query_lens)


@dataclass
class ForwardBatch:
    """Everything a model needs for one step.

    Attributes:
        input_ids: [num_tokens] int64.
        positions: [num_tokens] int64, each token's place in its own sequence.
        attn: one AttentionMetadata a KV cache group (a layer's `kv_group` picks its own).
        logits_indices: [num_rows] int64, the tokens whose logits are wanted.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    attn: list[AttentionMetadata]
    logits_indices: torch.Tensor


@dataclass
class AttentionShape:
    """What a backend must know of the layer that calls it.

    `sliding_window` counts the tokens a query may see, itself included; None is unlimited.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None


class AttentionBackend(Protocol):
    """Attention over new tokens and their past.

    One object serves all layers. Per step: `prepare` once for each KV group, then per layer
    `forward`, which first writes the new keys and values to the cache and then reads through it.
    """

    name: str

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """Shape of one layer's cache tensor (keys and values together)."""
        ...

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Work shared by all layers of the step, left in `metadata.scratch`."""
        ...

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        shape: AttentionShape,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [num_tokens, num_heads, head_dim].
            key, value: [num_tokens, num_kv_heads, head_dim], of the new tokens only.
            kv_cache: this layer's cache; written at `metadata.slot_mapping`.

        Returns:
            [num_tokens, num_heads, head_dim].
        """
        ...


ATTENTION_BACKENDS = Registry(
    "attention backend",
    {
        "dense": "nanoserve.attention.dense:DenseBackend",
        "torch_paged": "nanoserve.attention.torch_paged:TorchPagedBackend",
        "triton_paged": "nanoserve.attention.triton_paged:TritonPagedBackend",
    },
)
