"""Rotary position embedding (Su et al. 2021) and the ways of stretching it to longer contexts.

Each pair of a head's dimensions is turned by an angle that grows with the position; pair i is
(i, i + head_dim / 2), the half-split order that Hugging Face checkpoints use. Cosines and sines of
all positions are computed once, in fp32.

The formulas for "linear", "yarn" (Peng et al. 2023) and "llama3" are those of transformers. For
"dynamic" (NTK-aware scaling that grows with the length) transformers uses, for all tokens of one
forward pass, the frequencies of the longest length seen. Here a token at position p always gets
the frequencies of length p + 1: the same within the original length, the same token by token
beyond it, and a function of the position alone, which caching and batching need.
"""

import math

import torch
from torch import nn

from nanoserve.config.arch import ModelArch, RopeSettings
from nanoserve.errors import ModelLoadError


def rotary_embedding(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn every head of every token.

    Args:
        x: [num_tokens, num_heads, head_dim]; may be a strided view.
        cos: [num_tokens, 1, head_dim], each half the cosines of all pairs.
        sin: [num_tokens, 1, head_dim], the sines, with a minus in the first half.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous: with halves (a, b) of x this is
        (a cos - b sin, b cos + a sin).
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.mul(x, cos).addcmul_(swapped, sin)


def _default_inv_freq(theta: float | torch.Tensor, dim: int) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return 1.0 / (theta**exponents)


def _llama3_inv_freq(rope: RopeSettings, dim: int) -> torch.Tensor:
    """Slow down long waves by `factor`, leave short ones, blend in between."""
    inv_freq = _default_inv_freq(rope.theta, dim)
    factor, original = rope.params["factor"], rope.params["original_max_position_embeddings"]
    low, high = rope.params["low_freq_factor"], rope.params["high_freq_factor"]
    wavelength = 2 * math.pi / inv_freq
    blend = ((original / wavelength - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * inv_freq / factor + blend * inv_freq


def _yarn_inv_freq(rope: RopeSettings, dim: int) -> torch.Tensor:
    """Interpolate the dimensions that turn rarely in the original length; keep the others."""
    factor, original = rope.params["factor"], rope.params["original_max_position_embeddings"]

    def dimension_of(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension_of(rope.params.get("beta_fast") or 32)
    high = dimension_of(rope.params.get("beta_slow") or 1)
    if rope.params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    steps = torch.arange(dim // 2, dtype=torch.float32, device="cpu")
    interpolate = ((steps - low) / (high - low)).clamp(0, 1)
    inv_freq = _default_inv_freq(rope.theta, dim)
    return inv_freq / factor * interpolate + inv_freq * (1 - interpolate)


def _yarn_attention_factor(rope: RopeSettings) -> float:
    params = rope.params
    if params.get("attention_factor") is not None:
        return float(params["attention_factor"])

    def mscale(weight: float) -> float:
        factor = params["factor"]
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)


def _dynamic_theta(
    rope: RopeSettings, dim: int, original: int, positions: torch.Tensor
) -> torch.Tensor:
    """The base for each position, [num_positions, 1]: larger beyond the original length."""
    factor = rope.params["factor"]
    lengths = (positions + 1).clamp(min=original).double()
    growth = (factor * lengths / original - (factor - 1)) ** (dim / (dim - 2))
    return (rope.theta * growth).float().unsqueeze(-1)


def rope_angles(arch: ModelArch, num_positions: int) -> tuple[torch.Tensor, float]:
    """Angles of all positions, [num_positions, head_dim / 2] fp32, and the factor on cos and sin.

    Raises:
        ModelLoadError: an unknown rope type.
    """
    rope, dim = arch.rope, arch.head_dim
    positions = torch.arange(num_positions, dtype=torch.float32, device="cpu")
    scale = 1.0
    if rope.rope_type == "default":
        inv_freq = _default_inv_freq(rope.theta, dim)
    elif rope.rope_type == "linear":
        inv_freq = _default_inv_freq(rope.theta, dim) / rope.params["factor"]
    elif rope.rope_type == "llama3":
        inv_freq = _llama3_inv_freq(rope, dim)
    elif rope.rope_type == "yarn":
        inv_freq, scale = _yarn_inv_freq(rope, dim), _yarn_attention_factor(rope)
    elif rope.rope_type == "dynamic":
        theta = _dynamic_theta(rope, dim, arch.max_position_embeddings, positions)
        inv_freq = _default_inv_freq(theta, dim)
    else:
        raise ModelLoadError(f"rope type {rope.rope_type!r} is not supported")
    return positions.unsqueeze(-1) * inv_freq, scale


class RotaryEmbedding(nn.Module):
    """Cosines and sines of every position that the model may see."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, arch: ModelArch) -> None:
        super().__init__()
        angles, scale = rope_angles(arch, arch.context_length)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        device = torch.get_default_device()
        dtype = torch.get_default_dtype()
        self.register_buffer("cos", torch.cat((cos, cos), -1).to(device, dtype), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), -1).to(device, dtype), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines for one step, in the form `rotary_embedding` takes.

        Args:
            positions: [num_tokens] int64.

        Returns:
            Two tensors of [num_tokens, 1, head_dim].
        """
        return (
            self.cos.index_select(0, positions).unsqueeze(1),
            self.sin.index_select(0, positions).unsqueeze(1),
        )
