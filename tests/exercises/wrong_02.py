"""Answers that look right and are not, with the symptom that each must be told.

Most of them were once in an engine or in a course: a decode written over the first token, padding
written to slot 0, a last block read to its end, a plain mean of partial results, a chunk's mask
that begins at 0.
"""

SLOTS = """
import torch

def slot_mapping(block_table, query_lens, seq_lens, block_size, num_slots):
    slots = torch.full((num_slots,), {padding}, dtype=torch.int64)
    start = 0
    for row, (new, length) in enumerate(zip(query_lens, seq_lens)):
        table = block_table[{row}].long()
        position = {position}
        slots[start : start + new] = {slot}
        start += new
    return slots
"""
RIGHT_SLOTS = {
    "padding": "-1",
    "row": "row",
    "position": "torch.arange(length - new, length)",
    "slot": "table[position // block_size] * block_size + position % block_size",
}

PAGES = """
import torch

def paged_attention(query, kv_cache, block_table, seq_lens):
    _, _, kv_heads, block_size, dim = kv_cache.shape
    out = torch.empty_like(query)
    for row, length in enumerate(seq_lens):
        blocks = {blocks}.long()
        key, value = {gather}
        heads = query[row].view(kv_heads, -1, dim)
        scores = heads @ key.transpose(1, 2) * dim**-0.5
        {hide}
        out[row] = (scores.softmax(-1) @ value).view(-1, dim)
    return out
"""
RIGHT_PAGES = {
    "blocks": "block_table[row, : -(-length // block_size)]",
    "gather": "kv_cache[:, blocks].transpose(1, 2).flatten(2, 3)[:, :, :length]",
    "hide": "pass",
}

ONLINE = """
import torch

def online_softmax(tiles):
    top, total, acc = torch.tensor(-torch.inf), torch.tensor(0.0), 0.0
    for scores, values in tiles:
        new_top = {new_top}
        base = {base}
        weights, shrink = (scores - base).exp(), (top - base).exp()
        total = total {shrink_total} + weights.sum()
        acc = acc {shrink_acc} + weights @ values
        top = new_top
    if total == 0:
        return torch.zeros_like(acc), torch.tensor(-torch.inf)
    return acc / total, {lse}
"""
RIGHT_ONLINE = {
    "new_top": "torch.maximum(top, scores.max())",
    "base": "torch.zeros(()) if new_top == -torch.inf else new_top",
    "shrink_total": "* shrink",
    "shrink_acc": "* shrink",
    "lse": "top + total.log()",
}

MERGE = """
import torch

def merge(outs, lses):
    lse = {lse}
    base = torch.where(lse == -torch.inf, 0.0, lse)
    weights = {weights}
    return {out}, {returned}
"""
RIGHT_MERGE = {
    "lse": "torch.logsumexp(lses, 0)",
    "weights": "(lses - base).exp()[..., None]",
    "out": "(weights * torch.where(weights > 0, outs, 0.0)).sum(0)",
    "returned": "lse",
}

BOUNDS = """
def key_bounds(past, num_new, index, tile_queries, tile_keys):
    first = index * tile_queries
    end = {end}
    every = {every}
    return every, end
"""
RIGHT_BOUNDS = {
    "end": "past + min(first + tile_queries, num_new)",
    "every": "(past + first + 1) // tile_keys * tile_keys",
}


def slots(**changed: str) -> str:
    """A version of exercise 02.1."""
    return SLOTS.format(**RIGHT_SLOTS | changed)


def pages(**changed: str) -> str:
    """A version of exercise 02.2."""
    return PAGES.format(**RIGHT_PAGES | changed)


def online(**changed: str) -> str:
    """A version of exercise 02.3."""
    return ONLINE.format(**RIGHT_ONLINE | changed)


def merge(**changed: str) -> str:
    """A version of exercise 02.4."""
    return MERGE.format(**RIGHT_MERGE | changed)


def bounds(**changed: str) -> str:
    """A version of exercise 02.5."""
    return BOUNDS.format(**RIGHT_BOUNDS | changed)


WHOLE = "kv_cache[:, blocks].transpose(1, 2).flatten(2, 3)"

WRONG: dict[str, list[tuple[str, str]]] = {
    "02.1": [
        (slots(position="torch.arange(new)"), r"the past is ignored"),
        (slots(padding="0"), r"padding has slots"),
        (
            slots(slot="table[position // block_size] + position % block_size"),
            r"a block's number is not its first slot",
        ),
        (slots(row="0"), r"every row uses row 0's table"),
        (
            slots(position="torch.arange(length - new + 1, length + 1)").replace(
                "position // block_size]", "(position // block_size).clamp(max=len(table) - 1)]"
            ),
            r"one too far",
        ),
        (slots(slot=RIGHT_SLOTS["slot"].replace("position %", "position + 0 *")), r"runs on past"),
    ],
    "02.2": [
        (
            pages(blocks="torch.arange(-(-length // block_size))"),
            r"the table is not read",
        ),
        (pages(gather=WHOLE), r"the last block is read to its end"),
        (
            pages(
                blocks="block_table[row]",
                gather=WHOLE,
                hide="scores[..., length:] = -torch.inf",
            ),
            r"weight of 0 times NaN is NaN",
        ),
        (
            pages(blocks="block_table[0, : -(-length // block_size)]"),
            r"keys of another row",
        ),
        (
            pages(gather=f"{WHOLE}[:, :, : max(1, length - 1)]"),
            r"the newest token's own key is not seen",
        ),
        (
            pages(
                gather="kv_cache[:, blocks].reshape(2, -1, kv_heads, dim)[:, :length]"
                ".transpose(1, 2)"
            ),
            r"slots and heads are mixed up",
        ),
    ],
    "02.3": [
        (online(shrink_acc=""), r"the numerator is not brought to the new scale"),
        (online(shrink_total=""), r"the sum is not brought to the new scale"),
        (online(base="new_top"), r"a tile in which nothing is seen gives -inf - -inf"),
        (
            online(
                new_top="torch.zeros(())", base="torch.zeros(())", shrink_total="", shrink_acc=""
            ),
            r"exp overflows",
        ),
        (online(lse="total.log()"), r"lacks the largest score"),
        (online(lse="top"), r"that is the largest score"),
    ],
    "02.4": [
        (merge(out="torch.where(weights > 0, outs, 0.0).mean(0)"), r"the plain mean"),
        (merge(weights="lses.exp()[..., None]"), r"do not add up to 1"),
        (
            merge(weights="(w := lses.exp()[..., None]) / w.sum(0)"),
            r"exp\(lse\) overflows",
        ),
        (merge(out="(weights * outs).sum(0)"), r"0 times NaN is NaN"),
        (merge(returned="lses.max(0).values"), r"the next merge would weigh it wrongly"),
        (
            merge().replace("base = torch.where(lse == -torch.inf, 0.0, lse)", "base = lse"),
            r"two empty parts make an empty one",
        ),
    ],
    "02.5": [
        (bounds(end="min(first + tile_queries, num_new)"), r"the past is forgotten"),
        (bounds(end="past + first + tile_queries"), r"what follows is another row's, or NaN"),
        (bounds(every="end // tile_keys * tile_keys"), r"tokens see the future"),
        (bounds(every="past + first + 1"), r"would overlap"),
        (bounds(every="(first + 1) // tile_keys * tile_keys"), r"right, but slow"),
        (bounds(end="past + num_new"), r"keys that no query of the tile sees"),
    ],
}
