"""The running softmax that the attention kernels carry through their keys.

For each line of queries a kernel keeps `top`, the largest exponent so far; `total`, the sum of
2 ** (exponent - top); and `acc`, the values weighted alike. Exponents are scores times log2(e),
since powers of two are what the hardware computes. These functions must not know where keys lie.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def cap(scores, soft_cap):
    """soft_cap * tanh(scores / soft_cap), by way of exp: the interpreter has no libdevice."""
    return soft_cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / soft_cap) + 1.0))


@triton.jit
def add_sink(sink, top, total, acc):
    """A logit that takes its share of the softmax and adds nothing to the sum."""
    sink = sink.to(tl.float32) * LOG2E
    new_top = tl.maximum(top, sink)
    # A line that has seen nothing has top -inf; keep -inf - -inf out of the exponent.
    base = tl.where(new_top == float("-inf"), 0.0, new_top)
    shrink = tl.exp2(top - base)
    return new_top, total * shrink + tl.exp2(sink - base), acc * shrink[:, None]


@triton.jit
def close(top, total):
    """(what to divide by, log2 of the whole sum): 1 and -inf where nothing was seen."""
    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    return safe, tl.where(empty, float("-inf"), top + tl.log2(safe))
