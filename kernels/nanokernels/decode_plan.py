"""Who reads what in a decode step: the work list of split-KV attention, made once for all layers.

Each row's tokens are cut into splits of one fixed size, and each (row, split) is one item. Items
are the unit of scheduling, so a long row among short ones becomes many items instead of one
straggler. The list is made on the host from the host's lengths; it holds no tensor of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# No split is smaller: below it, merging costs more than it saves.
MIN_SPLIT = 128
# Splits are multiples of this, so that few tiles are cut short.
SPLIT_STEP = 64
# Programs wanted for each multiprocessor, so that enough loads are under way.
PROGRAMS = 4


@dataclass
class DecodePlan:
    """The work list.

    Attributes:
        items: [num_items, 6] int32, one split each: row, token of the row, first key, key after the
            last, part to write (-1: this is the whole row, write the result itself), and 1 for a
            row's first split. A row of -1 is room left in a list of fixed length.
        merges: [num_merged_rows, 3] int32: token, first part, number of parts.
        num_parts: splits that leave a part.
    """

    items: torch.Tensor
    merges: torch.Tensor
    num_parts: int


def choose_split(lengths: Sequence[int], num_kv_heads: int, width: int) -> int:
    """Tokens of a split, so that about `PROGRAMS` programs come to each of `width` processors."""
    total = sum(lengths) * num_kv_heads
    return max(MIN_SPLIT, -(-total // (PROGRAMS * width)))


def cut(size: int, split: int) -> list[tuple[int, int]]:
    """[0, size) in pieces of about `split`, all of one size but the last; one piece if empty."""
    count = max(1, (size + split // 2) // split)
    step = max(1, -(-size // (count * SPLIT_STEP)) * SPLIT_STEP)
    return [(at, min(at + step, size)) for at in range(0, size, step)] or [(0, 0)]


def plan_decode(
    lengths: Sequence[int | None],
    num_kv_heads: int,
    device: torch.device,
    width: int,
    window: int | None = None,
    split: int | None = None,
    tokens: Sequence[int] | None = None,
) -> DecodePlan:
    """Cut every row into splits.

    Args:
        lengths: tokens in each row, the new one included; 0 yields zeros, None leaves the row out.
        num_kv_heads: programs for each item.
        width: multiprocessors to fill.
        window: sliding window, in tokens; None is unlimited.
        split: tokens of a split, about, to set it by hand.
        tokens: the token of each row; by default row i's is token i.
    """
    rows = [(row, length) for row, length in enumerate(lengths) if length is not None]
    seen = [length if window is None else min(length, window) for _, length in rows]
    if split is None:
        split = choose_split(seen, num_kv_heads, width)
    items: list[list[int]] = []
    merges, num_parts = [], 0
    for (row, length), size in zip(rows, seen, strict=True):
        token = row if tokens is None else tokens[row]
        pieces = cut(size, split)
        for index, (begin, end) in enumerate(pieces):
            part = -1 if len(pieces) == 1 else num_parts + index
            past = length - size
            items.append([row, token, past + begin, past + end, part, int(index == 0)])
        if len(pieces) > 1:
            merges.append([token, num_parts, len(pieces)])
            num_parts += len(pieces)
    # The largest first: small ones fill the gaps at the end of the launch.
    items.sort(key=lambda item: item[2] - item[3])
    return DecodePlan(
        torch.tensor(items, dtype=torch.int32, device=device).reshape(-1, 6),
        torch.tensor(merges, dtype=torch.int32, device=device).reshape(-1, 3),
        num_parts,
    )
