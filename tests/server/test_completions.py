"""Text completions, through the openai client over a real server."""

import openai
import pytest
from nanofixtures.serving import Site

LIMIT = 256  # max_model_len of the TINY server


def complete(site: Site, prompt, **fields):
    fields = {"temperature": 0, "max_tokens": 5, **fields}
    return site.client.completions.create(model=site.state.model_names[0], prompt=prompt, **fields)


def refused(site: Site, prompt, **fields) -> dict:
    with pytest.raises(openai.BadRequestError) as error:
        complete(site, prompt, **fields)
    return error.value.body


def canary(site: Site) -> None:
    assert complete(site, "canary").choices[0].text == complete(site, "canary").choices[0].text


def test_T138_a_single_completion(tiny):
    got = complete(tiny, "Hello!")
    assert got.object == "text_completion"
    assert got.id.startswith("cmpl-")
    assert len(got.choices) == 1
    assert got.choices[0].finish_reason == "length"
    usage = got.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (6, 5, 11)
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_default_of_sixteen_tokens(scripted):
    assert (
        scripted.client.completions.create(model="script", prompt="long", temperature=0)
        .choices[0]
        .text
        == "x" * 16
    )


def test_T139_logprobs(tiny):
    assert complete(tiny, "Hello!").choices[0].logprobs is None
    for asked, allowed in ((0, {1}), (5, {5, 6})):
        got = complete(tiny, "Hello!", logprobs=asked).choices[0].logprobs
        assert len(got.tokens) == len(got.token_logprobs) == len(got.top_logprobs) == 5
        # Tokens that are parts of characters share one text, so a dict may hold fewer.
        assert all(1 <= len(top) <= max(allowed) for top in got.top_logprobs)
        assert got.text_offset[0] == 0
        for token, logprob, top in zip(
            got.tokens, got.token_logprobs, got.top_logprobs, strict=True
        ):
            assert top[token] == logprob <= 0
    assert refused(tiny, "Hello!", logprobs=21)["param"] == "logprobs"
    assert refused(tiny, "Hello!", logprobs=-1)["param"] == "logprobs"
    body = refused(tiny, "Hello!", extra_body={"prompt_logprobs": -1})
    assert body["param"] == "prompt_logprobs"


def test_T139_offsets_and_tokens_of_plain_text(scripted):
    got = complete(scripted, "letters", max_tokens=8, logprobs=0).choices[0]
    assert got.logprobs.tokens == list("abcdefgh")
    assert got.logprobs.text_offset == list(range(8))
    chunks = complete(scripted, "letters", max_tokens=8, logprobs=0, stream=True)
    parts = [c.choices[0].logprobs for c in chunks]
    assert [o for p in parts for o in p.text_offset] == list(range(8))


def test_T140_streaming(scripted):
    chunks = list(complete(scripted, "letters", max_tokens=50, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "abcdefgh"
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert {c.object for c in chunks} == {"text_completion"}


def test_T141_usage_in_streams(scripted):
    chunks = list(complete(scripted, "hello", stream=True, stream_options={"include_usage": True}))
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (5, 5)
    assert refused(scripted, "x", stream_options={"include_usage": True})["param"] == (
        "stream_options"
    )


def test_T142_several_prompts_and_several_choices(scripted):
    got = complete(scripted, ["letters", "hello", "letters"], n=2, max_tokens=20)
    assert [c.index for c in got.choices] == list(range(6))
    texts = ["abcdefgh"] * 2 + ["hi there"] * 2 + ["abcdefgh"] * 2
    assert [c.text for c in got.choices] == texts
    assert got.usage.prompt_tokens == 7 + 5 + 7
    assert got.usage.completion_tokens == 2 * (9 + 9 + 9)
    chunks = list(
        complete(
            scripted,
            ["letters", "hello", "letters"],
            n=2,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    for index, text in enumerate(texts):
        mine = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == index]
        assert "".join(c.text for c in mine) == text
        assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]
    assert chunks[-1].usage == got.usage


def test_T142_a_batch_gives_what_each_prompt_gives_alone(tiny):
    prompts = ["one", "another prompt", "one", [1, 2, 3, 4]]
    alone = [complete(tiny, p).choices[0].text for p in prompts]
    assert [c.text for c in complete(tiny, prompts[:3]).choices] == alone[:3]
    ids = [list(p.encode()) for p in prompts[:3]] + [prompts[3]]
    assert [c.text for c in complete(tiny, ids).choices] == alone


def test_A21_five_requests_of_four_samples(tiny):
    fields = {"n": 4, "temperature": 1.0, "logprobs": 1, "max_tokens": 8}
    whole = complete(tiny, ["p"] * 5, seed=3, **fields)
    assert len(whole.choices) == 20
    first_four = [c.text for c in whole.choices[:4]]
    assert len(set(first_four)) == 4
    chunks = complete(tiny, "p", seed=3, stream=True, **fields)
    texts, tokens = [""] * 4, [[], [], [], []]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens
    assert texts == first_four
    assert tokens == [c.logprobs.tokens for c in whole.choices[:4]]


@pytest.mark.parametrize("stream", [False, True])
def test_A47_echo_without_new_tokens(scripted, stream):
    got = complete(scripted, ["hello", "long"], echo=True, max_tokens=0, stream=stream)
    chunks = list(got) if stream else [got]
    choices = [c for chunk in chunks for c in chunk.choices]
    assert sorted((c.index, c.text, c.finish_reason) for c in choices) == [
        (0, "hello", "length"),
        (1, "long", "length"),
    ]
    if not stream:
        assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (9, 0)
    canary(scripted)


def test_A47_the_other_ways_to_ask_for_nothing(scripted):
    assert refused(scripted, "hello", max_tokens=0)["param"] == "max_tokens"
    assert refused(scripted, "hello", max_tokens=0, echo=True, logprobs=1)["param"] == "logprobs"
    assert refused(scripted, [999999], max_tokens=0, echo=True)["param"] == "prompt"
    canary(scripted)


def test_echo_with_new_tokens(scripted):
    assert complete(scripted, "hello", echo=True).choices[0].text == "hellohi th"
    chunks = complete(scripted, "hello", echo=True, stream=True, n=2)
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["hellohi th"] * 2
    ids = [list(b"hello")]
    assert complete(scripted, ids, echo=True).choices[0].text == "hellohi th"


@pytest.mark.parametrize("prompt", [[999999], [[1, 2], [999999]], [-1], [512], [2**70]])
def test_A48_token_ids_past_the_vocabulary(tiny, prompt):
    body = refused(tiny, prompt)
    bad = prompt[-1] if isinstance(prompt[-1], int) else prompt[-1][-1]
    assert body["param"] == "prompt"
    assert str(bad) in body["message"]
    canary(tiny)


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [""], ["a", 1], [1, "a"], [[1], 2], {}, 3, True, [True], [1.5], None]
)
def test_T146_prompts_that_are_none(tiny, prompt):
    response = tiny.http.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
def test_A45_too_long_prompts_and_outputs(tiny, stream):
    body = refused(tiny, "x" * (LIMIT + 10), stream=stream)
    assert body["code"] == "context_length_exceeded"
    assert str(LIMIT) in body["message"]
    assert str(LIMIT + 10) in body["message"]
    body = refused(tiny, "x" * 200, max_tokens=100, stream=stream)
    assert (body["code"], body["param"]) == ("context_length_exceeded", "max_tokens")
    assert str(LIMIT) in body["message"]
    assert "200" in body["message"]
    assert "100" in body["message"]


def test_A45_the_limit_crossed_while_decoding(tiny):
    got = tiny.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x" * 150}],
        extra_body={"ignore_eos": True},
    )
    assert got.choices[0].finish_reason == "length"
    assert got.usage.total_tokens == LIMIT


def test_A46_a_prompt_as_long_as_the_limit(tiny):
    for fields in ({}, {"max_tokens": 1}):
        body = {"prompt": "x" * LIMIT, **fields}
        assert tiny.http.post("/v1/completions", json=body).status_code == 400
        body = {"prompt": "x" * (LIMIT - 1), "ignore_eos": True, **fields}
        got = tiny.http.post("/v1/completions", json=body).json()
        assert got["usage"]["completion_tokens"] == 1, got
        assert got["choices"][0]["finish_reason"] == "length"


def test_vllm_extras(scripted):
    extra = {"ignore_eos": True, "min_tokens": 3}
    got = complete(scripted, "hello", max_tokens=12, extra_body=extra)
    assert got.usage.completion_tokens == 12
    got = complete(scripted, "letters", max_tokens=20, extra_body={"stop_token_ids": [ord("c")]})
    assert got.choices[0].stop_reason == ord("c")
    shown = complete(scripted, "hello", max_tokens=20, extra_body={"skip_special_tokens": False})
    assert shown.choices[0].text.startswith("hi there")
    got = complete(scripted, "hello", extra_body={"return_token_ids": True})
    assert got.choices[0].prompt_token_ids == list(b"hello")
    assert got.choices[0].token_ids == list(b"hi th")
    with pytest.raises(openai.BadRequestError, match="--scheduling-policy"):
        complete(scripted, "hello", extra_body={"priority": 1})


def test_T146_tokenize_and_back(tiny):
    got = tiny.http.post("/tokenize", json={"prompt": "héllo", "return_token_strs": True}).json()
    assert got["tokens"] == list("héllo".encode())
    assert (got["count"], got["max_model_len"]) == (6, LIMIT)
    assert got["token_strs"][0] == "h"
    back = tiny.http.post("/detokenize", json={"tokens": got["tokens"]}).json()
    assert back == {"prompt": "héllo"}
    for body in ({"tokens": [512]}, {"tokens": [-1]}, {}, {"tokens": "x"}):
        assert tiny.http.post("/detokenize", json=body).status_code == 400
    for body in ({}, {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}):
        assert tiny.http.post("/tokenize", json=body).status_code == 400
