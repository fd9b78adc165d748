"""A model's parts in float64, as plainly as can be, and the ways to get them wrong.

Graders compare answers with these: with the right result, and with what a known mistake would give,
so that a message can name the symptom. Keywords that only a mistake needs have the right value by
default. This module must not know the packages that the course builds.
"""

from typing import Any

import torch

from nanobook.grading import Wrong

Tensor = torch.Tensor


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Seeded normal numbers."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def must_be_tensor(what: str, answer: Any, shape: Any, dtype: torch.dtype) -> Tensor:
    """The answer, if it is a tensor of this shape and type."""
    if not isinstance(answer, Tensor):
        raise Wrong(f"{what} gives {type(answer).__name__}, not a tensor")
    if answer.shape != shape:
        raise Wrong(f"{what} gives shape {list(answer.shape)}; it must be {list(shape)}")
    if answer.dtype != dtype:
        raise Wrong(f"{what} gives {answer.dtype}; it must keep the input's {dtype}")
    return answer


def near(a: Tensor, b: Tensor, tolerance: float = 1e-4) -> bool:
    """Whether two tensors agree to a share of the larger one's largest number."""
    scale = max(b.abs().max().item(), 1e-30)
    return bool((a.double() - b.double()).abs().max() <= tolerance * scale)


def exact_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm in float64."""
    x, weight = x.double(), weight.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turn(
    x: Tensor,
    positions: Tensor,
    theta: float,
    *,
    interleaved: bool = False,
    sign: int = 1,
    step: int = 2,
) -> Tensor:
    """RoPE in float64, and the ways to get it wrong."""
    dim = x.shape[-1]
    speeds = theta ** (-torch.arange(dim // 2, dtype=torch.float64) * step / dim)
    angles = positions.double()[:, None, None] * speeds * sign
    cos, sin = angles.cos(), angles.sin()
    x = x.double()
    if interleaved:
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x[..., : dim // 2], x[..., dim // 2 :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def look_back(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    offset: int | None = None,
    tiled: bool = False,
    scale: float | None = None,
    seen: int = 0,
) -> Tensor:
    """Causal grouped attention in float64, and the ways to get it wrong."""
    new, heads, dim = query.shape
    length, kv_heads, _ = key.shape
    group = heads // kv_heads
    query, key, value = query.double(), key.double(), value.double()
    output = torch.zeros_like(query)
    past = length - new if offset is None else offset
    for head in range(heads):
        kv = head % kv_heads if tiled else head // group
        scores = query[:, head] @ key[:, kv].T * (dim**-0.5 if scale is None else scale)
        visible = torch.ones(new, length).tril(past + seen) > 0
        attention = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        output[:, head] = attention @ value[:, kv]
    return output
