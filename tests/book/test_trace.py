"""Notes of a server's steps: what belongs to a request, and which of it was prefill."""

import json
from pathlib import Path
from typing import Any

import pytest
from nanobook import trace


def step(start: float, tokens: dict[str, int], **prompts: int) -> trace.Step:
    return trace.Step(start, start + 1.0, tokens, {f"{name}-x-0": n for name, n in prompts.items()})


def test_a_request_knows_its_steps_by_its_id_and_its_prefill_by_its_prompt() -> None:
    steps = [
        step(0.0, {"chat-1-x-0": 4}, **{"chat-1": 6}),  # a prompt in two chunks
        step(1.0, {"chat-1-x-0": 2, "chat-10-x-0": 1}, **{"chat-10": 1}),
        step(2.0, {"chat-10-x-0": 1}),
        step(3.0, {"chat-1-x-0": 1, "chat-10-x-0": 1}),
    ]
    life = trace.Life("A", sent=0.0, id="chat-1")
    found = life.steps(steps)
    assert [one.start for one, _ in found] == [0.0, 1.0, 3.0]
    assert [reads_prompt for _, reads_prompt in found] == [True, True, False]
    other = trace.Life("B", sent=0.0, id="chat-10").steps(steps)
    assert [reads_prompt for _, reads_prompt in other] == [True, False, False]


def test_times_are_those_of_the_tokens_not_of_the_chunks() -> None:
    life = trace.Life("A", sent=10.0, chunks=[(12.0, "a"), (13.0, "bc"), (14.0, "d")], num_tokens=5)
    assert (life.ttft, life.tpot, life.seconds) == (2.0, 0.5, 4.0)
    assert life.text == "abcd"


def test_a_recording_begins_anew_and_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "steps.jsonl"
    file.write_text("old\n")
    environment = trace.recording(file)
    assert not file.exists()
    assert environment["NANOSERVE_PLUGINS"] == "nanobook.trace:record"
    monkeypatch.setenv(trace.VARIABLE, environment[trace.VARIABLE])
    noted: dict[str, Any] = {"start": 1.0, "end": 2.0, "tokens": {"a": 3}, "prompts": {"a": 3}}
    trace._append(**noted)
    assert json.loads(file.read_text()) == noted
    assert trace.read(file) == [trace.Step(**noted)]


def test_what_is_drawn_is_one_block_a_step(tmp_path: Path) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    steps = [
        step(float(n), {"a-x-0": 3 if n == 1 else 1}, **({"a": 3} if n == 1 else {}))
        for n in range(1, 5)
    ]
    life = trace.Life("A", 0.5, "a", [(n + 1.1, "t") for n in range(1, 5)], 4)
    fig, axes = pyplot.subplots(2)
    trace.draw_life(axes[0], life, steps, unit=1.0)
    assert len(axes[0].patches) == 1 + len(steps)  # waiting, and the steps
    trace.draw_lives(axes[1], [life], steps, unit=1.0)
    assert sum(len(bars.get_paths()) for bars in axes[1].collections) == 1 + len(steps)
    assert len(trace.legend_handles()) == 3
    pyplot.close(fig)
