"""`LLM`: order, refusals, interruption, memory, and what it may import."""

import asyncio
import gc
import subprocess
import sys
import weakref

import pytest
from nanofixtures.smallpool import ROOMY, SMALLPOOL, assert_all_free

from nanoserve import LLM, SamplingParams
from nanoserve.errors import ConfigError, InvalidRequestError

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny, **ROOMY) as llm:
        yield llm


def test_EN1_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [[i + 1] * (1 + i % 7) for i in range(40)]
    outputs = llm.generate(prompts, [SamplingParams(max_tokens=1 + i % 9) for i in range(40)])
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert all(o.finished for o in outputs)
    assert_all_free(llm)


def test_text_token_ids_and_mappings_are_the_same_prompt(llm):
    text = "hello"
    forms = [text, list(text.encode()), {"prompt": text}, {"prompt_token_ids": list(b"hello")}]
    outputs = llm.generate(forms, GREEDY)
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    assert [o.prompt for o in outputs] == [text, None, text, None]
    assert llm.generate(list(b"hello"), GREEDY)[0].outputs[0].text == outputs[0].outputs[0].text


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    [output] = llm.chat(messages, GREEDY)
    assert output.prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    two = llm.chat([messages, messages], GREEDY)
    assert [o.outputs[0].token_ids for o in two] == [output.outputs[0].token_ids] * 2


@pytest.mark.parametrize(
    ("prompt", "word"),
    [
        ([999999], "999999"),  # A48
        ([-1], "-1"),
        ([1, "x"], "'x'"),
        ([], "empty"),
        ("", "empty"),
        ([1] * 32, "32 tokens"),  # A46: no room for an output token
        ({"text": "x"}, "prompt_token_ids"),
    ],
)
def test_A48_A51_a_bad_prompt_is_refused_before_anything_runs(llm, prompt, word):
    with pytest.raises(InvalidRequestError, match=word) as caught:
        llm.generate([[1, 2], prompt, [3]], GREEDY)
    assert "prompt 1" in str(caught.value)
    assert_all_free(llm)


def test_A46_one_token_of_room_gives_one_token(llm):
    [output] = llm.generate([[1] * 31], SamplingParams(max_tokens=None, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason == "length"


def test_A45_the_output_ends_at_the_models_length(llm):
    params = SamplingParams(max_tokens=1000, ignore_eos=True)
    [output] = llm.generate([[1] * 20], params)
    assert len(output.outputs[0].token_ids) == 12
    assert output.outputs[0].finish_reason == "length"


def test_A13_a_seeded_request_draws_the_same_whoever_runs_beside_it(llm):
    seeded = SamplingParams(temperature=0.8, seed=42, max_tokens=16, ignore_eos=True)
    unseeded = SamplingParams(temperature=0.8, max_tokens=16, ignore_eos=True)
    other = SamplingParams(temperature=0.8, seed=7, max_tokens=16, ignore_eos=True)
    prompt = [5, 6, 7]
    [alone] = llm.generate(prompt, seeded)
    for mates in ([], [other], [unseeded], [unseeded, other, unseeded]) * 5:
        outputs = llm.generate([prompt] * (1 + len(mates)), [*mates, seeded])
        assert outputs[-1].outputs[0].token_ids == alone.outputs[0].token_ids


def test_unseeded_requests_differ_and_an_engine_seed_repeats_them(tiny, llm):
    params = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    runs = {tuple(llm.generate([1, 2], params)[0].outputs[0].token_ids) for _ in range(5)}
    assert len(runs) > 1

    def seeded_engine() -> list[list[int]]:
        with LLM(tiny, seed=3, **ROOMY) as engine:
            return [o.outputs[0].token_ids for o in engine.generate([[1, 2]] * 3, params)]

    assert seeded_engine() == seeded_engine()


def test_A21_n_completions_are_each_the_seeds_own(llm):
    params = SamplingParams(
        n=4, temperature=1.0, seed=11, max_tokens=10, logprobs=2, ignore_eos=True
    )
    for output in llm.generate([[9, 8, 7]] * 5, params):
        assert [c.index for c in output.outputs] == [0, 1, 2, 3]
        for completion in output.outputs:
            single = SamplingParams(
                temperature=1.0, seed=11 + completion.index, max_tokens=10, ignore_eos=True
            )
            [alone] = llm.generate([[9, 8, 7]], single)
            assert completion.token_ids == alone.outputs[0].token_ids
            assert len(completion.logprobs) == 10
            chosen = [
                p[t].logprob for p, t in zip(completion.logprobs, completion.token_ids, strict=True)
            ]
            assert completion.cumulative_logprob == pytest.approx(sum(chosen))


def test_A61_more_completions_than_seats_run_one_after_another(tiny):
    with LLM(tiny, **{**SMALLPOOL, "max_num_seqs": 1}) as llm:
        [output] = llm.generate([[1, 2, 3]], SamplingParams(n=3, max_tokens=5, ignore_eos=True))
        assert [len(c.token_ids) for c in output.outputs] == [5, 5, 5]
        assert_all_free(llm)


def test_A55_a_pool_too_small_for_one_request_is_refused_with_the_numbers(tiny):
    with pytest.raises(ConfigError, match="holds 28 tokens"):
        LLM(tiny, **{**SMALLPOOL, "num_gpu_blocks_override": 8})


def test_an_interrupted_call_leaves_nothing_behind(tiny):
    with LLM(tiny, **SMALLPOOL) as llm:
        expected = llm.generate([4, 5], GREEDY)[0].outputs[0].token_ids
        step, count = llm.core.step, 0

        def interrupted():
            nonlocal count
            count += 1
            if count == 4:
                raise KeyboardInterrupt
            return step()

        llm.core.step = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[1] * 9, [2] * 12, [3]], SamplingParams(max_tokens=12))
        llm.core.step = step
        assert llm.generate([4, 5], GREEDY)[0].outputs[0].token_ids == expected
        assert_all_free(llm)


def test_it_works_under_a_running_event_loop(llm):
    async def inside() -> list[int]:
        return llm.generate([4, 5], GREEDY)[0].outputs[0].token_ids

    assert asyncio.run(inside()) == llm.generate([4, 5], GREEDY)[0].outputs[0].token_ids


def test_A76_a_closed_engine_frees_its_model_and_cache(tiny):
    llm = LLM(tiny, **ROOMY)
    llm.generate([1], GREEDY)
    runner = llm.core._executor.worker.runner
    watched = [weakref.ref(runner.model), *(weakref.ref(cache) for cache in runner.kv_caches)]
    assert all(ref() is not None for ref in watched)
    del runner
    llm.close()
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([1], GREEDY)


def test_A62_a_thousand_random_requests_leak_nothing(tiny):
    import random

    rng = random.Random(1)
    with LLM(tiny, **SMALLPOOL) as llm:
        from nanofixtures.smallpool import Driver

        driver, live = Driver(llm), []
        for index in range(300):
            params = SamplingParams(
                n=rng.choice([1, 1, 1, 2]),
                max_tokens=rng.randint(1, 8),
                temperature=rng.choice([0, 1.0]),
            )
            name = f"r{index}"
            driver.add(name, [rng.randrange(256) for _ in range(rng.randint(1, 12))], params)
            live.append(name)
            if rng.random() < 0.2:
                driver.abort(live.pop(rng.randrange(len(live))))
            for _ in range(rng.randint(0, 3)):
                driver.step()
        driver.run()
        assert all(driver.outputs[name].finished for name in live)
        assert driver.num_preemptions > 0
        assert_all_free(llm)


OFFLINE = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"pydantic", "msgspec", "zmq", "xxhash", "fastapi", "uvicorn",
                                  "openai", "prometheus_client", "gguf", "matplotlib"}:
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
from nanoserve import LLM, SamplingParams
with LLM(sys.argv[1], num_gpu_blocks_override=64, max_model_len=64) as llm:
    print(llm.chat([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=4))[0].finished)
"""


def test_the_offline_engine_needs_none_of_the_servers_packages(tiny):
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, tiny], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip().endswith("True"), done.stderr
