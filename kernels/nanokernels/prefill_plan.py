"""Who computes what in a prefill step: query tiles of all rows in one list, heaviest first.

A row's new tokens are cut into tiles; a tile late in a long row has the most keys to read. Starting
the heaviest row, and in it the heaviest tile, leaves light ones to fill the end of the launch; the
tiles of a row stay together, so that they find each other's keys in the L2 cache. Rows of one new
token (decodes) are tiles like any other, so that a mixed batch is one launch.
"""

from dataclasses import dataclass

import torch


@dataclass
class PrefillPlan:
    """The work list.

    Attributes:
        tiles: [num_tiles, 2] int32, (row, index of the tile in the row).
        tokens: new tokens of a tile.
    """

    tiles: torch.Tensor
    tokens: int


def plan_prefill(
    query_lens: list[int], seq_lens: list[int], tokens: int, device: torch.device
) -> PrefillPlan:
    """List every row's tiles.

    Args:
        query_lens: new tokens of each row; 0 for a row that is not there.
        seq_lens: tokens of each row after this step.
        tokens: new tokens of a tile.
    """
    rows = [row for row, count in enumerate(query_lens) if count > 0]
    rows.sort(key=lambda row: -query_lens[row] * (2 * seq_lens[row] - query_lens[row]))
    flat = [
        [row, index] for row in rows for index in reversed(range(-(-query_lens[row] // tokens)))
    ]
    return PrefillPlan(torch.tensor(flat, dtype=torch.int32, device=device).reshape(-1, 2), tokens)
