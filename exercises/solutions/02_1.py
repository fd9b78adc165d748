import torch


def slot_mapping(block_table, query_lens, seq_lens, block_size, num_slots):
    slots = torch.full((num_slots,), -1, dtype=torch.int64)
    start = 0
    for table, new, length in zip(block_table.long(), query_lens, seq_lens, strict=True):
        position = torch.arange(length - new, length)
        block = table[position // block_size]
        slots[start : start + new] = block * block_size + position % block_size
        start += new
    return slots
