"""Text events through the whole engine: the SCRIPT model says exactly what each case needs."""

import pytest
from nanofixtures.script import write_script
from nanofixtures.smallpool import assert_all_free

from nanoserve import LLM, SamplingParams

FAMILY = "\U0001f468‍\U0001f469‍\U0001f467‍\U0001f466 é ü 漢字"


@pytest.fixture
def make(tmp_path, script_plugin):
    """A roomy LLM over a script; closed at the end."""
    opened = []

    def make(replies, **kwargs) -> LLM:
        llm = LLM(write_script(tmp_path / str(len(opened)), replies, **kwargs), max_model_len=512)
        opened.append(llm)
        return llm

    yield make
    for llm in opened:
        assert_all_free(llm)
        llm.close()


def greedy(**kwargs) -> SamplingParams:
    return SamplingParams(temperature=0.0, **{"max_tokens": 100, **kwargs})


def test_A31_the_three_ways_to_end(make):
    llm = make({"<1>": "done", "<2>": "abcdef"})
    by_token, by_length, by_string = (
        llm.generate(prompt, params)[0].outputs[0]
        for prompt, params in [
            ("<1>", greedy()),
            ("<2>", greedy(max_tokens=3)),
            ("<2>", greedy(stop=["de"])),
        ]
    )
    assert (by_token.text, by_token.finish_reason, by_token.stop_reason) == ("done", "stop", None)
    assert (by_length.text, by_length.finish_reason) == ("abc", "length")
    assert (by_string.text, by_string.finish_reason, by_string.stop_reason) == ("abc", "stop", "de")


def test_A27_characters_over_many_tokens_arrive_whole(make):
    llm = make({"go": FAMILY})
    [output] = llm.generate("go", greedy())
    assert output.outputs[0].text == FAMILY


def test_A28_stop_strings_across_tokens(make):
    llm = make({"go": "abcdefgh"})
    cut = llm.generate("go", greedy(stop=["cdefg"]))[0].outputs[0]
    assert (cut.text, cut.finish_reason) == ("ab", "stop")
    kept = llm.generate("go", greedy(stop=["cdefg"], include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == "abcdefg"
    late = llm.generate("go", greedy(stop=["cdeX"]))[0].outputs[0]
    assert (late.text, late.finish_reason) == ("abcdefgh", "stop")


def test_SC10_stop_token_ids_give_the_id_as_reason(make):
    llm = make({"go": "abc.def"})
    got = llm.generate("go", greedy(stop_token_ids=[ord(".")]))[0].outputs[0]
    assert (got.text, got.finish_reason, got.stop_reason) == ("abc", "stop", ord("."))
    assert got.token_ids == list(b"abc.")


def test_min_tokens_holds_back_stop_strings_and_end_tokens(make):
    llm = make({"go": "ab.cd.ef"})
    params = greedy(stop=["."], min_tokens=4)
    got = llm.generate("go", params)[0].outputs[0]
    assert (got.text, got.stop_reason) == ("ab.cd", ".")
    masked = make({"go": "a"}).generate("go", greedy(min_tokens=5, max_tokens=8))[0].outputs[0]
    assert len(masked.token_ids) >= 5


def test_A20_columns_past_the_tokenizer_are_never_sampled(make):
    llm = make({"go": [505, 505, 97]}, tokenizer_size=500, vocab_size=512)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature=temperature, max_tokens=6, ignore_eos=True, logprobs=3)
        [output] = llm.generate("go", params)
        assert all(t < 500 for t in output.outputs[0].token_ids)


def test_A18_logprobs_are_of_the_raw_distribution(make):
    llm = make({"go": "x"})
    tables = []
    for params in (
        greedy(logprobs=5, max_tokens=1),
        SamplingParams(temperature=0.1, logprobs=5, max_tokens=1, seed=1),
        SamplingParams(temperature=1.0, top_p=0.1, logprobs=5, max_tokens=1, seed=1),
    ):
        position = llm.generate("go", params)[0].outputs[0].logprobs[0]
        tables.append({t: round(lp.logprob, 5) for t, lp in position.items()})
    assert tables[0] == tables[1] == tables[2]
    assert llm.generate("go", greedy(logprobs=0))[0].outputs[0].logprobs[0].keys() == {ord("x")}


def test_a_model_that_raises_fails_the_call_and_frees_the_engine(make):
    llm = make({"fine": "ok", "boom": "x"}, raises=["boom"])
    with pytest.raises(RuntimeError, match="the script raises"):
        llm.generate(["fine", "boom"], greedy())
    assert llm.generate("fine", greedy())[0].outputs[0].text == "ok"
