"""The sampler: kinds of rows, fairness of the draw, independence of the batch."""

import pytest
import torch

from nanoserve.sampling.masks import apply_temperature, keep_likeliest
from nanoserve.sampling.sampler import Sampler, SamplingBatch, SamplingColumns
from nanoserve.sampling_params import SamplingParams

INF = float("inf")
CPU = torch.device("cpu")


def make_batch(params, seeds=None, positions=None):
    seeds = list(range(len(params))) if seeds is None else seeds
    table = SamplingColumns(len(params), CPU)
    for row, (p, seed) in enumerate(zip(params, seeds, strict=True)):
        table.write(row, p, seed)
    places = torch.zeros(len(params)).long() if positions is None else torch.tensor(positions)
    return SamplingBatch.build(table, params, places)


def sample(logits, params, seeds=None, positions=None, **sampler_args):
    batch = make_batch(params, seeds, positions)
    return Sampler(**sampler_args)(logits.clone(), batch).token_ids.tolist()


def spread(rows, vocab, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale


def chi_square(counts, probabilities):
    expected = probabilities.double() * counts.sum()
    assert (expected[probabilities > 0] > 5).all(), "too few draws for the test"
    live = probabilities > 0
    return float(((counts[live] - expected[live]) ** 2 / expected[live]).sum())


GREEDY = SamplingParams(temperature=0.0)


def test_SA1_greedy_rows_of_a_mixed_batch_are_the_plain_argmax():
    logits = spread(6, 200)
    params = [GREEDY, SamplingParams(), GREEDY, SamplingParams(top_k=5), GREEDY, GREEDY]
    for batch in (params, [GREEDY] * 6):
        tokens = sample(logits, batch)
        for row, p in enumerate(batch):
            if p is GREEDY:
                assert tokens[row] == int(logits[row].argmax())


def test_A16_masked_logits_in_a_mixed_batch_give_no_nan():
    logits = spread(4, 50)
    logits[0, :49] = -INF
    logits[1, 10:] = -INF
    params = [GREEDY, SamplingParams(), SamplingParams(top_p=0.9, logprobs=2), SamplingParams()]
    output = Sampler()(logits, make_batch(params))
    assert output.token_ids[0] == 49
    assert output.token_ids[1] < 10
    assert all(x == x for x in output.logprobs[2].logprobs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 1e-38])
def test_A15_a_tiny_temperature_is_greedy(dtype, temperature):
    logits = (spread(8, 300) * 20).clamp(-80, 80)
    logits[torch.arange(8), torch.arange(8) * 7] = 81.0
    params = [SamplingParams(temperature=temperature)] * 8
    assert sample(logits.to(dtype), params) == [row * 7 for row in range(8)]


def test_A20_padding_columns_are_never_chosen():
    logits = spread(40, 512)
    logits[:, 505] = 30.0
    for params in (GREEDY, SamplingParams(), SamplingParams(top_k=10), SamplingParams(top_p=0.9)):
        assert max(sample(logits, [params] * 40, num_tokens=500)) < 500
    report = Sampler(500)(logits[:1], make_batch([SamplingParams(temperature=0.0, logprobs=5)]))
    assert max(report.logprobs[0].token_ids) < 500


def test_SA7_tokens_held_back_are_not_chosen_but_keep_their_raw_logprob():
    logits = spread(2, 40)
    logits[:, 3], logits[:, 5] = 20.0, 19.0
    batch = make_batch([SamplingParams(temperature=0.0, logprobs=1), SamplingParams()])
    batch.held_back = (torch.tensor([0, 0, 1, 1]), torch.tensor([3, 5, 3, 5]))
    output = Sampler()(logits.clone(), batch)
    assert not {3, 5} & set(output.token_ids.tolist())
    raw = logits[0].double().log_softmax(0)
    report = output.logprobs[0]
    assert report.token_ids[1] == 3
    assert report.logprobs[1] == pytest.approx(float(raw[3]), abs=1e-5)
    assert report.rank == 3


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.5, min_p=0.05),
        SamplingParams(top_k=6),
        SamplingParams(top_p=0.8),
        SamplingParams(top_k=12, top_p=0.9, temperature=1.3, min_p=0.01),
    ],
    ids=["plain", "cold", "min_p", "top_k", "top_p", "all"],
)
def test_T65_draws_follow_the_processed_distribution(params):
    row = spread(1, 24, seed=4, scale=0.8)
    draws = 20_000
    tokens = torch.tensor(sample(row.expand(draws, -1), [params] * draws, seeds=list(range(draws))))
    scaled = apply_temperature(row, torch.tensor([params.temperature]))
    columns = SamplingColumns(1, CPU)
    columns.write(0, params, 0)
    masked = keep_likeliest(scaled, columns.top_k, columns.top_p, columns.min_p)
    probabilities = masked[0].double().softmax(0)
    counts = torch.bincount(tokens, minlength=24).double()
    assert (counts[probabilities == 0] == 0).all()
    # 99.9% of chi-square with 23 degrees of freedom (fewer when tokens are cut) lies below 49.7.
    assert chi_square(counts, probabilities) < 49.7


def test_draws_over_positions_of_one_seed_are_fair_too():
    row = spread(1, 16, seed=9, scale=1.0)
    draws = 20_000
    tokens = sample(
        row.expand(draws, -1),
        [SamplingParams()] * draws,
        seeds=[1234] * draws,
        positions=list(range(draws)),
    )
    counts = torch.bincount(torch.tensor(tokens), minlength=16).double()
    assert chi_square(counts, row[0].double().softmax(0)) < 37.7  # 99.9%, 15 degrees of freedom
    pairs = torch.tensor(tokens[:-1]) * 16 + torch.tensor(tokens[1:])
    p = row[0].double().softmax(0)
    joint = (p[:, None] * p[None]).flatten()
    counts = torch.bincount(pairs, minlength=256).double()
    likely = joint * len(pairs) > 5
    score = (counts - joint * len(pairs)) ** 2 / (joint * len(pairs))
    assert float(score[likely].sum()) < int(likely.sum()) + 4 * (2 * int(likely.sum())) ** 0.5


def test_A13_a_seeded_row_never_depends_on_its_batch_mates():
    mine = SamplingParams(temperature=0.8, seed=42)
    logits = spread(1, 5000, seed=2)
    flat = torch.zeros(3, 5000)
    mates = [GREEDY, SamplingParams(top_p=0.999), SamplingParams(top_k=2000), SamplingParams()]
    for own in (mine, SamplingParams(top_p=0.9, seed=42), SamplingParams(top_k=40, min_p=0.01)):
        for position in range(6):
            alone = sample(logits, [own], [42], [position])[0]
            for mate in mates:
                rows = torch.cat((flat, logits, flat))
                params = [mate] * 3 + [own] + [mate] * 3
                places = [9, 8, 7, position, 6, 5, 4]
                tokens = sample(rows, params, [1, 2, 3, 42, 4, 5, 6], places)
                assert tokens[3] == alone


def test_the_winner_is_the_same_among_all_tokens_and_among_the_kept():
    logits = spread(64, 1500, seed=6)
    open_rows = [SamplingParams(temperature=0.9)] * 64
    # A cut that cuts nothing: the same race, run over sorted candidates.
    cut_rows = [SamplingParams(temperature=0.9, top_k=1500)] * 64
    assert sample(logits, open_rows) == sample(logits, cut_rows)


@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0])
def test_flat_rows_look_as_far_as_they_must(scale):
    """A cut that reaches past the first candidates is found by looking further."""
    logits = spread(30, 3000, scale=scale)
    p = SamplingParams(top_p=0.95)
    scaled = apply_temperature(logits, torch.ones(30))
    off = torch.zeros(30)
    masked = keep_likeliest(scaled, off.long(), torch.full((30,), 0.95), off)
    assert int((masked > -INF).sum(1).min()) > 300
    tokens = sample(logits, [p] * 30)
    assert all(masked[row, token] > -INF for row, token in enumerate(tokens))
    assert len(set(tokens)) > 20


@pytest.mark.parametrize("fill", [float("nan"), -INF, INF])
def test_a_broken_row_spoils_no_other(fill):
    logits = spread(3, 100)
    expected = sample(logits, [SamplingParams(top_p=0.9)] * 3)
    logits[1] = fill
    for params in (SamplingParams(top_p=0.9), SamplingParams(), GREEDY):
        mixed = [SamplingParams(top_p=0.9), params, SamplingParams(top_p=0.9)]
        tokens = sample(logits, mixed)
        assert tokens[0] == expected[0]
        assert tokens[2] == expected[2]
        assert 0 <= tokens[1] < 100


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_64_bit_seed_works(seed):
    assert 0 <= sample(spread(1, 100), [SamplingParams()], seeds=[seed])[0] < 100


def test_slices_of_rows_change_nothing(monkeypatch):
    logits = spread(30, 128)
    kinds = [SamplingParams(), SamplingParams(top_k=9), SamplingParams(top_p=0.8, logprobs=3)]
    params = kinds * 10
    whole = Sampler()(logits.clone(), make_batch(params))
    monkeypatch.setattr("nanoserve.sampling.sampler.SLICE_ELEMENTS", 300)
    monkeypatch.setattr("nanoserve.sampling.logprobs.SLICE_ELEMENTS", 300)
    sliced = Sampler()(logits.clone(), make_batch(params))
    assert torch.equal(whole.token_ids, sliced.token_ids)
    assert whole.logprobs == sliced.logprobs
