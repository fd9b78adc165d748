"""The device's block table against a list of lists."""

import random

import numpy as np
import pytest
import torch

from nanoserve.worker.block_table import BlockTable

CPU = torch.device("cpu")


def as_lists(table, rows):
    lines = table.rows(torch.tensor(rows), table.table.shape[1] * table.block_size)
    return lines.tolist()


def test_edits_by_difference_equal_a_table_written_whole():
    draw, width = random.Random(0), 6
    table = BlockTable(5, width, 4, CPU)
    truth = [[] for _ in range(5)]
    for _ in range(300):
        for _ in range(draw.randint(0, 4)):
            row = draw.randrange(5)
            room = width - len(truth[row])
            if draw.random() < 0.3:
                table.clear(row)
                truth[row] = []
            elif room:
                blocks = [draw.randint(1, 99) for _ in range(draw.randint(0, room))]
                table.append(row, blocks)
                truth[row] += blocks
        table.apply()
        order = draw.sample(range(5), draw.randint(1, 5))
        expected = [truth[row] + [0] * (width - len(truth[row])) for row in order]
        assert as_lists(table, order) == expected
        assert [table.num_blocks(row) for row in range(5)] == [len(t) for t in truth]


def test_a_row_given_away_within_one_step_keeps_nothing_of_its_last_owner():
    table = BlockTable(2, 4, 4, CPU)
    table.append(0, [7, 8, 9])
    table.clear(0)
    table.append(0, [5])
    table.apply()
    assert as_lists(table, [0]) == [[5, 0, 0, 0]]


def test_a_row_that_is_full_refuses_and_changes_nothing():
    table = BlockTable(1, 2, 4, CPU)
    table.append(0, [1])
    with pytest.raises(ValueError, match="row 0 has 1 of 2 blocks and was given 2 more"):
        table.append(0, [2, 3])
    table.apply()
    assert as_lists(table, [0]) == [[1, 0]]


def test_rows_are_as_wide_as_the_longest_needs():
    table = BlockTable(2, 10, 4, CPU)
    assert table.rows(torch.tensor([0]), 1).shape == (1, 1)
    assert table.rows(torch.tensor([0]), 4).shape == (1, 1)
    assert table.rows(torch.tensor([0, 1]), 5).shape == (2, 2)
    assert table.rows(torch.tensor([1]), 5).dtype == torch.int32


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_slot_mapping_equals_numpy(block_size):
    generator = np.random.default_rng(block_size)
    length = 40
    width = -(-length // block_size)
    table = BlockTable(6, width, block_size, CPU)
    ids = generator.permutation(np.arange(1, 6 * width + 1)).reshape(6, width)
    # Large ids too: a slot may need more than 32 bits.
    ids[2] += 2**30
    for row in range(6):
        table.append(row, ids[row].tolist())
    table.apply()
    rows = generator.integers(0, 6, 100)
    positions = generator.integers(0, length, 100)
    slots = table.slot_mapping(torch.from_numpy(rows), torch.from_numpy(positions))
    expected = ids[rows, positions // block_size] * block_size + positions % block_size
    assert slots.dtype == torch.int64
    assert np.array_equal(slots.numpy(), expected)
