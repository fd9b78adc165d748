"""The gated activation of the MLP: SwiGLU (Shazeer 2020) over the fused gate-up projection."""

import torch
import torch.nn.functional as F
from torch import nn

from nanoserve.errors import ModelLoadError
from nanoserve.layers.ops import get_op


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [num_tokens, 2 * size], gates first.

    Returns:
        [num_tokens, size].
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class SiluAndMul(nn.Module):
    """`silu_and_mul` as a layer.

    Args:
        hidden_act: the activation config.json names.

    Raises:
        ModelLoadError: it is not "silu".
    """

    def __init__(self, hidden_act: str = "silu") -> None:
        super().__init__()
        if hidden_act not in ("silu", "swish"):
            raise ModelLoadError(f"hidden_act {hidden_act!r} is not supported; known: silu")
        self._op = get_op("silu_and_mul")

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[num_tokens, 2 * size] -> [num_tokens, size]."""
        return self._op(gate_up)
