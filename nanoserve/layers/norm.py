"""Root-mean-square normalisation (Zhang and Sennrich 2019), alone and fused with the residual add.

A decoder layer adds its output to the residual stream and normalises the sum for the next layer.
Doing both in one call saves a pass over memory, which is all that these operations cost.
"""

import torch
from torch import nn

from nanoserve.layers.ops import get_op


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, computed in fp32.

    Args:
        x: [..., size], of any floating type.
        weight: [size].

    Returns:
        [..., size] in the type of x. As in transformers, x is rounded to its own type before it
        meets the weight.
    """
    x32 = x.float()
    # The length first: one pass over x, then a few operations on single numbers.
    length = torch.linalg.vector_norm(x32, dim=-1, keepdim=True)
    mean_square = length.square_().div_(x.shape[-1])
    normed = x32 * mean_square.add_(eps).rsqrt_()
    return normed.to(x.dtype).mul_(weight)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual += x in place, then the norm of the sum.

    Returns:
        (normalised, residual), both [..., size].
    """
    residual.add_(x)
    return rms_norm(residual, weight, eps), residual


class RMSNorm(nn.Module):
    """A learned RMS norm over the last dimension of `size`."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps
        self._norm = get_op("rms_norm")
        self._add_norm = get_op("fused_add_rms_norm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]."""
        return self._norm(x, self.weight, self.eps)

    def add_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to the residual stream (in place) and normalise it: (normalised, residual)."""
        return self._add_norm(x, residual, self.weight, self.eps)
