"""What the GPU benchmarks hold our kernels against: plain reading, and cuDNN's attention."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right


@triton.jit
def _read_kernel(data, sums, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(STRIDE):
        at = (program * STRIDE + step) * BLOCK + tl.arange(0, BLOCK)
        total += tl.load(data + at)
    tl.store(sums + program, tl.sum(total, 0))


def read_all(data: torch.Tensor, block: int, warps: int) -> torch.Tensor:
    """Read a float32 tensor once, and sum it so that no load can be left out."""
    steps = 16
    programs = data.numel() // (block * steps)
    sums = torch.empty(programs, dtype=torch.float32, device=data.device)
    _read_kernel[(programs,)](data, sums, STRIDE=steps, BLOCK=block, num_warps=warps)
    return sums


def cudnn_attention(
    query: torch.Tensor, dense: torch.Tensor, rows: int, new: int, past: int
) -> Callable[[], torch.Tensor]:
    """cuDNN's causal attention over equal rows, as a call to time.

    Args:
        query: [rows * new, num_heads, head_dim].
        dense: [2, rows * (new + past), num_kv_heads, head_dim].
    """
    heads, kv_heads, dim = query.shape[1], dense.shape[2], query.shape[2]
    q = query.view(rows, new, heads, dim).transpose(1, 2).contiguous()
    kv = dense.reshape(2, rows, new + past, kv_heads, dim).transpose(2, 3)
    key, value = (part.repeat_interleave(heads // kv_heads, 1).contiguous() for part in kv)
    mask = None if past == 0 else causal_lower_right(new, new + past)

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, key, value, mask, is_causal=past == 0)
        return out.transpose(1, 2)

    return call
