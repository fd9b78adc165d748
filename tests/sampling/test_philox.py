"""Philox against its published vectors, an integer-by-integer reading of the paper, and Triton."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from nanoserve.sampling.philox import (
    MASK,
    Purpose,
    exponential,
    philox4x32,
    random_words,
    uniform,
)

# Random123's kat_vectors, philox4x32-10: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def philox_by_hand(counter, key):
    """One block in Python's own integers."""
    c, k = list(counter), list(key)
    for _ in range(10):
        low, high = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(high >> 32) ^ c[1] ^ k[0], high & MASK, (low >> 32) ^ c[3] ^ k[1], low & MASK]
        k = [(k[0] + 0x9E3779B9) & MASK, (k[1] + 0xBB67AE85) & MASK]
    return c


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_SA4_known_answers(counter, key, expected):
    in_torch = philox4x32(
        tuple(torch.tensor([c]) for c in counter), tuple(torch.tensor([k]) for k in key)
    )
    in_numpy = philox4x32(tuple(np.array([c]) for c in counter), tuple(np.array([k]) for k in key))
    assert tuple(int(w) for w in in_torch) == expected
    assert tuple(int(w[0]) for w in in_numpy) == expected
    assert tuple(philox_by_hand(counter, key)) == expected


@pytest.mark.parametrize("seed", [0, 1, -1, 42, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0])
def test_SA4_key_and_counter_layout(seed):
    positions, token_ids = [0, 7, 100_000], [0, 1, 2, 3, 4, 49_151, 200_000]
    lanes = torch.tensor([t >> 2 for t in token_ids])[None].expand(3, -1)
    words = random_words(torch.full((3,), seed), torch.tensor(positions), lanes, Purpose.SAMPLE)
    unsigned = seed % 2**64
    for row, position in enumerate(positions):
        for column, token in enumerate(token_ids):
            expected = philox_by_hand(
                (token >> 2, position, int(Purpose.SAMPLE), 0), (unsigned & MASK, unsigned >> 32)
            )
            assert words[row, column].tolist() == expected


def test_a_token_draws_the_same_alone_as_in_the_whole_vocabulary():
    seeds, positions = torch.tensor([5, -9, 2**40]), torch.tensor([0, 3, 900])
    whole = exponential(seeds, positions, Purpose.SAMPLE, vocab_size=1003)
    token_ids = torch.tensor([[1002, 0, 17], [5, 6, 7], [999, 1, 4]])
    some = exponential(seeds, positions, Purpose.SAMPLE, token_ids)
    assert whole.shape == (3, 1003)
    assert torch.equal(some, whole.gather(1, token_ids))
    for row in range(3):
        own = slice(row, row + 1)
        alone = exponential(seeds[own], positions[own], Purpose.SAMPLE, vocab_size=1003)
        assert torch.equal(alone[0], whole[row])


def test_rows_are_the_same_however_they_are_sliced(monkeypatch):
    seeds, positions = torch.arange(20), torch.arange(20) * 3
    whole = exponential(seeds, positions, Purpose.SAMPLE, vocab_size=100)
    monkeypatch.setattr("nanoserve.sampling.philox.CPU_LANES", 75)
    assert torch.equal(exponential(seeds, positions, Purpose.SAMPLE, vocab_size=100), whole)


def test_uniform_is_open_at_both_ends():
    u = uniform(torch.tensor([0, 1, 2**31, MASK - 1, MASK]))
    assert u.dtype == torch.float32
    assert (u > 0).all()
    assert (u < 1).all()
    assert u[0] == 2.0**-33
    assert u[2] == 0.5
    times = -torch.log1p(-u)
    assert (times > 0).all()
    assert times.isfinite().all()


def test_draws_are_exponential_and_unrelated_to_their_neighbours():
    times = exponential(torch.arange(400), torch.zeros(400).long(), Purpose.SAMPLE, vocab_size=500)
    flat = times.double().flatten()
    # Twenty equally likely bins; 99.9% of chi-square with 19 degrees of freedom lies below 43.8.
    bins = torch.histc(1 - torch.exp(-flat), 20, 0, 1)
    expected = flat.numel() / 20
    assert float(((bins - expected) ** 2 / expected).sum()) < 43.8
    centred = times.double() - 1
    for neighbour in (centred[:, 1:] * centred[:, :-1], centred[1:] * centred[:-1]):
        assert abs(float(neighbour.mean())) < 4 / neighbour.numel() ** 0.5


@pytest.mark.slow
def test_SA4_same_integers_as_triton(tmp_path):
    script = tmp_path / "kernel.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            os.environ["TRITON_INTERPRET"] = "1"
            import torch, triton, triton.language as tl
            from nanoserve.sampling.philox import Purpose, random_words

            @triton.jit
            def kernel(out, seed, position, N: tl.constexpr):
                lane = tl.arange(0, N)
                zero = lane * 0
                words = tl.philox(seed, lane, zero + position, zero, zero)
                for i in tl.static_range(4):
                    tl.store(out + lane * 4 + i, words[i])

            for seed in (0, 1234567, 2**40 + 11):
                out = torch.zeros(8, 4, dtype=torch.int32)
                kernel[(1,)](out, seed, 77, 8)
                ours = random_words(
                    torch.tensor([seed]), torch.tensor([77]), torch.arange(8)[None], Purpose.SAMPLE
                )[0]
                assert torch.equal(out.long() & 0xFFFFFFFF, ours), (seed, out, ours)
            print("same")
            """
        )
    )
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "same", done.stderr
