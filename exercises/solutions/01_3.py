import torch


def attend(query, key, value):
    new, heads, dim = query.shape
    length, kv_heads, _ = key.shape
    key = key.repeat_interleave(heads // kv_heads, dim=1)
    value = value.repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key).float() * dim**-0.5
    may_see = torch.ones(new, length, dtype=torch.bool).tril(length - new)
    weights = scores.masked_fill(~may_see, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights.to(value.dtype), value)
