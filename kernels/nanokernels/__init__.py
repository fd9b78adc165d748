"""nanokernels: the Triton kernels of nanoserve. Tensors in, tensors out.

Importing it settles how kernels run in this process (compiled for a GPU, or interpreted on the CPU)
before any kernel is defined, and works without Triton and without a GPU too. This package must not
know requests, schedulers or models.
"""

from nanokernels.runtime import INTERPRET, KernelUnavailableError, require_triton

__all__ = ["INTERPRET", "KernelUnavailableError", "require_triton"]
