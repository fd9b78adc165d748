"""How a layer's matrix product is carried out, once its weights are loaded.

A product is made from a weight and called with activations. The plain one multiplies by the weight
as it is stored. The packed one, for fp32 on CPUs that oneDNN knows, keeps the weight in oneDNN's
blocked order instead: a decode step reads every weight once to use it for a handful of tokens, and
only in that order do the reads run at the speed of memory. Products over other number formats are
further entries of the registry in `nanoserve.layers.ops`.
"""

from typing import Protocol

import torch
import torch.nn.functional as F


class LinearProduct(Protocol):
    """x @ weight.T + bias for one weight.

    Attributes:
        keeps_weight: whether the tensor it was made from is still needed.
    """

    keeps_weight: bool

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[num_tokens, input_size] -> [num_tokens, output_size]."""
        ...


class PlainProduct:
    """The product by the weight as it is, [output_size, input_size]."""

    keeps_weight = True

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[num_tokens, input_size] -> [num_tokens, output_size]."""
        return F.linear(x, self.weight, bias)


class PackedProduct:
    """The product by a copy of the weight in oneDNN's blocked order; fp32 on CPUs only."""

    keeps_weight = False

    def __init__(self, weight: torch.Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[num_tokens, input_size] -> [num_tokens, output_size]."""
        return self._linear(x, self.packed, bias, "none", [], "")


def cpu_product(weight: torch.Tensor) -> LinearProduct:
    """The packed product where oneDNN offers it for this weight, else the plain one."""
    can_pack = (
        weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
    return PackedProduct(weight) if can_pack else PlainProduct(weight)
