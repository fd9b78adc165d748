"""Prefix caching in the whole engine: same tokens and log-probabilities, with it and without."""

import asyncio

import pytest
import torch
from nanofixtures.smallpool import Driver, assert_all_free
from nanofixtures.tiny import make_tiny
from transformers import AutoModelForCausalLM

from nanoserve import LLM, AsyncLLM, EngineArgs, SamplingParams
from nanoserve.errors import ConfigError, InvalidRequestError
from nanoserve.sampling_params import RequestOutputKind


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("prefix"))


def engine(folder, **options):
    settings = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64}
    return LLM(str(folder), max_model_len=64, **{**settings, **options})


SHARED = list(range(3, 26))
# At block edges, one past them, alike to the end, alike in nothing.
PROMPTS = [SHARED[:n] for n in (1, 4, 5, 8, 9, 16, 17, 23)] + [
    [*SHARED[:12], 40, 41],
    [*SHARED[:13], 40, 41],
    list(SHARED),
    [50, *SHARED],
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3),
    SamplingParams(temperature=0.9, seed=5, max_tokens=6, ignore_eos=True, logprobs=0, n=3),
]


def answers(llm, params, rounds=2):
    """Every completion of every prompt, in order: its tokens, and its log-probabilities."""
    completions = [
        completion
        for _ in range(rounds)
        for output in llm.generate([list(prompt) for prompt in PROMPTS], params)
        for completion in output.outputs
    ]
    tokens = [completion.token_ids for completion in completions]
    places = [place for completion in completions for place in completion.logprobs]
    return tokens, [{token: entry.logprob for token, entry in place.items()} for place in places]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded n=3"])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize(
    "pressure",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 3},
        {"num_gpu_blocks_override": 18, "max_num_batched_tokens": 8},
    ],
    ids=["roomy", "chunked", "tight"],
)
def test_on_and_off_give_the_same(folder, params, block_size, pressure):
    if block_size == 16 and "num_gpu_blocks_override" in pressure:
        pressure = {**pressure, "num_gpu_blocks_override": 6}
    found = {}
    for enabled in (False, True):
        options = {**pressure, "block_size": block_size, "enable_prefix_caching": enabled}
        with engine(folder, **options) as llm:
            found[enabled] = answers(llm, params)
            assert_all_free(llm)
    (tokens, logprobs), (wanted_tokens, wanted) = found[True], found[False]
    assert tokens == wanted_tokens
    for place, expected in zip(logprobs, wanted, strict=True):
        assert place == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("pressure", [{}, {"num_gpu_blocks_override": 18}], ids=["roomy", "tight"])
def test_with_a_sliding_window_on_and_off_give_the_same(tmp_path, pressure):
    window = make_tiny(tmp_path / "w", "MistralForCausalLM", sliding_window=7)
    found = {}
    for enabled in (False, True):
        options = {**pressure, "max_num_batched_tokens": 8, "enable_prefix_caching": enabled}
        with engine(window, **options) as llm:
            [group] = llm.core.scheduler.kv_cache_config.groups
            assert group.spec.window == 7
            found[enabled] = answers(llm, PARAMS[1])
            assert_all_free(llm)
    assert found[True][0] == found[False][0]
    for place, expected in zip(found[True][1], found[False][1], strict=True):
        assert place == pytest.approx(expected, abs=1e-4)


def test_a_sliding_window_holds_few_blocks_and_gives_what_all_of_them_give(tmp_path):
    window = make_tiny(tmp_path / "w", "MistralForCausalLM", sliding_window=7)
    # With some layers unlimited, all keep everything: one table for both kinds.
    mixed = make_tiny(
        tmp_path / "m", "Qwen2ForCausalLM", use_sliding_window=True, sliding_window=7,
        max_window_layers=1,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    most = {}
    for path in (window, mixed):
        reference = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
        prompt = torch.tensor([SHARED])
        wanted = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, min_new_tokens=30,
            do_sample=False, eos_token_id=None,
        )[0, len(SHARED) :].tolist()  # fmt: skip
        with engine(path, max_num_batched_tokens=8) as llm:
            driver = Driver(llm)
            for turn in range(2):
                driver.add(f"r{turn}", SHARED, params)
                usage = []
                while llm.core.has_work():
                    driver.step()
                    usage.append(llm.core.scheduler.kv_cache_manager.usage)
                assert driver.outputs[f"r{turn}"].outputs[0].token_ids == wanted
                most[path.name] = round(max(usage) * 63)
            assert driver.outputs["r1"].num_cached_tokens == 20
            driver.close()
    assert most["w"] <= 4
    assert most["m"] == 13


def test_streams_give_the_same_with_hits_as_without(folder):
    params = SamplingParams(
        temperature=0.0, max_tokens=9, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def collect(llm, prompt):
        tokens, cached = [], []
        async for output in llm.add_request(prompt, params):
            tokens += output.outputs[0].token_ids
            cached.append(output.num_cached_tokens)
        return tokens, cached

    async def main():
        args = EngineArgs(model=str(folder), dtype="float32", block_size=4, max_model_len=64)
        llm = AsyncLLM.from_engine_args(args)
        await llm.start()
        try:
            first = await collect(llm, SHARED)
            again = await asyncio.gather(*(collect(llm, SHARED) for _ in range(3)))
            assert await llm.reset_prefix_cache() is True
            fresh = await collect(llm, SHARED)
        finally:
            llm.shutdown()
        return first, again, fresh

    first, again, fresh = asyncio.run(main())
    assert first[0] == fresh[0]
    assert set(first[1]) == set(fresh[1]) == {0}
    for tokens, cached in again:
        assert tokens == first[0]
        assert set(cached) == {20}


def test_hits_are_counted_where_the_caller_sees_them(folder):
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with engine(folder) as llm:
        first, again, longer = (
            llm.generate([prompt], params)[0] for prompt in (SHARED, SHARED, [*SHARED, 30, 31])
        )
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 20)
        assert longer.num_cached_tokens == 20
        stats = llm.core.scheduler.make_stats()
        assert stats.prefix_cache_queries >= 0
        assert llm.reset_prefix_cache() is True
        assert llm.generate([SHARED], params)[0].num_cached_tokens == 0
    with engine(folder, enable_prefix_caching=False) as llm:
        llm.generate([SHARED], params)
        assert llm.generate([SHARED], params)[0].num_cached_tokens == 0


def test_the_same_prompt_twice_in_one_step_is_right(folder):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with engine(folder) as llm:
        alone = llm.generate([SHARED], params)[0].outputs[0].token_ids
        llm.reset_prefix_cache()
        both = llm.generate([SHARED, SHARED, SHARED], params)
        assert [output.outputs[0].token_ids for output in both] == [alone] * 3
        assert_all_free(llm)


def test_salts_keep_users_apart_and_one_salt_shares(folder):
    params = SamplingParams(temperature=0.0, max_tokens=1)

    def cached(llm, salt):
        prompt = {"prompt_token_ids": SHARED}
        if salt is not None:
            prompt["cache_salt"] = salt
        return llm.generate([prompt], params)[0].num_cached_tokens

    with engine(folder) as llm:
        assert [cached(llm, salt) for salt in (None, "a", "b", "a", "b", None)] == [
            0,
            0,
            0,
            20,
            20,
            20,
        ]


@pytest.mark.parametrize("salt", ["", 3, ["a"], b"a"])
def test_a_salt_that_is_none_is_refused(folder, salt):
    with engine(folder) as llm, pytest.raises(InvalidRequestError) as error:
        llm.generate([{"prompt_token_ids": [1], "cache_salt": salt}])
    assert error.value.param == "cache_salt"


def test_a_request_may_decline(folder):
    with engine(folder) as llm:
        read = SamplingParams(temperature=0.0, max_tokens=1)
        skip = SamplingParams(temperature=0.0, max_tokens=1, skip_reading_prefix_cache=True)
        found = [llm.generate([SHARED], p)[0].num_cached_tokens for p in (read, skip, read)]
        assert found == [0, 0, 20]


def test_an_unknown_hash_is_a_config_error(folder):
    with pytest.raises(ConfigError, match="prefix_caching_hash_algo 'crc'"):
        engine(folder, prefix_caching_hash_algo="crc")


def test_completions_of_one_request_share_its_prompt(folder):
    params = SamplingParams(temperature=0.8, seed=1, n=4, max_tokens=4, ignore_eos=True)
    with engine(folder, enable_prefix_caching=False) as llm:
        steps = []
        real = llm.core.scheduler.schedule

        def schedule():
            out = real()
            steps.append(dict(out.num_scheduled_tokens))
            return out

        llm.core.scheduler.schedule = schedule
        together = llm.generate([SHARED], params)[0]
        total = sum(sum(step.values()) for step in steps)
        assert total == len(SHARED) + 3 + 4 * 3
        for index, completion in enumerate(together.outputs):
            alone = SamplingParams(temperature=0.8, seed=1 + index, max_tokens=4, ignore_eos=True)
            assert llm.generate([SHARED], alone)[0].outputs[0].token_ids == completion.token_ids
        assert_all_free(llm)
