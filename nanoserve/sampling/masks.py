"""Which tokens stay in the running: temperature, min-p, top-k and top-p, and tokens held back.

The order is vLLM's: temperature, min-p, top-k, top-p. Each of the three cuts keeps a run of
likeliest tokens, so one sorted prefix of the vocabulary serves all of them: `find_candidates` sorts
only as many tokens as it takes until the cut is seen, most often a few hundred of fifty thousand.

Ties are cut the same way whatever else is in the batch. Top-k keeps all that are equal to the k-th,
as transformers does; top-p takes the lower token id first, which transformers leaves to its sort.
This module must not draw.
"""

from dataclasses import dataclass

import torch

# Tokens sorted at first, and how much further each next try goes.
FIRST_WIDTH = 256
GROWTH = 8
FINITE = torch.finfo(torch.float32).max


@dataclass
class Candidates:
    """Some rows' likeliest tokens, likeliest first.

    Attributes:
        logits: [num_rows, width] float32; -inf where a token is cut.
        token_ids: [num_rows, width] int64.
        complete: [num_rows] bool, whether the row's cut lies within these. A row that is not
            complete may lack tokens that should be kept.
    """

    logits: torch.Tensor
    token_ids: torch.Tensor
    complete: torch.Tensor


def hold_back(logits: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Forbid pairs of (row, token), in place: end tokens before min_tokens, for one.

    Args:
        logits: [num_rows, vocab_size], set to -inf at the pairs.
        rows, token_ids: [num_pairs] int64.
    """
    return logits.index_put_((rows, token_ids), logits.new_tensor(float("-inf")))


def apply_temperature(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """(logits - the row's largest) / temperature, a new [num_rows, vocab_size] float32.

    Subtracting first changes no probability and keeps the quotient finite at any temperature.
    """
    scaled = logits.to(torch.float32, copy=True)
    # A row that is -inf throughout (or holds +inf) must not become NaN.
    largest = scaled.amax(-1, keepdim=True).clamp_(-FINITE, FINITE)
    return scaled.sub_(largest).div_(temperature[:, None])


def find_candidates(
    scaled: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    width: int = FIRST_WIDTH,
) -> Candidates:
    """The tokens that min-p, top-k and top-p leave, looked for among the `width` likeliest.

    Args:
        scaled: [num_rows, vocab_size] from `apply_temperature`: the largest of a row is 0.
        top_k: [num_rows] int64; below 1 is off.
        top_p: [num_rows] float32; 1 is off.
        min_p: [num_rows] float32; 0 is off.

    Returns:
        Candidates of at most `width` columns.
    """
    vocab_size = scaled.shape[1]
    logits, token_ids = _likeliest(scaled, min(width, vocab_size))
    width = logits.shape[1]
    floor = min_p.log()[:, None]  # log(0) = -inf keeps all
    limited = top_k > 0
    kth = logits.gather(1, top_k.clamp(1, width)[:, None] - 1)
    kth = kth.masked_fill(~limited[:, None], float("-inf"))
    keep = (logits >= floor) & (logits >= kth) & (logits > float("-inf"))

    # In float64, so that where the line falls does not hang on the order of summing.
    mass = logits.to(torch.float64).exp_().masked_fill_(~keep, 0.0).cumsum_(1)
    total = mass[:, -1]
    uses_p = top_p < 1
    if bool((uses_p & ~limited).any()):
        total = torch.where(limited, total, _mass_above(scaled, floor))
    line = torch.where(uses_p, top_p.to(torch.float64) * total, float("inf"))
    # A token stays if the mass before it is short of the line: the one that crosses it does.
    keep[:, 1:] &= mass[:, :-1] < line[:, None]

    # The line is right if nothing that min-p and top-k leave lies further on, ties included; the
    # cut is right if the last token seen is below all that are kept.
    last, least = logits[:, -1], logits.masked_fill(~keep, float("inf")).amin(1)
    nothing_left = (last < floor.squeeze(1)) | (last == float("-inf"))
    in_sight = ~limited | nothing_left | ((top_k <= width) & (last < kth.squeeze(1)))
    complete = (in_sight & (last < least)) | (width == vocab_size)
    return Candidates(logits.masked_fill(~keep, float("-inf")), token_ids, complete)


def keep_likeliest(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """`scaled` with every token that min-p, top-k or top-p cuts at -inf, over the whole vocabulary.

    The sampler has no use for the cut tokens and asks `find_candidates` itself; this is the same
    cut in the shape that a processed distribution is read in.
    """
    found = find_candidates(scaled, top_k, top_p, min_p, scaled.shape[1])
    masked = torch.full_like(scaled, float("-inf"))
    return masked.scatter_(1, found.token_ids, found.logits)


def _likeliest(scaled: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `width` largest logits of each row in falling order, equal ones by rising token id."""
    logits, token_ids = scaled.topk(width)
    token_ids, order = token_ids.sort(dim=1)
    logits, order = logits.gather(1, order).sort(dim=1, descending=True, stable=True)
    return logits, token_ids.gather(1, order)


def _mass_above(scaled: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """[num_rows] float64: the unnormalised probability that min-p leaves in the whole row."""
    return scaled.exp().masked_fill_(scaled < floor, 0.0).sum(1, dtype=torch.float64)
