"""A step's tensors: from plain lists of rows and counts to the `ForwardBatch` that the model runs.

Only the lists are sent to the device, in one piece; positions, token gathering and slots are
computed where the rows and tables already lie. This module must not know why a step is what it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nanoserve.forward import AttentionMetadata, ForwardBatch
from nanoserve.worker.block_table import BlockTable
from nanoserve.worker.request_rows import RequestRows


@dataclass
class StepPlan:
    """A step as the host sees it, in batch order.

    Attributes:
        request_ids, rows, computed, scheduled, starts: by request: its row, tokens computed before
            the step, tokens of this step, and where they start in the batch.
        logits_indices, logits_rows: by row of logits: the batch's token it belongs to, and the
            request row.
        samples: request id -> (its first row of logits, drafts that are verified there); a request
            that does not reach its last known token in this step is not in it.
    """

    request_ids: list[str] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    scheduled: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    logits_indices: list[int] = field(default_factory=list)
    logits_rows: list[int] = field(default_factory=list)
    samples: dict[str, tuple[int, list[int]]] = field(default_factory=dict)


def make_batch(
    plan: StepPlan, request_rows: RequestRows, block_tables: Sequence[BlockTable]
) -> ForwardBatch:
    """Lay a step out. The plan must hold at least one token."""
    device = request_rows.token_ids.device
    num_reqs, num_tokens = len(plan.rows), plan.starts[-1] + plan.scheduled[-1]
    sent = torch.tensor(
        plan.rows + plan.computed + plan.scheduled + plan.starts + plan.logits_indices,
        device=device,
    )
    rows, computed, scheduled, starts = sent[: 4 * num_reqs].view(4, num_reqs).unbind(0)
    if num_tokens == num_reqs:
        token_rows, positions = rows, computed
    else:
        owner = torch.arange(num_reqs, device=device).repeat_interleave(
            scheduled, output_size=num_tokens
        )
        token_rows = rows[owner]
        positions = torch.arange(num_tokens, device=device) + (computed - starts)[owner]
    seq_lens_cpu = [c + n for c, n in zip(plan.computed, plan.scheduled, strict=True)]
    seq_lens = (computed + scheduled).to(torch.int32)
    query_start_loc = torch.empty(num_reqs + 1, dtype=torch.int32, device=device)
    query_start_loc[:-1] = starts
    query_start_loc[-1] = num_tokens
    attn = [
        AttentionMetadata(
            query_start_loc=query_start_loc,
            seq_lens=seq_lens,
            block_table=table.rows(rows, max(seq_lens_cpu)),
            slot_mapping=table.slot_mapping(token_rows, positions),
            block_size=table.block_size,
            query_lens=plan.scheduled,
            seq_lens_cpu=seq_lens_cpu,
        )
        for table in block_tables
    ]
    return ForwardBatch(
        input_ids=request_rows.gather(token_rows, positions),
        positions=positions,
        attn=attn,
        logits_indices=sent[4 * num_reqs :],
    )


def dummy_batch(
    lengths: list[int], block_sizes: Sequence[int], device: torch.device
) -> ForwardBatch:
    """Prompts of these lengths, all of token 0, for measuring and warming up.

    Every slot is -1 and every block table entry the null block: nothing is written, and a cache of
    one block is enough.

    Args:
        lengths: tokens of each row.
        block_sizes: one a KV cache group.
    """
    lens = torch.tensor(lengths, device=device)
    ends = lens.cumsum(0)
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])
    attn = []
    for block_size in block_sizes:
        width = -(-max(lengths) // block_size)
        attn.append(
            AttentionMetadata(
                query_start_loc=torch.cat([ends.new_zeros(1), ends]).to(torch.int32),
                seq_lens=lens.to(torch.int32),
                block_table=torch.zeros(len(lengths), width, dtype=torch.int32, device=device),
                slot_mapping=torch.full_like(positions, -1),
                block_size=block_size,
                query_lens=lengths,
                seq_lens_cpu=lengths,
            )
        )
    return ForwardBatch(torch.zeros_like(positions), positions, attn, ends - 1)


def empty_batch(device: torch.device) -> ForwardBatch:
    """No tokens at all."""
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    return ForwardBatch(nothing, nothing, [], nothing)
