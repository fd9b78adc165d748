"""The block table on the device: for every request row, which block holds its j-th run of tokens.

One table turns scattered pages into a sequence. A request's line is never sent whole again: the
scheduler names the blocks that came new, they are noted on the host, and one write a step brings
all notes to the device. Where each new token's keys and values go is then computed there. This
module must not know why a block was given, or what a request is.
"""

from collections.abc import Sequence

import torch


class BlockTable:
    """The table of one KV cache group.

    Args:
        num_rows: request rows.
        max_blocks: blocks a row may have.
        block_size: tokens a block holds.
        device: where the table lives.

    Attributes:
        table: [num_rows, max_blocks] int32; entries that are not in use are 0, the null block.
    """

    def __init__(
        self, num_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.table = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self._num_blocks = [0] * num_rows
        # Edits since the last `apply`: rows to empty, then (place in the flat table) -> block.
        self._cleared: set[int] = set()
        self._places: list[int] = []
        self._blocks: list[int] = []

    def num_blocks(self, row: int) -> int:
        """Blocks that the row has, edits that are still to be applied included."""
        return self._num_blocks[row]

    def append(self, row: int, block_ids: Sequence[int]) -> None:
        """Add blocks to the end of a row. Raises ValueError when the row has no room for them."""
        if not block_ids:
            return
        width = self.table.shape[1]
        used = self._num_blocks[row]
        if used + len(block_ids) > width:
            raise ValueError(
                f"row {row} has {used} of {width} blocks and was given {len(block_ids)} more"
            )
        start = row * width + used
        self._places.extend(range(start, start + len(block_ids)))
        self._blocks.extend(block_ids)
        self._num_blocks[row] = used + len(block_ids)

    def clear(self, row: int) -> None:
        """Take all blocks from a row."""
        if self._places:
            # Blocks noted for the row's last owner must not land after it is emptied.
            self.apply()
        self._num_blocks[row] = 0
        self._cleared.add(row)

    def apply(self) -> None:
        """Bring the edits to the device."""
        device = self.table.device
        if self._cleared:
            rows = torch.tensor(list(self._cleared), device=device)
            self.table.index_fill_(0, rows, 0)
            self._cleared.clear()
        if self._places:
            edits = torch.tensor([self._places, self._blocks], device=device)
            self.table.view(-1)[edits[0]] = edits[1].to(torch.int32)
            self._places, self._blocks = [], []

    def rows(self, rows: torch.Tensor, max_seq_len: int) -> torch.Tensor:
        """The step's lines, in the step's order: what attention reads through.

        Args:
            rows: [num_reqs] int64.
            max_seq_len: tokens of the longest of them.

        Returns:
            [num_reqs, blocks of max_seq_len tokens] int32.
        """
        width = -(-max_seq_len // self.block_size)
        return self.table[:, :width].index_select(0, rows)

    def slot_mapping(self, token_rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Where each token's keys and values go: block * block_size + offset.

        Args:
            token_rows, positions: [num_tokens] int64, each token's row and place in its sequence.

        Returns:
            [num_tokens] int64.
        """
        size = self.block_size
        index = positions // size
        blocks = self.table.view(-1)[token_rows * self.table.shape[1] + index].to(torch.int64)
        return blocks * size + (positions - index * size)
