import torch


def merge(outs, lses):
    lse = torch.logsumexp(lses, 0)
    base = torch.where(lse == -torch.inf, 0.0, lse)
    weights = (lses - base).exp()[..., None]
    seen = torch.where(weights > 0, outs, 0.0)
    return (weights * seen).sum(0), lse
