"""What the server refuses, how it says so, and what it lets pass."""

import logging
import time

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nanoserve.server.fields import HARMLESS, UNSUPPORTED
from nanoserve.server.middleware import INFERENCE_PATHS

MESSAGES = [{"role": "user", "content": "hello"}]


def post(site, path="/v1/chat/completions", **fields):
    start = {"messages": MESSAGES} if "chat" in path else {"prompt": "hello"}
    return site.http.post(path, json={**start, "max_tokens": 4, **fields})


def assert_error(response, status, param=None, code=None):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert (error["param"], error["code"]) == (param, code)
    return error


def test_A38_every_error_has_the_error_object(tiny):
    assert_error(
        post(tiny, "/v1/completions", prompt="x" * 999), 400, "prompt", "context_length_exceeded"
    )
    assert_error(post(tiny, temperature="hot"), 400, "temperature")
    assert_error(post(tiny, model="nobody"), 404, "model", "model_not_found")
    headers = {"content-type": "application/json"}
    broken = tiny.http.post("/v1/completions", content='{"prompt": ', headers=headers)
    assert "JSON" in assert_error(broken, 400)["message"]
    assert_error(tiny.http.post("/v1/nothing", json={}), 404)
    assert_error(tiny.http.get("/v1/completions"), 405)
    for body in ("[]", "3", '"x"', "null"):
        response = tiny.http.post("/v1/completions", content=body, headers=headers)
        assert response.status_code == 400, body
        assert "error" in response.json()


def test_A38_the_client_raises_its_own_classes(tiny):
    with pytest.raises(openai.NotFoundError, match="nobody"):
        tiny.client.chat.completions.create(model="nobody", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        tiny.client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)


def test_T145_a_body_that_is_not_declared_json(tiny):
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = tiny.http.post(
            "/v1/completions", content='{"prompt": "x"}', headers={"content-type": kind}
        )
        assert "application/json" in assert_error(response, 400)["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", 10**6),
        ("n", "2"),
        ("n", True),
        ("temperature", -0.1),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("seed", "x"),
        ("seed", 2**64),
        ("max_tokens", 10**12),
        ("max_tokens", -5),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", 9),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [10**6]),
        ("stop_token_ids", "x"),
        ("stream", "yes"),
        ("request_id", "two words"),
        ("request_id", "x" * 200),
    ],
)
@pytest.mark.parametrize("path", sorted(INFERENCE_PATHS))
def test_SV3_A87_A94_values_out_of_range(tiny, path, field, value):
    start = time.monotonic()
    assert_error(post(tiny, path, **{field: value}), 400, field)
    if field == "n":
        # Refused before any work: far below the second that a loaded machine may need.
        assert time.monotonic() - start < 1


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (None, "messages"),
        ([{"role": "robot", "content": "x"}], "messages.0.role"),
        ([{"content": "x"}], "messages.0.role"),
        ([*MESSAGES, {"role": "user", "content": 3}], "messages.1.content"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages.0.tool_calls"),
    ],
)
def test_SV3_messages_that_are_none(tiny, messages, param):
    error = post(tiny, messages=messages).json()["error"]
    assert error["param"] == param


# A value of each unsupported field that would change the answer.
CHANGING = dict.fromkeys(UNSUPPORTED, "x") | {
    "bad_words": ["x"],
    "documents": [{}],
    "frequency_penalty": 0.5,
    "functions": [{}],
    "length_penalty": 2,
    "logit_bias": {"1": 5},
    "modalities": ["audio"],
    "presence_penalty": 0.5,
    "prompt_logprobs": 0,
    "repetition_penalty": 1.2,
    "response_format": {"type": "json_object"},
    "return_tokens_as_token_ids": True,
    "spaces_between_special_tokens": False,
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "use_beam_search": True,
    "best_of": 3,
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "kv_transfer_params": {"remote_host": "10.0.0.1"},
}


@pytest.mark.parametrize("name", sorted(CHANGING))
def test_SV3_A93_fields_that_would_change_the_answer(tiny, name):
    for path in INFERENCE_PATHS:
        error = assert_error(post(tiny, path, **{name: CHANGING[name]}), 400, name)
        assert name in error["message"]


def test_SV3_neutral_values_pass(tiny):
    neutral = {
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": {},
        "response_format": {"type": "text"},
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "none",
        "best_of": 1,
        "suffix": None,
        "modalities": ["text"],
    }
    for path in INFERENCE_PATHS:
        assert post(tiny, path, **neutral).status_code == 200


def test_A42_harmless_and_unknown_fields_pass(tiny, caplog, monkeypatch):
    monkeypatch.setattr("nanoserve.server.fields._logged", set())
    monkeypatch.setattr(logging.getLogger("nanoserve"), "propagate", True)
    harmless = dict.fromkeys(HARMLESS, "x") | {"metadata": {"a": "b"}, "store": True}
    messages = [{**MESSAGES[0], "weight": 1, "refusal": None}]
    with caplog.at_level(logging.WARNING, logger="nanoserve.server"):
        for _ in range(2):
            fields = {**harmless, "made_up": 1, "messages": messages}
            assert post(tiny, **fields).status_code == 200
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2  # once for each name, not once a request
    assert "'made_up'" in said[0] + said[1]
    assert "'messages.weight'" in said[0] + said[1]


def test_A44_model_names(tiny):
    for name in ("tiny", "org/tiny-alias"):
        got = tiny.client.completions.create(model=name, prompt="x", max_tokens=1)
        assert got.model == name
        assert tiny.client.models.retrieve(name).id == name
    assert post(tiny, model=None).json()["model"] == "tiny"
    assert post(tiny).json()["model"] == "tiny"
    error = assert_error(post(tiny, model="a/b"), 404, "model", "model_not_found")
    assert "'a/b'" in error["message"]
    assert "'tiny'" in error["message"]
    models = tiny.client.models.list().data
    assert [m.id for m in models] == ["tiny", "org/tiny-alias"]
    assert models[0].max_model_len == 256
    with pytest.raises(openai.NotFoundError):
        tiny.client.models.retrieve("a/b")


def test_A89_chat_templates_cannot_be_replaced(tiny):
    evil = "{{ 'x' * 10**9 }}"
    assert_error(post(tiny, chat_template=evil), 400, "chat_template")
    for name in ("chat_template", "tokenize", "messages", "conversation", "tools", "__x"):
        param = f"chat_template_kwargs.{name}"
        assert_error(post(tiny, chat_template_kwargs={name: evil}), 400, param)
    assert post(tiny, chat_template_kwargs={"enable_thinking": False}).status_code == 200
    body = {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": evil}}
    assert tiny.http.post("/tokenize", json=body).status_code == 400


def test_413_for_a_body_that_is_too_long(tiny_serving):
    site = tiny_serving.site(max_body_bytes=1000)
    assert_error(post(site, "/v1/completions", prompt="x" * 2000), 413)

    def pieces():
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * 100
        yield b'"}'

    headers = {"content-type": "application/json"}
    response = site.http.post("/v1/completions", content=pieces(), headers=headers)
    assert_error(response, 413)
    assert post(site, "/v1/completions").status_code == 200


def test_text_that_is_not_unicode(tiny):
    headers = {"content-type": "application/json"}
    for body in (
        r'{"prompt": "\ud800"}',
        r'{"prompt": "x", "model": "\ud800"}',
        b'{"prompt": "\xff"}',
    ):
        response = tiny.http.post("/v1/completions", content=body, headers=headers)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["message"]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = [
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "echo"),
    *("logprobs", "top_logprobs", "min_tokens", "stream", "stream_options", "prompt", "messages"),
    *("model", "priority", "chat_template_kwargs", "tools", "best_of", "request_id", "user"),
    *("ignore_eos", "max_completion_tokens", "add_special_tokens", "return_token_ids"),
]


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    path=st.sampled_from(sorted(INFERENCE_PATHS)),
    fields=st.dictionaries(st.sampled_from(FIELDS), json_values, max_size=3),
)
def test_SV3_no_body_makes_a_500(tiny, path, fields):
    response = post(tiny, path, **fields)
    assert response.status_code in (200, 400, 404), (fields, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
