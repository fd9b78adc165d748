"""Random numbers as a function: Philox 4x32-10, a counter scrambled under a key.

There is no generator whose state moves on with each draw. The number for (seed, position, purpose,
token) is computed from those four alone, so a request draws the same in any batch, after a
preemption and after a restart, and only the tokens that are still in the running need a number.

The 64-bit seed is the key; the counter's words are (token id // 4, position, purpose, 0), and token
id mod 4 picks one of the four words that come out. These are the integers that Triton's `tl.philox`
gives for the same key and counter. This module must not know what the numbers decide.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from enum import IntEnum
from typing import Any

import torch

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
ROUNDS = 10
MASK = 0xFFFFFFFF
# A block of counters whose four words stay in a core's cache while ten rounds go over them.
CPU_LANES = 1 << 14
DEVICE_LANES = 1 << 22


class Purpose(IntEnum):
    """What a number is for: two uses at one position must not share their luck."""

    SAMPLE = 0


def philox4x32(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, ...]:
    """Ten rounds of Philox.

    The arrays are int64 (torch or numpy, all of one kind) that hold 32-bit words, and broadcast
    against each other: what is the same for a whole row may be given as one column.

    Returns:
        The four output words, each an int64 array of values in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        # The product of two 32-bit words wraps into the sign bit; its halves stay right.
        p0, p1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
        high0, high1 = p0 >> 32, p1 >> 32
        high0 &= MASK
        high1 &= MASK
        c0, c2 = high1 ^ (c1 ^ k0), high0 ^ (c3 ^ k1)
        p0 &= MASK
        p1 &= MASK
        c1, c3 = p1, p0
        k0, k1 = (k0 + WEYL_0) & MASK, (k1 + WEYL_1) & MASK
    return c0, c1, c2, c3


def random_words(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    lanes: torch.Tensor,
    purpose: Purpose,
    dtype: torch.dtype = torch.int64,
) -> torch.Tensor:
    """The four words of every counter.

    Args:
        seeds, positions: [num_rows] int64.
        lanes: [num_rows, num_lanes] int64, or [1, num_lanes] when all rows use the same.
        dtype: of the result; float32 rounds each word to the nearest.

    Returns:
        [num_rows, num_lanes, 4], values from 0 to 2**32 - 1.
    """
    num_rows, num_lanes = seeds.shape[0], lanes.shape[1]
    words = torch.empty(num_rows, num_lanes, 4, dtype=dtype, device=seeds.device)
    on_cpu = seeds.device.type == "cpu"
    step = max(1, (CPU_LANES if on_cpu else DEVICE_LANES) // max(1, num_lanes))
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        seed, position = seeds[rows, None], positions[rows, None]
        counter: list[Any] = [
            lanes[rows] if lanes.shape[0] > 1 else lanes,
            position,
            torch.full_like(position, int(purpose)),
            torch.zeros_like(position),
        ]
        key: list[Any] = [seed & MASK, (seed >> 32) & MASK]
        out: Any = words[rows]
        if on_cpu:
            # numpy's integer loops are three times as fast as torch's at this size.
            counter, key, out = [c.numpy() for c in counter], [k.numpy() for k in key], out.numpy()
        for i, word in enumerate(philox4x32(tuple(counter), tuple(key))):
            out[..., i] = word
    return words


def uniform(words: torch.Tensor) -> torch.Tensor:
    """32-bit words to float32 numbers in (0, 1), open at both ends. A float32 input is overwritten.

    All 32 bits count for small numbers, where the race that `exponential` feeds is decided.
    """
    # The largest words would round to 1.
    return words.to(torch.float32).mul_(2.0**-32).add_(2.0**-33).clamp_(max=1.0 - 2.0**-24)


def exponential(
    seeds: torch.Tensor,
    positions: torch.Tensor,
    purpose: Purpose,
    token_ids: torch.Tensor | None = None,
    vocab_size: int = 0,
) -> torch.Tensor:
    """One draw of the exponential distribution (mean 1) for every (row, token).

    Args:
        seeds, positions: [num_rows] int64.
        token_ids: [num_rows, n] int64, the tokens that need a draw; None is the whole vocabulary.
        vocab_size: n, when token_ids is None.

    Returns:
        [num_rows, n] float32, the same for a token whichever others were asked for.
    """
    if token_ids is None:
        lanes = torch.arange(-(-vocab_size // 4), device=seeds.device)[None]
        words = random_words(seeds, positions, lanes, purpose, torch.float32)
        words = words.flatten(1)[:, :vocab_size]
    else:
        words = random_words(seeds, positions, token_ids >> 2, purpose, torch.float32)
        words = words.gather(2, (token_ids & 3)[..., None]).squeeze(2)
    # -log(1 - u) rather than -log(u): small values win the race, and so they are exact.
    return uniform(words).neg_().log1p_().neg_()
