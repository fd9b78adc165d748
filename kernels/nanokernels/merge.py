"""Two parts of one softmax put back together, exactly, by their log-sum-exps.

Attention over a set of keys cut in two (a shared prefix and the rest, two splits, two ranks) is the
average of the parts' outputs, weighted by exp(lse). Any grouping of the merges gives the whole.
"""

import torch
import triton
import triton.language as tl

from nanokernels.launch import power_of_two


@triton.jit
def _merge_kernel(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    num_rows,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < num_rows
    a = tl.load(lse_a + row, mask=inside, other=float("-inf"))
    b = tl.load(lse_b + row, mask=inside, other=float("-inf"))
    top = tl.maximum(a, b)
    # Two empty parts: keep -inf - -inf out of the exponent.
    base = tl.where(top == float("-inf"), 0.0, top)
    weight_a, weight_b = tl.exp(a - base), tl.exp(b - base)
    total = weight_a + weight_b
    safe = tl.where(total == 0.0, 1.0, total)
    dim = tl.arange(0, DIM_PAD)
    mask = inside[:, None] & (dim < DIM)[None, :]
    at = row.to(tl.int64)[:, None] * DIM + dim[None, :]
    part_a = tl.load(out_a + at, mask=mask, other=0.0).to(tl.float32)
    part_b = tl.load(out_b + at, mask=mask, other=0.0).to(tl.float32)
    # An empty part counts nothing, whatever its output holds.
    part_a = tl.where((weight_a > 0)[:, None], part_a, 0.0)
    part_b = tl.where((weight_b > 0)[:, None], part_b, 0.0)
    merged = part_a * (weight_a / safe)[:, None] + part_b * (weight_b / safe)[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=mask)
    log_sum = tl.where(total == 0.0, float("-inf"), base + tl.log(safe))
    tl.store(lse + row, log_sum, mask=inside)


def merge_lse(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from attention over each.

    Args:
        out_a, out_b: [num_tokens, num_heads, head_dim], contiguous.
        lse_a, lse_b: [num_tokens, num_heads] float32, natural log; -inf for an empty part, whose
            output may hold anything.

    Returns:
        (out, lse) of the whole.
    """
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    num_rows, dim = lse_a.numel(), out_a.shape[-1]
    if num_rows == 0:
        return out, lse
    dim_pad = power_of_two(dim)
    rows = max(1, 1024 // dim_pad)
    _merge_kernel[(triton.cdiv(num_rows, rows),)](
        out_a.contiguous(),
        lse_a.contiguous(),
        out_b.contiguous(),
        lse_b.contiguous(),
        out,
        lse,
        num_rows,
        DIM=dim,
        DIM_PAD=dim_pad,
        ROWS=rows,
    )
    return out, lse
