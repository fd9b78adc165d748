"""What the launchers of several kernels share: sizes, number formats, and the machine's width."""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from nanokernels.runtime import INTERPRET


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`, nor below what a product needs (16)."""
    return max(16, triton.next_power_of_2(size))


def dot_type(dtype: torch.dtype) -> Any:
    """The number format in which a product's operands are multiplied.

    The interpreter computes bf16 on bit patterns, which is silently wrong (Triton 3.6 to 3.9), so
    there everything is multiplied in fp32.
    """
    if INTERPRET or dtype == torch.float32:
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of a heavy kernel run side by side; 1 in the interpreter."""
    if INTERPRET or device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
