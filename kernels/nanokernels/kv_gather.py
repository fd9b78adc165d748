"""Rows' pages copied side by side, so that a long prefill reads its keys as one matrix.

A prefill reads each key once for every tile of queries. Where there are many tiles, looking up the
page each time costs more than copying the pages once: the copy grows with the keys, the attention
with keys times queries.
"""

import itertools

import torch
import triton
import triton.language as tl

from nanokernels.launch import power_of_two


@triton.jit
def _gather_kernel(
    cache,
    table,
    lengths,
    key_start,
    out,
    cache_kind,
    cache_block,
    cache_head,
    cache_slot,
    table_row,
    out_kind,
    out_head,
    out_slot,
    BLOCK_SIZE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = token < tl.load(lengths + row)
    pages = table + row.to(tl.int64) * table_row
    page = tl.load(pages + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    dim = tl.arange(0, DIM_PAD)
    mask = inside[:, None] & (dim < DIM)[None, :]
    source = page * cache_block + head * cache_head + (token % BLOCK_SIZE) * cache_slot
    source = source[:, None] + dim[None, :]
    target = (tl.load(key_start + row) + token).to(tl.int64) * out_slot + head * out_head
    target = target[:, None] + dim[None, :]
    key = tl.load(cache + source, mask=mask)
    value = tl.load(cache + cache_kind + source, mask=mask)
    tl.store(out + target, key, mask=mask)
    tl.store(out + out_kind + target, value, mask=mask)


def kv_gather(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    lengths: list[int],
    key_start: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Every row's keys and values, one row after another.

    Args:
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim].
        block_table: [num_rows, max_blocks] int32.
        seq_lens: [num_rows] int32; `lengths` are the same on the host.
        key_start: [num_rows] int32, where each row is to begin; made here when missing.

    Returns:
        ([2, sum of lengths, num_kv_heads, head_dim], [num_rows] int32: where each row begins).
    """
    kinds, _, heads, block_size, dim = kv_cache.shape
    total = sum(lengths)
    if key_start is None:
        starts = [0, *itertools.accumulate(lengths)][:-1]
        key_start = torch.tensor(starts, dtype=torch.int32, device=kv_cache.device)
    out = torch.empty((kinds, total, heads, dim), dtype=kv_cache.dtype, device=kv_cache.device)
    if total == 0:
        return out, key_start
    dim_pad = power_of_two(dim)
    tokens = max(16, 8192 // dim_pad)
    grid = (triton.cdiv(max(lengths), tokens), len(lengths), heads)
    _gather_kernel[grid](
        kv_cache,
        block_table,
        seq_lens,
        key_start,
        out,
        kv_cache.stride(0),
        kv_cache.stride(1),
        kv_cache.stride(2),
        kv_cache.stride(3),
        block_table.stride(0),
        out.stride(0),
        out.stride(2),
        out.stride(1),
        BLOCK_SIZE=block_size,
        DIM=dim,
        DIM_PAD=dim_pad,
        TOKENS=tokens,
    )
    return out, key_start
