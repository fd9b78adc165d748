"""Features that work alone and fail in pairs: every pair of settings, against the request alone.

The same requests run on SMALLPOOL, where they chunk, mix and preempt each other, and each alone in
a roomy engine. TINY in fp32 must give the same tokens, always.
"""

import itertools
import random

import pytest
from nanofixtures.smallpool import ROOMY, SMALLPOOL, Driver, assert_all_free

from nanoserve import LLM, SamplingParams

OPTIONS: dict[str, list] = {
    "chunking": ["budget 3", "budget 8", "budget 32", "off", "threshold 2"],
    "pool": ["tight", "roomy"],
    "block_size": [1, 4, 5],
    "policy": ["fcfs", "priority"],
    "n": [1, 3],
    "abort": ["none", "waiting", "early", "late"],
    "sampling": ["greedy", "seeded", "top_k", "top_p min_p"],
    "logprobs": [None, 0, 3],
    "stop": ["length", "token", "min_tokens"],
}


def covering_rows(options: dict[str, list], seed: int = 0) -> list[dict]:
    """Rows in which every pair of values of two options occurs (greedy, deterministic)."""
    names = list(options)
    missing = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x in options[a]
        for y in options[b]
    }
    rng, rows = random.Random(seed), []
    while missing:
        candidates = []
        for _ in range(30):
            a, x, b, y = rng.choice(sorted(missing, key=repr))
            row = {name: rng.choice(options[name]) for name in names} | {a: x, b: y}
            covered = {
                (p, row[p], q, row[q]) for p, q in itertools.combinations(names, 2)
            } & missing
            candidates.append((len(covered), len(candidates), row, covered))
        _, _, row, covered = max(candidates, key=lambda c: (c[0], -c[1]))
        missing -= covered
        rows.append(row)
    return rows


ROWS = covering_rows(OPTIONS)


def test_rows_cover_every_pair():
    for a, b in itertools.combinations(OPTIONS, 2):
        seen = {(row[a], row[b]) for row in ROWS}
        assert seen == set(itertools.product(OPTIONS[a], OPTIONS[b]))


def engine_args(row: dict) -> dict:
    args = dict(SMALLPOOL)
    kind, _, number = row["chunking"].partition(" ")
    if kind == "budget":
        args["max_num_batched_tokens"] = int(number)
    elif kind == "off":
        args |= {"enable_chunked_prefill": False, "max_num_batched_tokens": 32}
    else:
        args["long_prefill_token_threshold"] = int(number)
    args["block_size"] = row["block_size"]
    tokens = 32 if row["pool"] == "tight" else 256
    args["num_gpu_blocks_override"] = 1 + -(-tokens // row["block_size"])
    args["scheduling_policy"] = row["policy"]
    return args


def sampling_params(row: dict, index: int) -> SamplingParams:
    kinds = {
        "greedy": {"temperature": 0.0},
        "seeded": {"temperature": 1.0},
        "top_k": {"temperature": 0.8, "top_k": 7},
        "top_p min_p": {"temperature": 1.3, "top_p": 0.7, "min_p": 0.02},
    }
    kwargs = dict(kinds[row["sampling"]], seed=100 + index, n=row["n"], logprobs=row["logprobs"])
    kwargs |= {"ignore_eos": True, "max_tokens": 6 + 2 * index}
    if row["stop"] == "token":
        kwargs["stop_token_ids"] = list(range(0, 512, 9))
    elif row["stop"] == "min_tokens":
        kwargs |= {"stop_token_ids": list(range(0, 512, 5)), "min_tokens": 4}
    return SamplingParams(**kwargs)


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(256) for _ in range(length)] for length in (1, 4, 5, 9, 13)]


@pytest.fixture(scope="module")
def alone(tiny):
    """A roomy engine for one request at a time."""
    with LLM(tiny, **ROOMY) as llm:
        yield llm


@pytest.mark.parametrize("row", ROWS, ids=[str(i) for i in range(len(ROWS))])
def test_pair(row, tiny, alone):
    with LLM(tiny, **engine_args(row)) as llm:
        driver = Driver(llm)
        for index, prompt in enumerate(prompts()):
            driver.add(f"r{index}", prompt, sampling_params(row, index), priority=-index % 3)
        victims = {"none": None, "waiting": 0, "early": 2, "late": 9}
        if (at := victims[row["abort"]]) is not None:
            for _ in range(at):
                driver.step()
            driver.abort("r3")
        driver.run()
        assert_all_free(llm)
        # The canary: a known prompt afterwards still gives what it gives alone.
        canary = [1, 2, 3]
        params = SamplingParams(temperature=0.0, max_tokens=5)
        assert tokens(llm.generate(canary, params)[0]) == tokens(alone.generate(canary, params)[0])
        assert_all_free(llm)
    for index, prompt in enumerate(prompts()):
        expected = alone.generate(prompt, sampling_params(row, index))[0]
        got = driver.outputs.get(f"r{index}")
        if index == 3 and row["abort"] != "none":
            assert got is None or is_cut(got, expected)
            continue
        assert got is not None
        assert got.finished
        assert tokens(got) == tokens(expected)
        same_details(got, expected)


def tokens(output) -> list[list[int]]:
    return [c.token_ids for c in sorted(output.outputs, key=lambda c: c.index)]


def is_cut(got, expected) -> bool:
    """What an aborted request had is the beginning of what it would have been."""
    return all(
        whole[: len(part)] == part
        for part, whole in zip(tokens(got), tokens(expected), strict=True)
    )


def same_details(got, expected) -> None:
    for a, b in zip(
        sorted(got.outputs, key=lambda c: c.index),
        sorted(expected.outputs, key=lambda c: c.index),
        strict=True,
    ):
        assert (a.finish_reason, a.stop_reason, a.text) == (b.finish_reason, b.stop_reason, b.text)
        if b.logprobs is None:
            assert a.logprobs is None
            continue
        assert len(a.logprobs) == len(b.logprobs) == len(a.token_ids)
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert list(x) == list(y)
            for token in x:
                assert x[token].logprob == pytest.approx(y[token].logprob, abs=1e-4)
                assert x[token].rank == y[token].rank
