import torch


def apply_rope(x, positions, theta):
    half = x.shape[-1] // 2
    speeds = theta ** (-torch.arange(half) / half)
    angles = positions[:, None, None].float() * speeds
    cos, sin = angles.cos(), angles.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
