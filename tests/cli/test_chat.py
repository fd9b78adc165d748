"""`nanoserve chat`: the conversation, and who answers it."""

import asyncio
import builtins
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from nanofixtures.script import PLUGIN, write_script

from nanoserve.cli.backends import ChatError
from nanoserve.cli.chat import Conversation

SUPPORT = Path(__file__).parent.parent / "support"


class Parrot:
    """Says back the last turn, and does what some words tell it."""

    name = "parrot"

    def __init__(self):
        self.tokens = 0
        self.seen = []
        self.closed = 0

    async def answer(self, messages):
        self.seen.append([dict(m) for m in messages])
        words = messages[-1]["content"].split()
        self.tokens = len(words)
        try:
            for word in words:
                if word == "refuse":
                    raise ChatError("too long")
                if word == "interrupt":
                    os.kill(os.getpid(), signal.SIGINT)
                    await asyncio.sleep(30)
                yield word + " "
        finally:
            self.closed += 1

    async def close(self):
        pass


@pytest.fixture
def talk(monkeypatch, capsys):
    def run(*lines, system=None):
        script = iter(lines)

        def read(_prompt):
            line = next(script, EOFError)
            if isinstance(line, type):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)
        parrot = Parrot()
        conversation = Conversation(parrot, system)
        with asyncio.Runner() as runner:
            conversation.loop(runner)
        assert parrot.closed == len(parrot.seen)
        return conversation, parrot, capsys.readouterr()

    return run


def turns(conversation):
    return [(m["role"], m["content"]) for m in conversation.messages]


def test_turns_are_remembered_and_streamed(talk):
    conversation, parrot, said = talk("one two", "", "three", system="be a parrot")
    assert said.out == "one two \nthree \n"
    assert "(2 tokens, " in said.err
    assert turns(conversation) == [
        ("system", "be a parrot"),
        ("user", "one two"),
        ("assistant", "one two "),
        ("user", "three"),
        ("assistant", "three "),
    ]
    assert [len(messages) for messages in parrot.seen] == [2, 4]


def test_reset_and_exit(talk):
    conversation, parrot, _ = talk("one", "/reset", "two", "/exit", "never", system="s")
    assert [len(messages) for messages in parrot.seen] == [2, 2]
    assert turns(conversation)[1] == ("user", "two")


@pytest.fixture
def ctrl_c():
    """Python's own handling of Ctrl-C, which it leaves out where a shell's `&` had it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_an_answer_and_keeps_what_was_said(talk, ctrl_c):
    conversation, _, said = talk("one interrupt two", "three")
    assert "(stopped)" in said.err
    assert turns(conversation)[:2] == [("user", "one interrupt two"), ("assistant", "one ")]
    assert turns(conversation)[-1] == ("assistant", "three ")


def test_ctrl_c_at_the_prompt_does_not_leave(talk):
    conversation, _, _ = talk(KeyboardInterrupt, "one")
    assert len(conversation.messages) == 2


def test_a_refused_turn_is_told_and_forgotten(talk):
    conversation, _, said = talk("refuse", "one")
    assert "error: too long" in said.err
    assert turns(conversation) == [("user", "one"), ("assistant", "one ")]


def run_cli(stdin, *argv, **env):
    paths = os.pathsep.join([*sys.path, str(SUPPORT)])
    return subprocess.run(
        [sys.executable, "-m", "nanoserve.cli.main", *argv],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": paths, "NANOSERVE_PLUGINS": PLUGIN, **env},
    )


def test_a_server_that_was_named_must_answer():
    done = run_cli("hello\n", "chat", "--url", "http://127.0.0.1:9/v1")
    assert done.returncode == 1
    assert "no server answers at http://127.0.0.1:9/v1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_script(tmp_path_factory.mktemp("script"), {"more": "again", "hello": "hi there"})


@pytest.mark.slow
def test_chat_in_process_and_over_http_say_the_same(folder, monkeypatch):
    from nanofixtures.serving import Serving

    here = run_cli("hello\nmore\n", "chat", "--model", folder, "--temperature", "0")
    assert here.returncode == 0, here.stderr
    assert here.stdout == "hi there\nagain\n"
    monkeypatch.setenv("NANOSERVE_PLUGINS", PLUGIN)
    serving = Serving(model=folder)
    try:
        url = serving.site().url + "/v1"
        there = run_cli("hello\nmore\n", "chat", "--url", url, "--temperature", "0")
    finally:
        serving.close()
    assert there.stdout == here.stdout
    assert "(9 tokens, " in there.stderr
    assert "(9 tokens, " in here.stderr


@pytest.mark.slow
def test_generate_prints_the_text_or_everything(folder):
    plain = run_cli("", "generate", "hello", "--model", folder)
    assert plain.returncode == 0, plain.stderr
    assert (plain.stdout, plain.stderr) == ("hi there\n", "")
    full = run_cli(
        "hello", "generate", "-", "--model", folder, "--json", "--n", "2", "--logprobs", "0"
    )
    got = json.loads(full.stdout)
    assert got["prompt_token_ids"] == list(b"hello")
    assert [o["text"] for o in got["outputs"]] == ["hi there"] * 2
    assert got["outputs"][0]["token_ids"] == [*b"hi there", 258]
    chat = run_cli("", "generate", "hello", "--chat", "--model", folder, "--max-tokens", "2")
    assert chat.stdout == "hi\n"
    wrong = run_cli("", "generate", "hello", "--model", folder, "--temperature", "-1")
    assert wrong.returncode == 2
    assert "temperature" in wrong.stderr
