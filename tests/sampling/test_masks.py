"""The cuts against transformers' processors one by one, and together against float64."""

import math
import random

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nanoserve.sampling.masks import (
    FIRST_WIDTH,
    apply_temperature,
    find_candidates,
    hold_back,
    keep_likeliest,
)

INF = float("inf")


def columns(n, top_k=0, top_p=1.0, min_p=0.0):
    return torch.full((n,), top_k), torch.full((n,), top_p), torch.full((n,), min_p)


def kept(logits, temperature=1.0, **settings):
    """Which tokens stay, [num_rows, vocab_size] bool."""
    rows = len(logits)
    scaled = apply_temperature(logits, torch.full((rows,), float(temperature)))
    return keep_likeliest(scaled, *columns(rows, **settings)) > -INF


def spread(rows, vocab, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def reference_keep(row, temperature, min_p, top_k, top_p):
    """vLLM's order, in Python floats: token ids that stay, and their probabilities."""
    scaled = [float(x) / temperature for x in row]
    order = sorted(range(len(scaled)), key=lambda t: (-scaled[t], t))
    top = scaled[order[0]]
    if min_p > 0:
        order = [t for t in order if math.exp(scaled[t] - top) >= min_p]
    if top_k > 0:
        kth = scaled[order[min(top_k, len(order)) - 1]]
        order = [t for t in order if scaled[t] >= kth]
    weights = {t: math.exp(scaled[t] - top) for t in order}
    if top_p < 1:
        total, before, stay = sum(weights.values()), 0.0, []
        for t in order:
            if stay and before >= top_p * total:
                break
            stay.append(t)
            before += weights[t]
        order = stay
    total = sum(weights[t] for t in order)
    return {t: weights[t] / total for t in order}


@pytest.mark.parametrize("top_k", [1, 2, 5, 50, 499, 500, 700])
def test_SA2_top_k_equals_transformers(top_k):
    logits = spread(8, 500)
    theirs = TopKLogitsWarper(top_k)(None, logits.clone()) > -INF
    assert torch.equal(kept(logits, top_k=top_k), theirs)


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_SA2_top_p_equals_transformers(top_p):
    logits = spread(8, 500)
    theirs = TopPLogitsWarper(top_p)(None, logits.clone()) > -INF
    assert torch.equal(kept(logits, top_p=top_p), theirs)


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.3, 1.0])
def test_SA2_min_p_equals_transformers(min_p):
    logits = spread(8, 500)
    theirs = MinPLogitsWarper(min_p)(None, logits.clone()) > -INF
    assert torch.equal(kept(logits, min_p=min_p), theirs)


def test_SA2_ties_top_k_keeps_all_that_equal_the_kth():
    logits = torch.randint(0, 4, (20, 60), generator=torch.Generator().manual_seed(3)).float()
    for top_k in (1, 3, 20, 59):
        theirs = TopKLogitsWarper(top_k)(None, logits.clone()) > -INF
        assert torch.equal(kept(logits, top_k=top_k), theirs)


def test_SA2_ties_top_p_keeps_as_many_as_transformers_and_the_lower_ids():
    logits = torch.randint(0, 4, (20, 60), generator=torch.Generator().manual_seed(3)).float()
    for top_p in (0.13, 0.37, 0.61, 0.93):
        ours = kept(logits, top_p=top_p)
        theirs = TopPLogitsWarper(top_p)(None, logits.clone()) > -INF
        for row, mine, other in zip(logits, ours, theirs, strict=True):
            assert sorted(row[mine].tolist()) == sorted(row[other].tolist())
            at_the_line = (row == row[mine].min()).nonzero().flatten()
            run = mine[at_the_line].tolist()
            assert run == sorted(run, reverse=True)


def test_A19_combined_cuts_equal_a_float64_reference():
    draw = random.Random(1)
    logits = spread(100, 300, seed=7).double().float()
    for row in logits:
        temperature = draw.choice([0.3, 0.7, 1.0, 1.7])
        min_p = draw.choice([0.0, 0.01, 0.1])
        top_k = draw.choice([0, -1, 3, 40, 250])
        top_p = draw.choice([1.0, 0.95, 0.6, 0.2])
        expected = reference_keep(row.tolist(), temperature, min_p, top_k, top_p)
        scaled = apply_temperature(row[None], torch.tensor([temperature]))
        masked = keep_likeliest(scaled, *columns(1, top_k, top_p, min_p))[0]
        assert set((masked > -INF).nonzero().flatten().tolist()) == set(expected)
        probabilities = masked.double().softmax(0)
        for token, probability in expected.items():
            assert abs(float(probabilities[token]) - probability) < 1e-6


def test_SA3_values_that_switch_a_cut_off():
    logits = spread(3, 400)
    for top_k in (0, -1, 400, 2**31 - 1):
        assert kept(logits, top_k=top_k, top_p=1.0, min_p=0.0).all()


def test_SA3_the_token_that_crosses_the_line_stays():
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert kept(logits, top_p=0.5).tolist() == [[True, False, False, False]]
    assert kept(logits, top_p=0.51).tolist() == [[True, True, False, False]]
    assert kept(logits, top_p=1e-9).tolist() == [[True, False, False, False]]


@pytest.mark.parametrize("width", [1, 2, 7, 64, 300, 1000])
def test_a_complete_row_is_right_at_every_width(width):
    """Looking at few tokens either gives the final cut or says that it does not know."""
    generator = torch.Generator().manual_seed(11)
    flat = torch.randint(0, 9, (16, 300), generator=generator).float()
    for logits in (spread(16, 300, seed=5), flat, spread(16, 300, scale=9.0)):
        scaled = apply_temperature(logits, torch.ones(16))
        settings = (
            torch.tensor([0, 1, 5, 60] * 4),
            torch.tensor([1.0, 0.5, 0.9, 0.99]).repeat_interleave(4),
            torch.tensor([0.0, 0.02] * 8),
        )
        expected = keep_likeliest(scaled, *settings)
        found = find_candidates(scaled, *settings, width=width)
        seen = torch.full_like(scaled, -INF).scatter_(1, found.token_ids, found.logits)
        assert torch.equal(seen[found.complete], expected[found.complete])
        if width >= 300:
            assert found.complete.all()


def test_kept_tokens_are_a_run_from_the_left():
    found = find_candidates(
        apply_temperature(spread(9, 2000), torch.ones(9)), *columns(9, 40, 0.9, 0.01)
    )
    assert found.logits.shape[1] == FIRST_WIDTH
    keep = found.logits > -INF
    assert torch.equal(keep, keep.cummin(1).values)
    assert keep[:, 0].all()


def test_T69_rows_with_masked_tokens():
    logits = spread(2, 100)
    logits[0, 5:] = -INF
    logits[1] = -INF
    settings = columns(2, top_k=50, top_p=0.999)
    masked = keep_likeliest(apply_temperature(logits, torch.ones(2)), *settings)
    assert not masked.isnan().any()
    assert set((masked[0] > -INF).nonzero().flatten().tolist()) <= set(range(5))
    assert (masked[1] == -INF).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-5, 1e-4, 1.0, 100.0, 1e30])
def test_A15_scaled_logits_are_finite_at_any_temperature(dtype, temperature):
    logits = torch.tensor([[80.0, -80.0, 79.5, 0.0]], dtype=dtype)
    scaled = apply_temperature(logits, torch.tensor([temperature]))
    assert scaled.dtype == torch.float32
    assert scaled.isfinite().all()
    assert scaled[0, 0] == 0
    assert logits[0, 0] == 80  # the input is left as it was


def test_hold_back_touches_the_named_pairs_only():
    logits = spread(3, 10)
    before = logits.clone()
    hold_back(logits, torch.tensor([0, 2, 2]), torch.tensor([4, 0, 9]))
    changed = (logits != before).nonzero().tolist()
    assert changed == [[0, 4], [2, 0], [2, 9]]
    assert (logits[logits != before] == -INF).all()
