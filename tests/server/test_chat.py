"""Chat completions, through the openai client over a real server."""

import asyncio

import openai
import pytest
from nanofixtures.serving import FAMILY


def ask(text):
    return [{"role": "user", "content": text}]


def answer(site, text, **fields):
    fields = {"temperature": 0, **fields}
    return site.client.chat.completions.create(model="script", messages=ask(text), **fields)


def streamed(site, text, **fields):
    return list(answer(site, text, stream=True, **fields))


def joined(chunks, index=0):
    return "".join(
        c.delta.content or "" for chunk in chunks for c in chunk.choices if c.index == index
    )


def test_SV1_a_whole_answer(scripted):
    got = answer(scripted, "hello")
    assert got.object == "chat.completion"
    assert got.id.startswith("chatcmpl-")
    assert got.model == "script"
    [choice] = got.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "hi there")
    assert choice.finish_reason == "stop"
    # user turn, newlines and markers around "hello" in bytes, and the answer with its end token
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    length = len(prompt) - sum(len(m) - 1 for m in ("<|im_start|>", "<|im_end|>", "<|im_start|>"))
    assert got.usage.prompt_tokens == length
    assert got.usage.completion_tokens == len("hi there") + 1
    assert got.usage.total_tokens == length + len("hi there") + 1


def test_T140_A37_a_stream_joins_to_the_whole_answer(scripted):
    chunks = streamed(scripted, "hello")
    assert joined(chunks) == answer(scripted, "hello").choices[0].message.content
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    roles = [c.choices[0].delta.role for c in chunks]
    assert roles == ["assistant"] + [None] * (len(chunks) - 1)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]


def test_T140_TINY_streams_what_it_answers(tiny):
    fields = {"messages": ask("abc"), "max_tokens": 12, "temperature": 0.9, "seed": 5}
    whole = tiny.client.chat.completions.create(model="tiny", **fields)
    chunks = list(tiny.client.chat.completions.create(model="tiny", stream=True, **fields))
    assert joined(chunks) == whole.choices[0].message.content


def test_A35_A37_the_raw_stream_is_data_lines_only(scripted):
    body = {"messages": ask("hello"), "stream": True}
    with scripted.http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        raw = response.read().decode()
    events = raw.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"
    assert '"finish_reason":""' not in raw
    assert raw.count('"role"') == 1


def test_A27_no_replacement_marks_in_deltas(scripted):
    chunks = streamed(scripted, "unicode")
    assert all("\ufffd" not in (c.choices[0].delta.content or "") for c in chunks)
    assert joined(chunks) == FAMILY == answer(scripted, "unicode").choices[0].message.content


def test_A27_a_character_cut_by_max_tokens_is_the_same_in_both_modes(scripted):
    whole = answer(scripted, "unicode", max_tokens=6)
    assert whole.choices[0].finish_reason == "length"
    assert joined(streamed(scripted, "unicode", max_tokens=6)) == whole.choices[0].message.content


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [(["cdefg"], "ab", "cdefg"), (["cdeX"], "abcdefgh", None), (["h"], "abcdefg", "h")],
)
def test_A28_stop_strings_never_leak(scripted, stop, text, reason):
    whole = answer(scripted, "letters", stop=stop).choices[0]
    assert (whole.message.content, whole.finish_reason, whole.stop_reason) == (text, "stop", reason)
    chunks = streamed(scripted, "letters", stop=stop)
    assert joined(chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_stop_string_kept_on_request(scripted):
    got = answer(scripted, "letters", stop=["cd"], extra_body={"include_stop_str_in_output": True})
    assert got.choices[0].message.content == "abcd"


def test_A31_reasons_and_counts(scripted):
    by_token = answer(scripted, "letters")
    by_length = answer(scripted, "letters", max_tokens=3)
    by_string = answer(scripted, "letters", stop="ef")
    reasons = [a.choices[0].finish_reason for a in (by_token, by_length, by_string)]
    assert reasons == ["stop", "length", "stop"]
    counts = [a.usage.completion_tokens for a in (by_token, by_length, by_string)]
    assert counts == [9, 3, 6]
    assert [a.choices[0].message.content for a in (by_length, by_string)] == ["abc", "abcd"]


def test_A29_T141_usage_comes_once_if_asked(scripted):
    chunks = streamed(scripted, "hello", stream_options={"include_usage": True})
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert all("usage" in c.model_fields_set for c in chunks)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 9
    assert "usage" not in streamed(scripted, "hello")[-1].model_fields_set


def test_T141_continuous_usage(scripted):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = streamed(scripted, "hello", stream_options=options)
    counts = [c.usage.completion_tokens for c in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 9
    assert chunks[-1].usage.prompt_tokens == chunks[0].usage.prompt_tokens


def test_T141_stream_options_without_stream(scripted):
    with pytest.raises(openai.BadRequestError) as error:
        answer(scripted, "hello", stream_options={"include_usage": True})
    assert error.value.body["param"] == "stream_options"


def test_A30_A21_usage_of_several_choices(tiny):
    fields = {
        "messages": ask("tell"),
        "n": 3,
        "temperature": 1.0,
        "seed": 11,
        "max_tokens": 40,
        "logprobs": True,
    }
    whole = tiny.client.chat.completions.create(model="tiny", **fields)
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert len({c.message.content for c in whole.choices}) == 3
    assert whole.usage.completion_tokens == sum(len(c.logprobs.content) for c in whole.choices)
    chunks = list(
        tiny.client.chat.completions.create(
            model="tiny", stream=True, stream_options={"include_usage": True}, **fields
        )
    )
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    for choice in whole.choices:
        assert joined(chunks, choice.index) == choice.message.content
    reasons = [c.index for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(reasons) == [0, 1, 2]


def test_T142_child_i_draws_with_seed_plus_i(tiny):
    fields = {"messages": ask("tell"), "temperature": 1.0, "max_tokens": 10}
    three = tiny.client.chat.completions.create(model="tiny", n=3, seed=7, **fields)
    second = tiny.client.chat.completions.create(model="tiny", seed=8, **fields)
    assert three.choices[1].message.content == second.choices[0].message.content


def test_chat_logprobs(tiny):
    fields = {"messages": ask("abc"), "max_tokens": 5, "logprobs": True, "top_logprobs": 4}
    got = tiny.client.chat.completions.create(model="tiny", temperature=0, **fields)
    entries = got.choices[0].logprobs.content
    assert len(entries) == got.usage.completion_tokens
    for entry in entries:
        assert len(entry.top_logprobs) == 4
        # Greedy: the chosen token is the likeliest.
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
        assert bytes(entry.bytes).decode("utf-8", "replace") == entry.token
    chunks = list(
        tiny.client.chat.completions.create(model="tiny", temperature=0, stream=True, **fields)
    )
    from_stream = [e for c in chunks for x in c.choices if x.logprobs for e in x.logprobs.content]
    assert from_stream == entries
    plain = tiny.client.chat.completions.create(
        model="tiny", messages=ask("abc"), max_tokens=2, logprobs=True
    )
    assert plain.choices[0].logprobs.content[0].top_logprobs == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ],
)
def test_logprobs_out_of_range(tiny, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        tiny.client.chat.completions.create(model="tiny", messages=ask("a"), **fields)
    assert error.value.body["param"] == param


def test_return_token_ids(scripted):
    extra = {"return_token_ids": True}
    got = answer(scripted, "hello", extra_body=extra)
    ids = [*b"hi there", 258]
    assert got.choices[0].token_ids == ids
    chunks = streamed(scripted, "hello", extra_body=extra)
    assert chunks[0].prompt_token_ids == got.prompt_token_ids
    parts = [c.choices[0].token_ids for c in chunks if hasattr(c.choices[0], "token_ids")]
    assert [i for part in parts for i in part] == ids


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ({"max_completion_tokens": 4}, 4),
        ({"max_completion_tokens": 4, "max_tokens": 2}, 4),
        ({"max_completion_tokens": None, "max_tokens": 2}, 2),
    ],
)
def test_A39_max_completion_tokens_wins(scripted, fields, count):
    got = answer(scripted, "letters", **fields)
    assert (got.usage.completion_tokens, got.choices[0].finish_reason) == (count, "length")


@pytest.mark.parametrize("field", ["max_completion_tokens", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1, 10**12])
def test_A39_A94_limits_that_make_no_sense(scripted, field, value):
    with pytest.raises(openai.BadRequestError) as error:
        answer(scripted, "letters", **{field: value})
    assert error.value.body["param"] == field
    assert field in error.value.body["message"]


@pytest.mark.parametrize("field", ["max_completion_tokens", "max_tokens"])
def test_A39_A45_no_room_is_told_under_the_name_that_was_sent(scripted, field):
    with pytest.raises(openai.BadRequestError, match="3000 in the output") as error:
        answer(scripted, "letters", **{field: 3000})
    assert error.value.body["param"] == field
    assert error.value.body["code"] == "context_length_exceeded"


def test_A40_text_parts_are_joined(scripted):
    def tokens(content):
        body = {"messages": [{"role": "user", "content": content}]}
        return scripted.http.post("/tokenize", json=body).json()["tokens"]

    one = {"type": "text", "text": "hello"}
    two = {"type": "text", "text": "again"}
    assert tokens([one]) == tokens("hello")
    assert tokens([one, two]) == tokens("hello\nagain")
    mixed = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [one]},
    ]
    got = scripted.client.chat.completions.create(model="script", messages=mixed, temperature=0)
    assert got.choices[0].message.content == "hi there"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "text"},
        {"type": "text", "text": 3},
        {},
    ],
)
def test_A40_other_parts_are_refused_by_place(scripted, part):
    content = [{"type": "text", "text": "see"}, part]
    with pytest.raises(openai.BadRequestError) as error:
        scripted.client.chat.completions.create(
            model="script", messages=[{"role": "user", "content": content}]
        )
    assert error.value.body["param"] == "messages.0.content.1"
    assert str(part.get("type")) in error.value.body["message"]


TOOL_TURNS = [
    {"role": "user", "content": "weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "c1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": '{"city": "Bern"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    {"role": "user", "content": "hello"},
]


@pytest.mark.parametrize("absent", [False, True])
def test_A41_tool_turns_are_rendered(scripted, absent):
    turns = [dict(turn) for turn in TOOL_TURNS]
    if absent:
        del turns[1]["content"]
    ids = scripted.http.post("/tokenize", json={"messages": turns}).json()["tokens"]
    text = scripted.http.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert "None" not in text
    assert "[get_weather]" in text  # how the fixture's template writes a call
    assert "sunny" in text
    got = scripted.client.chat.completions.create(model="script", messages=turns, temperature=0)
    assert got.choices[0].message.content == "hi there"


@pytest.mark.parametrize("stop", [None, "x", ["x"], [], ["a1", "b1", "c1", "d1", "e1"]])
def test_A43_stop_in_every_form(scripted, stop):
    assert answer(scripted, "hello", stop=stop).choices[0].message.content == "hi there"


@pytest.mark.parametrize("stop", [3, [3], ["a", None], {}, "", [""], ["s"] * 17])
def test_A43_stop_that_is_refused(scripted, stop):
    body = {"messages": ask("hello"), "stop": stop}
    response = scripted.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"


def test_A49_one_begin_token_in_chats(scripted):
    # The fixture's template writes the turn marker; text is encoded as it stands.
    ids = scripted.http.post("/tokenize", json={"messages": ask("x")}).json()["tokens"]
    assert ids == scripted.state.engine.tokenizer.encode_chat(ask("x"))
    raw = scripted.http.post("/tokenize", json={"prompt": "x"}).json()["tokens"]
    assert raw == scripted.state.engine.tokenizer.encode("x")
    got = answer(scripted, "x", max_tokens=1, extra_body={"return_token_ids": True})
    assert got.prompt_token_ids == ids


def test_A50_no_chat_template(scripted):
    tokenizer = scripted.state.engine.tokenizer
    template = tokenizer.chat_template
    tokenizer.chat_template = None
    try:
        with pytest.raises(openai.BadRequestError, match="--chat-template"):
            answer(scripted, "hello")
        got = scripted.client.completions.create(model="script", prompt="hello", temperature=0)
        assert got.choices[0].text == "hi there"
    finally:
        tokenizer.chat_template = template


def test_continue_final_message(scripted):
    turns = [*ask("hello"), {"role": "assistant", "content": "hi "}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    got = scripted.client.chat.completions.create(
        model="script", messages=turns, temperature=0, extra_body=extra
    )
    assert got.choices[0].message.content == "there"
    with pytest.raises(openai.BadRequestError):
        scripted.client.chat.completions.create(
            model="script", messages=turns, extra_body={"continue_final_message": True}
        )


def test_A36_twenty_streams_at_once_each_get_their_text(scripted):
    async def one(client, i):
        stream = await client.chat.completions.create(
            model="script", messages=ask(f"stream {i:02}"), temperature=0, stream=True
        )
        return joined([chunk async for chunk in stream])

    async def main():
        async with scripted.async_client() as client:
            return await asyncio.gather(*[one(client, i) for i in range(20)])

    assert asyncio.run(main()) == [f"the answer to {i} is {i * i}" for i in range(20)]
