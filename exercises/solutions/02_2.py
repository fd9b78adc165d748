import torch


def paged_attention(query, kv_cache, block_table, seq_lens):
    _, _, kv_heads, block_size, dim = kv_cache.shape
    out = torch.empty_like(query)
    for row, length in enumerate(seq_lens):
        blocks = block_table[row, : -(-length // block_size)].long()
        # [2, blocks, kv_heads, slots, dim] -> [2, kv_heads, tokens, dim], without what is behind
        pages = kv_cache[:, blocks].transpose(1, 2).flatten(2, 3)[:, :, :length]
        key, value = pages
        heads = query[row].view(kv_heads, -1, dim)
        weights = (heads @ key.transpose(1, 2) * dim**-0.5).softmax(-1)
        out[row] = (weights @ value).view(-1, dim)
    return out
