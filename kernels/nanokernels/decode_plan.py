"""Who reads what in a decode step: the work list of split-KV attention, made once for all layers.

Each row's tokens are cut into splits of one fixed size, and each (row, split) is one item. Items
are the unit of scheduling, so a long row among short ones becomes many items instead of one
straggler. The list is made on the host from the host's lengths; it holds no tensor of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Splits are whole tiles, and no smaller than this: below it, combining costs more than it saves.
MIN_SPLIT = 128
SPLIT_STEP = 128
# Programs wanted for each multiprocessor.
WAVES = 3.0


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
    """Tokens of a split, so that about `WAVES` programs come to each of `width` multiprocessors."""
    total = sum(lengths) * num_kv_heads
    wanted = int(total / max(1.0, WAVES * width))
    return max(MIN_SPLIT, -(-wanted // SPLIT_STEP) * SPLIT_STEP)


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
        split: tokens of a split, to set it by hand.
        tokens: the token of each row; by default row i's is token i.
    """
    rows = [(row, length) for row, length in enumerate(lengths) if length is not None]
    seen = [length if window is None else min(length, window) for _, length in rows]
    if split is None:
        split = choose_split(seen, num_kv_heads, width)
    whole: list[list[int]] = []
    short: list[list[int]] = []
    merges, num_parts = [], 0
    for (row, length), size in zip(rows, seen, strict=True):
        token = row if tokens is None else tokens[row]
        count = max(1, -(-size // split))
        for index in range(count):
            begin = length - size + index * split
            end = min(begin + split, length)
            part = -1 if count == 1 else num_parts + index
            # Whole splits first: the short ends fill the gaps that the last wave leaves.
            target = whole if end - begin == split else short
            target.append([row, token, begin, end, part, int(index == 0)])
        if count > 1:
            merges.append([token, num_parts, count])
            num_parts += count
    short.sort(key=lambda item: item[2] - item[3])
    return DecodePlan(
        torch.tensor(whole + short, dtype=torch.int32, device=device).reshape(-1, 6),
        torch.tensor(merges, dtype=torch.int32, device=device).reshape(-1, 3),
        num_parts,
    )
