"""Reported log-probabilities against float64."""

import resource

import pytest
import torch

from nanoserve.sampling.logprobs import gather_logprobs
from nanoserve.sampling.sampler import Sampler, SamplingBatch, SamplingColumns
from nanoserve.sampling_params import SamplingParams


def test_SA5_values_ranks_and_order():
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * 3
    chosen = torch.tensor([0, 5, int(logits[2].argmax()), 299, 17])
    wanted = [0, 1, 2, 20, 7]
    reports = gather_logprobs(logits, chosen, wanted)
    exact = logits.double().log_softmax(-1)
    for row, (report, n) in enumerate(zip(reports, wanted, strict=True)):
        token = int(chosen[row])
        assert report.token_ids[0] == token
        assert report.token_ids[1:] == exact[row].topk(n).indices.tolist()
        for token_id, value in zip(report.token_ids, report.logprobs, strict=True):
            assert value == pytest.approx(float(exact[row, token_id]), abs=1e-5)
        assert report.rank == int((exact[row] > exact[row, token]).sum()) + 1
    assert reports[2].rank == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_width_logits_are_summed_in_float32(dtype):
    logits = (torch.randn(2, 50_000) * 2).to(dtype)
    report = gather_logprobs(logits, torch.tensor([3, 4]), [1, 1])
    exact = logits.double().log_softmax(-1)
    assert report[0].logprobs[0] == pytest.approx(float(exact[0, 3]), abs=1e-4)


def test_A18_logprobs_are_raw_whatever_the_sampling_settings():
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(1)) * 2
    seen = []
    for temperature in (0.0, 0.1, 1.0):
        for top_p in (0.1, 1.0):
            params = SamplingParams(temperature=temperature, top_p=top_p, logprobs=5)
            columns = SamplingColumns(1, torch.device("cpu"))
            columns.write(0, params, 1)
            batch = SamplingBatch.build(columns, [params], torch.zeros(1).long())
            report = Sampler()(logits.clone(), batch).logprobs[0]
            seen.append((report.token_ids[1:], report.logprobs[1:]))
    assert all(s == seen[0] for s in seen)


def test_equal_tokens_share_the_better_rank():
    report = gather_logprobs(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), torch.tensor([2]), [0])
    assert report[0].rank == 1


@pytest.mark.slow
def test_A60_many_rows_of_a_large_vocabulary_need_little_more_than_the_logits():
    # 600 MB of bf16 logits; at once in float32, softmax and ranks would take some 2.5 GB more.
    logits = torch.zeros(2000, 150_000, dtype=torch.bfloat16)
    logits[:, 77] = 3.0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reports = gather_logprobs(logits, torch.zeros(2000).long(), [3] * 2000)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert len(reports) == 2000
    assert all(r.rank == 2 and r.token_ids[1] == 77 for r in reports)
    assert grown < 500 * 1024  # KiB: a few slices of 64 MiB
