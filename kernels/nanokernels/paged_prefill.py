"""Attention of many new tokens over their own past: prefill, chunks of it, and mixed batches.

Each row has new tokens and a past of any length; both lie in the paged cache when this runs. One
program takes a tile of new tokens of one row, with the query heads that share a KV head packed
beside each other, and walks the keys in tiles with a running softmax (FlashAttention-2, Dao 2023).
Keys that every query of the tile sees go through a loop without a mask; only the diagonal pays for
one. Source for reading through a block table in prefill: vLLM.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanokernels.launch import dot_type, power_of_two
from nanokernels.prefill_plan import PrefillPlan, plan_prefill
from nanokernels.softmax import LN2, LOG2E, add_sink, cap, close


@triton.jit
def _load_tile(
    keys, values, pages, first_key, first_column, start, token, inside, cache_block, cache_slot,
    dim, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, DENSE: tl.constexpr, WHOLE_DIM: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Keys and values of one tile: boxes of two matrices, or page by page."""
    if DENSE:
        k = keys.load([first_key + start, first_column])
        v = values.load([first_key + start, first_column])
        if MASKED:
            # What follows is another row's. Its weight is 0, but 0 times NaN would be NaN.
            v = tl.where(inside[:, None], v, 0.0)
    else:
        if MASKED:
            page = tl.load(pages + token // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            page = tl.load(pages + token // BLOCK_SIZE).to(tl.int64)
        at = page * cache_block + (token % BLOCK_SIZE) * cache_slot
        at = at[:, None] + dim[None, :]
        if MASKED or not WHOLE_DIM:
            mask = inside[:, None] & (dim < DIM)[None, :]
            k = tl.load(keys + at, mask=mask, other=0.0)
            v = tl.load(values + at, mask=mask, other=0.0)
        else:
            k = tl.load(keys + at)
            v = tl.load(values + at)
    return k, v


@triton.jit
def _key_tile(
    q, top, total, acc, keys, values, pages, first_key, first_column, start, end, position, scale,
    soft_cap, cache_block, cache_slot, dim,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, DENSE: tl.constexpr, WHOLE_DIM: tl.constexpr, MASKED: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values into the running softmax."""
    token = start + tl.arange(0, TILE)
    inside = token < end
    if WINDOW > 0:
        # Pages before it may be another row's by now: their weight is 0, but 0 times NaN is NaN.
        inside = inside & (token > tl.min(position, 0) - WINDOW)
    k, v = _load_tile(
        keys, values, pages, first_key, first_column, start, token, inside, cache_block,
        cache_slot, dim, DIM, BLOCK_SIZE, DENSE, WHOLE_DIM, MASKED,
    )  # fmt: skip
    scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee")
    factor = scale * LOG2E  # turns scores into exponents
    if SOFT_CAP:
        scores = cap(scores * scale, soft_cap)
        factor = LOG2E
    if MASKED:
        seen = inside[None, :] & (token[None, :] <= position[:, None])
        if WINDOW > 0:
            seen = seen & (token[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    # A line that sees nothing yet has top -inf; keep -inf - -inf out of the exponent.
    base = new_top
    if MASKED:
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores * factor - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(weights.to(DOT), v.to(DOT), acc, input_precision="ieee")
    return new_top, total, acc


@triton.jit
def _walk_keys(
    q, position, begin, every, end, keys, values, pages, first_key, first_column, scale, soft_cap,
    cache_block, cache_slot, dim,
    ROWS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr, DENSE: tl.constexpr,
    DOT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys [begin, end); each query sees those before `every`."""
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for start in tl.range(begin, every, TILE, num_stages=STAGES):
        top, total, acc = _key_tile(
            q, top, total, acc, keys, values, pages, first_key, first_column, start, end, position,
            scale, soft_cap, cache_block, cache_slot, dim, DIM, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP,
            DENSE, DIM == DIM_PAD, False, DOT,
        )  # fmt: skip
    for start in tl.range(every, end, TILE, num_stages=STAGES):
        top, total, acc = _key_tile(
            q, top, total, acc, keys, values, pages, first_key, first_column, start, end, position,
            scale, soft_cap, cache_block, cache_slot, dim, DIM, BLOCK_SIZE, TILE, WINDOW, SOFT_CAP,
            DENSE, DIM == DIM_PAD, True, DOT,
        )  # fmt: skip
    return top, total, acc


@triton.jit
def _prefill_kernel(
    query, key_data, value_data, table, query_start, lengths, key_start, tiles, sinks, out, lse,
    scale, soft_cap, query_token, query_head, cache_block, cache_head, cache_slot, table_row,
    out_token, out_head, lse_token,
    GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, DENSE: tl.constexpr, DOT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    kv_head, work = tl.program_id(0), tl.program_id(1)
    row, index = tl.load(tiles + 2 * work), tl.load(tiles + 2 * work + 1)
    if row < 0:  # room left in a list of fixed length
        return
    start_token = tl.load(query_start + row)
    num_new = tl.load(query_start + row + 1) - start_token
    past = tl.load(lengths + row) - num_new

    # A line of the tile is one head of one token: token-major, so that each token's heads touch.
    line, dim = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    token = index * TOKENS + line // GROUP
    head = kv_head * GROUP + line % GROUP
    real = (line < TOKENS * GROUP) & (token < num_new)
    mask = real[:, None] & (dim < DIM)[None, :]
    at = (start_token + token).to(tl.int64) * query_token + head * query_head
    q = tl.load(query + at[:, None] + dim[None, :], mask=mask, other=0.0).to(DOT)

    # Keys [0, every) are seen by each query of the tile, [every, end) by some.
    end = past + tl.minimum((index + 1) * TOKENS, num_new)
    begin, every = 0, (past + index * TOKENS + 1) // TILE * TILE
    if WINDOW > 0:
        begin = tl.maximum(past + index * TOKENS - WINDOW + 1, 0) // TILE * TILE
        every = begin  # with a window, every tile is masked
    pages = table + row.to(tl.int64) * table_row
    first_key, first_column = 0, 0
    if DENSE:
        keys, values = key_data, value_data
        first_key, first_column = tl.load(key_start + row), kv_head * DIM
    else:
        keys = key_data + kv_head.to(tl.int64) * cache_head
        values = value_data + kv_head.to(tl.int64) * cache_head
    top, total, acc = _walk_keys(
        q, past + token, begin, every, end, keys, values, pages, first_key, first_column, scale,
        soft_cap, cache_block, cache_slot, dim, ROWS, DIM, DIM_PAD, BLOCK_SIZE, TILE, WINDOW,
        SOFT_CAP, DENSE, DOT, STAGES,
    )  # fmt: skip

    if SINKS:
        sink = tl.load(sinks + head, mask=real, other=float("-inf"))
        top, total, acc = add_sink(sink, top, total, acc)
    safe, log_sum = close(top, total)
    acc = acc / safe[:, None]
    at = (start_token + token).to(tl.int64) * out_token + head * out_head
    tl.store(out + at[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=mask)
    at = (start_token + token).to(tl.int64) * lse_token + head
    tl.store(lse + at, log_sum * LN2, mask=real)


def tile_tokens(group: int, rows: int) -> int:
    """New tokens of a tile of `rows` lines, `group` lines a token."""
    return max(1, rows // group)


def default_shape(dim_pad: int, dtype: torch.dtype, most_new: int, group: int) -> tuple[int, int]:
    """(lines, keys) of a tile: large for large prefills, small where there is little to fill it."""
    size = dim_pad * torch.finfo(dtype).bits // 8
    lines, keys = (128, 128) if size <= 256 else (64, 64) if size <= 512 else (32, 32)
    needed = power_of_two(max(16, most_new * group))
    return max(power_of_two(group), min(lines, needed)), keys


def paged_prefill(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    query_lens: list[int],
    lengths: list[int],
    plan: PrefillPlan | None = None,
    dense: tuple[torch.Tensor, torch.Tensor] | None = None,
    key_start: torch.Tensor | None = None,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    shape: tuple[int, int] | None = None,
    num_warps: int = 0,
    num_stages: int = 3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each row's new tokens over its cached keys and values, in one launch.

    Args:
        query: [num_tokens, num_heads, head_dim], row after row; padding after them is left alone.
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim], the new tokens' included.
        block_table: [num_rows, max_blocks] int32; not read with `dense`.
        query_start_loc: [num_rows + 1] int32.
        seq_lens: [num_rows] int32, tokens after this step.
        scale: multiplies the scores.
        query_lens, lengths: new tokens and tokens of each row, on the host.
        plan: this step's work list; made here when missing.
        dense: keys and values to read instead of the cache, each [num_keys, num_kv_heads,
            head_dim], the rows' one row after another; a token's heads lie side by side.
        key_start: [num_rows] int32, where each row's begin in `dense`.
        sliding_window, soft_cap, sinks, out, lse: as in `paged_decode`.
        shape: (lines, keys) of a tile; a line is one head of one token.

    Returns:
        (out, lse): lse is [num_tokens, num_heads] float32, natural log; -inf where nothing is seen.
    """
    num_tokens, num_heads, dim = query.shape
    num_kv_heads = kv_cache.shape[2] if dense is None else dense[0].shape[1]
    group, dim_pad = num_heads // num_kv_heads, power_of_two(dim)
    out = torch.empty_like(query) if out is None else out
    if lse is None:
        lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=query.device)
    shape = shape or default_shape(dim_pad, query.dtype, max(query_lens, default=0), group)
    tokens = tile_tokens(group, shape[0])
    plan = plan or plan_prefill(query_lens, lengths, tokens, query.device)
    if plan.tokens != tokens:
        raise ValueError(f"the plan's tiles have {plan.tokens} tokens, the kernel's {tokens}")
    if plan.tiles.shape[0] == 0:
        return out, lse
    _launch(
        query, kv_cache, dense, (block_table, query_start_loc, seq_lens, key_start), plan,
        (scale, soft_cap, sinks, sliding_window or 0), out, lse, shape,
        num_warps or (8 if shape[0] >= 128 else 4), num_stages,
    )  # fmt: skip
    return out, lse


def _launch(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    dense: tuple[torch.Tensor, torch.Tensor] | None,
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    plan: PrefillPlan,
    scores: tuple[float, float, torch.Tensor | None, int],
    out: torch.Tensor,
    lse: torch.Tensor,
    shape: tuple[int, int],
    num_warps: int,
    num_stages: int,
) -> None:
    """Start one program for each KV head and tile.

    Args:
        rows: block table, query starts, lengths, and where each row's keys begin in `dense`.
        scores: scale, soft cap, sinks, sliding window.
        shape: (lines, keys) of a tile.
    """
    num_heads, dim = query.shape[1:]
    num_kv_heads = kv_cache.shape[2] if dense is None else dense[0].shape[1]
    dim_pad, (lines, tile) = power_of_two(dim), shape
    block_table, query_start_loc, seq_lens, key_start = rows
    scale, soft_cap, sinks, window = scores
    if dense is None:
        keys, values = kv_cache[0], kv_cache[1]
    else:
        keys, values = (_descriptor(part, tile, dim_pad) for part in dense)
    _prefill_kernel[(num_kv_heads, plan.tiles.shape[0])](
        query, keys, values, block_table, query_start_loc, seq_lens,
        key_start if key_start is not None else seq_lens, plan.tiles,
        sinks if sinks is not None else lse, out, lse, scale, soft_cap,
        *query.stride()[:2], *kv_cache.stride()[1:4], block_table.stride(0),
        *out.stride()[:2], lse.stride(0),
        GROUP=num_heads // num_kv_heads, TOKENS=plan.tokens, ROWS=lines, DIM=dim, DIM_PAD=dim_pad,
        BLOCK_SIZE=kv_cache.shape[3], TILE=tile, WINDOW=window, SOFT_CAP=soft_cap > 0,
        SINKS=sinks is not None, DENSE=dense is not None, DOT=dot_type(query.dtype),
        STAGES=num_stages, num_warps=num_warps,
    )  # fmt: skip


def _descriptor(part: torch.Tensor, tile: int, dim_pad: int) -> TensorDescriptor:
    """Keys or values as a matrix, [num_keys, num_kv_heads * head_dim], to be copied in boxes."""
    num_keys, heads, dim = part.shape
    shape, strides = [num_keys, heads * dim], [part.stride(0), 1]
    return TensorDescriptor(part, shape, strides, [tile, dim_pad])
