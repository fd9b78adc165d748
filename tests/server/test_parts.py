"""Parts of the server that need no engine."""

import asyncio
import json
import logging

import pytest
from nanofixtures.bytes_tokenizer import CHAT_TEMPLATE, write_bytes_tokenizer

from nanoserve.errors import EngineDeadError, InvalidRequestError
from nanoserve.outputs import Logprob
from nanoserve.server.errors import describe
from nanoserve.server.fields import HARMLESS, UNSUPPORTED, check_extra_fields
from nanoserve.server.logprobs import LOWEST, chat_logprobs, completion_logprobs
from nanoserve.server.messages import template_messages
from nanoserve.server.prompts import PromptReader
from nanoserve.server.protocol import ChatBody, ChatMessage
from nanoserve.server.sampling import DefaultSampling, chat_params
from nanoserve.server.settings import ServerSettings
from nanoserve.server.sockets import PortInUseError, before_listening, bind, url
from nanoserve.server.sse import EventStream
from nanoserve.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    write_bytes_tokenizer(folder)
    return Tokenizer.from_folder(folder)


def defaults_from(tmp_path, values) -> DefaultSampling:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return DefaultSampling.from_folder(str(tmp_path))


def test_defaults_come_from_the_generation_config(tmp_path):
    assert DefaultSampling.from_folder(str(tmp_path)) == DefaultSampling(1.0, 1.0, 0, 0.0)
    defaults = defaults_from(tmp_path, {"temperature": 0.6, "top_k": 20, "top_p": 0.9})
    assert defaults == DefaultSampling(0.6, 0.9, 20, 0.0)
    messages = [{"role": "user", "content": "x"}]
    params = chat_params(ChatBody(messages=messages), defaults)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.9, 20)
    params = chat_params(ChatBody(messages=messages, temperature=0, top_k=None), defaults)
    assert (params.temperature, params.top_k) == (0, 20)


def test_defaults_that_cannot_be_used_are_ignored_aloud(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("nanoserve"), "propagate", True)
    assert defaults_from(tmp_path, {"temperature": -3}) == DefaultSampling()
    assert defaults_from(tmp_path, {"repetition_penalty": 1.1}) == DefaultSampling()
    (tmp_path / "generation_config.json").write_text("{")
    assert DefaultSampling.from_folder(str(tmp_path)) == DefaultSampling()
    assert len(caplog.records) == 3
    assert "repetition_penalty 1.1" in caplog.text


def test_developer_becomes_system_where_the_template_does_not_know_it():
    turn = [ChatMessage(role="developer", content="x")]
    assert template_messages(turn, "no such role")[0]["role"] == "system"
    assert template_messages(turn, "role == 'developer'")[0]["role"] == "developer"


def test_A41_tool_calls_are_spelled_out_for_templates_that_would_drop_them():
    call = {"id": "c", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [ChatMessage(role="assistant", content=None, tool_calls=[call])]
    [plain] = template_messages(turns, "message['content']")
    assert plain["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert "tool_calls" not in plain
    [known] = template_messages(turns, CHAT_TEMPLATE)
    assert known["content"] == ""
    assert known["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    broken = ChatMessage(
        role="assistant", content="so:", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]
    )
    [kept] = template_messages([broken], "message['content']")
    assert kept["content"].startswith('so:\n<tool_call>\n{"name": "f", "arguments": "{"}')


def test_no_field_is_both_harmless_and_refused():
    assert not HARMLESS & set(UNSUPPORTED)


@pytest.mark.parametrize("name", sorted(UNSUPPORTED))
def test_a_null_field_is_an_absent_field(name):
    check_extra_fields({name: None}, None)


def test_numbers_and_booleans_are_not_confused():
    check_extra_fields({"frequency_penalty": 0.0}, None)
    with pytest.raises(InvalidRequestError):
        check_extra_fields({"frequency_penalty": False}, None)
    with pytest.raises(InvalidRequestError):
        check_extra_fields({"use_beam_search": 0}, None)


def test_best_of_may_repeat_n():
    check_extra_fields({"best_of": 2}, 2)
    with pytest.raises(InvalidRequestError):
        check_extra_fields({"best_of": 2}, None)


def test_logprobs_in_json_are_finite_and_bytes_are_the_tokens_own(tokenizer):
    inf = float("inf")
    positions = [
        {0xE6: Logprob(-inf, 3, "\ufffd"), 65: Logprob(-0.5, 1, "A"), 66: Logprob(-1.0, 2, "B")}
    ]
    [entry] = chat_logprobs(positions, [0xE6], 2, tokenizer)
    assert (entry.logprob, entry.bytes) == (LOWEST, [0xE6])
    assert [top.token for top in entry.top_logprobs] == ["A", "B"]
    lists, offset = completion_logprobs(positions, [0xE6], 7)
    assert lists.token_logprobs == [LOWEST]
    assert (lists.text_offset, offset) == ([7], 8)
    assert set(lists.top_logprobs[0]) == {"\ufffd", "A", "B"}


def test_hopeless_text_is_refused_before_it_is_tokenized(tokenizer, monkeypatch):
    reader = PromptReader(tokenizer, max_model_len=10)
    monkeypatch.setattr(tokenizer, "encode", lambda *a, **k: pytest.fail("was tokenized"))
    with pytest.raises(InvalidRequestError) as error:
        asyncio.run(reader.text("x" * 1_000_000, True))
    assert error.value.code == "context_length_exceeded"
    assert "10 tokens" in error.value.message
    assert "1000000 characters" in error.value.message
    reader.close()


def test_long_text_is_tokenized_beside_the_loop(tokenizer):
    reader = PromptReader(tokenizer, max_model_len=100_000)
    assert asyncio.run(reader.text("ab" * 20_000, True)) == [97, 98] * 20_000
    reader.close()


def test_A82_the_address_is_held_before_the_socket_listens():
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    for host in ("127.0.0.1", "0.0.0.0"):
        with pytest.raises(PortInUseError, match=str(port)):
            bind(host, port)
    before_listening(first)
    first.listen()
    with pytest.raises(PortInUseError):
        bind("127.0.0.1", port)
    first.close()
    bind("127.0.0.1", port).close()


def test_addresses():
    assert url("0.0.0.0", 8000) == url("", 8000) == "http://127.0.0.1:8000"
    assert url("::", 1) == "http://[::1]:1"
    assert url("example", 1) == "http://example:1"


def test_A95_settings_do_not_print_their_keys():
    assert "secret" not in repr(ServerSettings(api_keys=["secret"]))


def test_statuses_of_errors():
    assert describe(EngineDeadError("x"))[0] == 503
    assert describe(InvalidRequestError("x", "p", 404, "c"))[0] == 404
    assert describe(ZeroDivisionError("secret"))[0] == 500
    assert "secret" not in str(describe(ZeroDivisionError("secret")))


def test_an_error_in_mid_stream_is_an_event_and_frees_what_it_holds():
    sent, released = [], []

    async def events():
        yield '{"a": 1}'
        raise EngineDeadError("it died")

    async def send(message):
        sent.append(message.get("body", b""))

    async def receive():
        await asyncio.Event().wait()

    async def main():
        stream = EventStream(events(), lambda: released.append(1), asyncio.Event())
        await stream({"type": "http"}, receive, send)

    asyncio.run(main())
    parts = b"".join(sent).decode().split("\n\n")
    assert parts[0] == 'data: {"a": 1}'
    assert json.loads(parts[1].removeprefix("data: "))["error"]["code"] == "engine_dead"
    assert parts[2:] == ["data: [DONE]", ""]
    assert released == [1]
