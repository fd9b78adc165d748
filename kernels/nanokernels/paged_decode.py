"""Decode attention over pages: one new token a row, its past read through the block table.

Split-KV (flash-decoding): a row's past is cut into splits that run side by side, each leaving its
own softmax-weighted sum and log-sum-exp; a second kernel merges a row's splits exactly. The query
heads that share a KV head are packed into one tile, so that the tensor cores multiply them in one
go and each key is read once. Source: FlashDecoding (Dao et al. 2023); paged caches: vLLM.
"""

import torch
import triton
import triton.language as tl

from nanokernels.decode_plan import DecodePlan, plan_decode
from nanokernels.launch import dot_type, multiprocessors, power_of_two
from nanokernels.runtime import INTERPRET
from nanokernels.softmax import LN2, LOG2E, add_sink, cap, close

# The tensor cores multiply at least 16 rows.
MIN_ROWS = 16


@triton.jit
def _page_tile(past, inside, dim, pages, keys, values, cache_block, cache_slot,
               DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, DOT: tl.constexpr):  # fmt: skip
    """Keys and values of the tokens `past` of a row, each [TILE, DIM_PAD], by way of its pages."""
    page = tl.load(pages + past // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    at = page * cache_block + (past % BLOCK_SIZE) * cache_slot
    at = at[:, None] + dim[None, :]
    mask = inside[:, None] & (dim < DIM)[None, :]
    k = tl.load(keys + at, mask=mask, other=0.0).to(DOT)
    v = tl.load(values + at, mask=mask, other=0.0).to(DOT)
    return k, v


@triton.jit
def _decode_kernel(
    query, cache, table, items, sinks, out, lse, parts, part_lse, scale, soft_cap,
    query_row, query_head, cache_kind, cache_block, cache_head, cache_slot, table_row,
    out_row, out_head, lse_row,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr, DOT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:  # the merging kernel may take its place already; it waits for this one's results
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 6
    # Six loads that do not wait for each other.
    row = tl.load(item)
    token = tl.load(item + 1).to(tl.int64)
    begin, end = tl.load(item + 2), tl.load(item + 3)
    part, is_first = tl.load(item + 4), tl.load(item + 5)
    if row < 0:
        return

    member, dim = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    real = member < GROUP
    head = kv_head * GROUP + member
    mask = real[:, None] & (dim < DIM)[None, :]
    q_at = token * query_row + head[:, None] * query_head + dim[None, :]
    q = tl.load(query + q_at, mask=mask, other=0.0).to(DOT)

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    pages = table + row.to(tl.int64) * table_row
    keys = cache + kv_head.to(tl.int64) * cache_head
    values = keys + cache_kind
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        past = start + tl.arange(0, TILE)
        inside = past < end
        k, v = _page_tile(
            past, inside, dim, pages, keys, values, cache_block, cache_slot, DIM, BLOCK_SIZE, DOT
        )
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFT_CAP:
            scores = cap(scores, soft_cap)
        scores = tl.where(inside[None, :], scores * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(DOT), v, input_precision="ieee")
        top = new_top

    if SINKS:  # noqa: SIM102 (the outer `if` is decided by the compiler)
        if is_first == 1:  # once a row
            sink = tl.load(sinks + head, mask=real, other=float("-inf"))
            top, total, acc = add_sink(sink, top, total, acc)
    safe, log_sum = close(top, total)
    acc = acc / safe[:, None]
    if part < 0:
        target = token * out_row + head[:, None] * out_head + dim[None, :]
        tl.store(out + target, acc.to(out.dtype.element_ty), mask=mask)
        tl.store(lse + token * lse_row + head, log_sum * LN2, mask=real)
    else:
        line = part.to(tl.int64) * HEADS + head
        tl.store(parts + line[:, None] * DIM + dim[None, :], acc, mask=mask)
        tl.store(part_lse + line, log_sum, mask=real)


@triton.jit
def _combine_kernel(
    parts, part_lse, merges, out, lse, out_row, out_head, lse_row,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    merge = merges + tl.program_id(1) * 3
    token = tl.load(merge).to(tl.int64)
    begin = tl.load(merge + 1)
    end = begin + tl.load(merge + 2)
    if PDL:
        tl.extra.cuda.gdc_wait()
    dim = tl.arange(0, DIM_PAD)
    top = float("-inf")
    total = 0.0
    acc = tl.zeros([DIM_PAD], tl.float32)
    for start in range(begin, end, TILE):
        item = start + tl.arange(0, TILE)
        inside = item < end
        part = item.to(tl.int64) * HEADS + head
        log_sum = tl.load(part_lse + part, mask=inside, other=float("-inf"))
        mask = inside[:, None] & (dim < DIM)[None, :]
        piece = tl.load(parts + part[:, None] * DIM + dim[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, tl.max(log_sum, 0))
        # An empty split has log-sum -inf; keep -inf - -inf out of the exponent.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(log_sum - base)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(weight, 0)
        acc = acc * shrink + tl.sum(weight[:, None] * piece, 0)
        top = new_top
    safe, log_sum = close(top, total)
    at = token * out_row + head * out_head + dim
    tl.store(out + at, (acc / safe).to(out.dtype.element_ty), mask=dim < DIM)
    tl.store(lse + token * lse_row + head, log_sum * LN2)


def paged_decode(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    plan: DecodePlan | None = None,
    sliding_window: int | None = None,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    tile: int = 0,
    num_warps: int = 2,
    num_stages: int = 3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one new token a row over that row's cached keys and values.

    Args:
        query: [num_tokens, num_heads, head_dim], the last dimension contiguous.
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim], keys first.
        block_table: [num_rows, max_blocks] int32.
        seq_lens: [num_rows] int32, tokens in each row's cache, the new one included; a row of
            length 0 yields zeros and log-sum-exp -inf.
        scale: multiplies the scores.
        plan: this step's work list; made here from seq_lens when missing. Tokens that it has no
            item for are left alone.
        sliding_window: tokens a query sees, itself included; only read where the plan is made.
        soft_cap: scores become cap * tanh(score / cap); 0 is off.
        sinks: [num_heads], logits that take a share of each softmax; None is off.
        out, lse: where to write, if somewhere that exists.
        tile, num_warps, num_stages: the kernel's shape; tile 0 chooses one.

    Returns:
        (out, lse): out is [num_tokens, num_heads, head_dim], lse is [num_tokens, num_heads]
        float32, the natural log-sum-exp of the scores.
    """
    num_tokens, num_heads, dim = query.shape
    num_kv_heads = kv_cache.shape[2]
    out = torch.empty_like(query) if out is None else out
    if lse is None:
        lse = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=query.device)
    if plan is None:
        width = multiprocessors(query.device)
        plan = plan_decode(seq_lens.tolist(), num_kv_heads, query.device, width, sliding_window)
    if plan.items.shape[0] == 0:
        return out, lse
    size = (plan.num_parts, num_heads)
    parts = torch.empty((*size, dim), dtype=torch.float32, device=query.device)
    part_lse = torch.empty(size, dtype=torch.float32, device=query.device)
    overlap = plan.num_parts > 0 and not INTERPRET and query.device.type == "cuda"
    _decode_kernel[(num_kv_heads, plan.items.shape[0])](
        query, kv_cache, block_table, plan.items, sinks if sinks is not None else lse,
        out, lse, parts, part_lse, scale, soft_cap,
        *query.stride()[:2], *kv_cache.stride()[:4], block_table.stride(0),
        *out.stride()[:2], lse.stride(0),
        **_shape_of(query, kv_cache), TILE=tile or default_tile(query),
        SOFT_CAP=soft_cap > 0, SINKS=sinks is not None, DOT=dot_type(query.dtype),
        STAGES=num_stages, PDL=overlap, num_warps=num_warps,
    )  # fmt: skip
    if plan.num_parts:
        _combine(parts, part_lse, plan, out, lse, overlap)
    return out, lse


def _shape_of(query: torch.Tensor, kv_cache: torch.Tensor) -> dict[str, int]:
    """The constants that the kernel is compiled for."""
    num_heads, dim = query.shape[1:]
    group = num_heads // kv_cache.shape[2]
    return {
        "GROUP": group,
        "ROWS": max(MIN_ROWS, power_of_two(group)),
        "HEADS": num_heads,
        "DIM": dim,
        "DIM_PAD": power_of_two(dim),
        "BLOCK_SIZE": kv_cache.shape[3],
    }


def default_tile(query: torch.Tensor) -> int:
    """Tokens of a tile: 64 at head dim 128 in 16 bits, as many bytes for others."""
    size = power_of_two(query.shape[-1]) * query.element_size()
    return max(16, min(128, 64 * 256 // size))


def _combine(
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    plan: DecodePlan,
    out: torch.Tensor,
    lse: torch.Tensor,
    overlap: bool,
) -> None:
    """Merge the parts of every row that was split, and write the rows' results."""
    num_heads, dim = parts.shape[1:]
    options = {"launch_pdl": True} if overlap else {}
    _combine_kernel[(num_heads, plan.merges.shape[0])](
        parts, part_lse, plan.merges, out, lse, *out.stride()[:2], lse.stride(0),
        HEADS=num_heads, DIM=dim, DIM_PAD=power_of_two(dim), TILE=16, PDL=overlap, num_warps=4,
        **options,
    )  # fmt: skip
