"""The plainest backend: each row's keys and values lie in one contiguous stretch.

A block is as long as the longest sequence, so a row owns exactly one. That wastes what the row
does not use, which is what paging will mend, but attention is the textbook formula over a slice.
"""

import torch

from nanoserve.forward import AttentionMetadata, AttentionShape


class DenseBackend:
    """One block a row; plain softmax attention, row by row."""

    name = "dense"

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """[2 (keys, values), num_blocks, block_size, num_kv_heads, head_dim]."""
        return (2, num_blocks, block_size, num_kv_heads, head_dim)

    def prepare(self, metadata: AttentionMetadata) -> None:
        """The slots to write, without the padding tokens (slot -1)."""
        tokens = torch.nonzero(metadata.slot_mapping >= 0).flatten()
        metadata.scratch = (tokens, metadata.slot_mapping[tokens])

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        shape: AttentionShape,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See `nanoserve.forward.AttentionBackend`."""
        tokens, slots = metadata.scratch
        key_cache, value_cache = kv_cache[0], kv_cache[1]
        key_cache.flatten(0, 1)[slots] = key[tokens]
        value_cache.flatten(0, 1)[slots] = value[tokens]

        output = query.new_zeros(query.shape)
        start = 0
        for row, num_new in enumerate(metadata.query_lens):
            end, length = start + num_new, metadata.seq_lens_cpu[row]
            if num_new:
                block = int(metadata.block_table[row, 0])
                output[start:end] = attend(
                    query[start:end],
                    key_cache[block, :length],
                    value_cache[block, :length],
                    shape,
                )
            start = end
        return output


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    """Causal softmax attention of one row's last tokens over all its tokens.

    Args:
        query: [num_new, num_heads, head_dim], the row's last num_new tokens.
        key, value: [length, num_kv_heads, head_dim].

    Returns:
        [num_new, num_heads, head_dim].
    """
    num_new, length = len(query), len(key)
    heads_per_kv_head = shape.num_heads // shape.num_kv_heads
    key = key.repeat_interleave(heads_per_kv_head, dim=1)
    value = value.repeat_interleave(heads_per_kv_head, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key).float() * shape.scale

    query_position = torch.arange(length - num_new, length, device=query.device).unsqueeze(1)
    key_position = torch.arange(length, device=query.device)
    visible = key_position <= query_position
    if shape.sliding_window is not None:
        visible &= key_position > query_position - shape.sliding_window
    weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights.to(value.dtype), value)
