"""Log-probabilities for the caller: of the raw distribution, before temperature, masks and cuts.

What a model thinks of a token does not change with how the caller samples. Rows are worked on in
slices, so that the memory needed has a bound that does not grow with their number. This module must
not know which request a row belongs to.
"""

from collections.abc import Sequence

import torch

from nanoserve.scheduler_output import TokenLogprobs

# Logits in float32 at a time: 64 MiB.
SLICE_ELEMENTS = 1 << 24


def gather_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: Sequence[int]
) -> list[TokenLogprobs]:
    """What is reported at each row: the chosen token first, then the likeliest ones.

    Args:
        logits: [num_rows, vocab_size], raw, any float type.
        token_ids: [num_rows] int64, the chosen tokens.
        num_logprobs: how many of the likeliest each row wants, 0 for the chosen token alone.

    Returns:
        One entry a row. `rank` is 1 for the likeliest token; tokens that are equal share a rank.
    """
    vocab_size = logits.shape[1]
    step = max(1, SLICE_ELEMENTS // vocab_size)
    result: list[TokenLogprobs] = []
    for start in range(0, len(num_logprobs), step):
        wanted = [min(n, vocab_size) for n in num_logprobs[start : start + step]]
        rows = slice(start, start + len(wanted))
        result += _one_slice(logits[rows].float(), token_ids[rows, None], wanted)
    return result


def _one_slice(
    logits: torch.Tensor, chosen: torch.Tensor, wanted: list[int]
) -> list[TokenLogprobs]:
    """`gather_logprobs` for rows that fit in memory together."""
    log_total = logits.logsumexp(-1, keepdim=True)
    chosen_logits = logits.gather(1, chosen)
    ranks = (logits > chosen_logits).sum(1).add_(1)
    top_logits, top_ids = logits.topk(max(wanted))
    ids = torch.cat((chosen, top_ids), 1).tolist()
    values = (torch.cat((chosen_logits, top_logits), 1) - log_total).tolist()
    return [
        TokenLogprobs(row_ids[: n + 1], row_values[: n + 1], rank)
        for row_ids, row_values, rank, n in zip(ids, values, ranks.tolist(), wanted, strict=True)
    ]
