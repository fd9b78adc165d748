"""New keys and values into the paged cache, each to the slot that the slot mapping names.

A slot is block * block_size + offset; slot -1 (padding) writes nowhere. The cache is laid out
[2, num_blocks, num_kv_heads, block_size, head_dim], keys first.
"""

import torch
import triton
import triton.language as tl

from nanokernels.launch import power_of_two

# A program moves about this many elements; fewer would leave its warps without work.
ELEMENTS = 1024


@triton.jit
def _kv_write_kernel(
    key,
    value,
    cache,
    slots,
    num_rows,
    key_token,
    key_head,
    value_token,
    value_head,
    cache_kind,
    cache_block,
    cache_head,
    cache_slot,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    # A row is one head of one token.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = row // HEADS, row % HEADS
    slot = tl.load(slots + token, mask=row < num_rows, other=-1)
    dim = tl.arange(0, DIM_PAD)
    mask = (slot >= 0)[:, None] & (dim < DIM)[None, :]
    token64, slot64 = token.to(tl.int64), slot.to(tl.int64)
    at = (slot64 // BLOCK_SIZE) * cache_block + head * cache_head
    at += (slot64 % BLOCK_SIZE) * cache_slot
    at = at[:, None] + dim[None, :]
    from_key = token64 * key_token + head * key_head
    from_value = token64 * value_token + head * value_head
    # The cache's type decides: tl.store casts.
    new_key = tl.load(key + from_key[:, None] + dim[None, :], mask=mask)
    new_value = tl.load(value + from_value[:, None] + dim[None, :], mask=mask)
    tl.store(cache + at, new_key.to(cache.dtype.element_ty), mask=mask)
    tl.store(cache + cache_kind + at, new_value.to(cache.dtype.element_ty), mask=mask)


def kv_write(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write each token's key and value to its slot, in place.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim], the last dimension contiguous.
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim], the last one contiguous.
        slot_mapping: [num_tokens] int64 or int32; -1 writes nowhere.
    """
    num_tokens, heads, dim = key.shape
    if num_tokens == 0:
        return
    dim_pad = power_of_two(dim)
    rows = max(1, ELEMENTS // dim_pad)
    num_rows = num_tokens * heads
    _kv_write_kernel[(triton.cdiv(num_rows, rows),)](
        key,
        value,
        kv_cache,
        slot_mapping,
        num_rows,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        BLOCK_SIZE=kv_cache.shape[3],
        HEADS=heads,
        DIM=dim,
        DIM_PAD=dim_pad,
        ROWS=rows,
        num_warps=4,
    )
