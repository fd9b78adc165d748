"""Graders of chapter 00: a stream off the wire, its times, and text that must be held back.

Each varies its inputs, compares with the simplest thing that is right, and names what a user of the
wrong answer would see. Where a mistake is a known one, the message says which.
"""

import codecs
import json
import math
import random
import runpy
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from nanobook.grading import Wrong, chapter_check, grader

# -- 00.1 ---------------------------------------------------------------------------------------


@grader(
    "00.1",
    answer="read_stream",
    hints=[
        "Keep a buffer of bytes. Add each chunk to it, and take whole lines off its front.",
        "Decode a line, never a chunk: the end of a line is a byte of its own in UTF-8.",
        "json.loads takes bytes. Of the result, choices may be empty and content absent or None.",
        "yield inside the loop over the chunks, so that text is out before the next chunk is in.",
    ],
)
def stream_reader(read_stream: Callable[..., Any]) -> None:
    """Any cut of the bytes gives the same text, and none of it waits for what comes after."""
    _read(read_stream, "plain events, each in a chunk of its own", ["Hello", " world", "!"])
    _read(read_stream, "events without text", ["Hi", None, "", " there"], roles=True)
    _read(read_stream, "a usage event without choices", ["Hi"], usage=True)
    _read(read_stream, "several events in one chunk", ["a", "b", "c"], sizes=[10**6])
    _read(read_stream, "events cut in the middle of a line", ["Hello", " world"], sizes=[7])
    _read(read_stream, "characters cut in the middle", ["é☃", "👩‍🚀", "日本"], sizes=[1])
    _read(read_stream, "lines that end with \\r\\n", ["a", "b"], end="\r\n", sizes=[5])
    _read(read_stream, "comments between the events", ["a", "b"], comment=": ping")
    _read(read_stream, "text with '[DONE]' and 'data:' in it", ["data: [DONE]", "\n\n", "data:"])
    _read(read_stream, "text that begins and ends with spaces", [" a ", "  b"])
    rng = random.Random(1)
    for _ in range(30):
        pieces = ["".join(rng.choice("ab é☃👩\n") for _ in range(5)) for _ in range(4)]
        sizes = [rng.randrange(1, 60) for _ in range(400)]
        _read(read_stream, "events cut at random", pieces, sizes=sizes, roles=True)
    _grade_early(read_stream)


def _events(
    pieces: list[str | None], roles: bool, usage: bool, end: str, comment: str
) -> list[bytes]:
    deltas: list[Any] = [{"role": "assistant"}] if roles else []
    deltas += [{"content": piece} for piece in pieces]
    bodies: list[Any] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    if usage:
        bodies.append({"choices": [], "usage": {"completion_tokens": 1}})
    lines = [f"data: {json.dumps(body, ensure_ascii=False)}" for body in bodies]
    lines.append("data: [DONE]")
    before = f"{comment}{end}{end}" if comment else ""
    return [f"{before}{line}{end}{end}".encode() for line in lines]


def _cut(data: bytes, sizes: list[int]) -> Iterator[bytes]:
    start, n = 0, 0
    while start < len(data):
        size = sizes[n % len(sizes)]
        yield data[start : start + size]
        start, n = start + size, n + 1


def _read(
    read_stream: Callable[..., Any],
    what: str,
    pieces: list[Any],
    *,
    sizes: list[int] | None = None,
    roles: bool = False,
    usage: bool = False,
    end: str = "\n",
    comment: str = "",
) -> None:
    events = _events(pieces, roles, usage, end, comment)
    chunks = _cut(b"".join(events), sizes) if sizes else iter(events)
    wanted = [piece for piece in pieces if piece]
    try:
        got = list(read_stream(chunks))
    except NotImplementedError:
        raise
    except UnicodeDecodeError:
        raise Wrong(f"{what}: UnicodeDecodeError: a chunk may end inside a character") from None
    except json.JSONDecodeError as error:
        if "[DONE]" in error.doc:
            raise Wrong(f"{what}: the last line, data: [DONE], is no JSON") from None
        raise Wrong(f"{what}: JSONDecodeError: what was read as an event is not one line") from None
    except (KeyError, IndexError, TypeError) as error:
        raise Wrong(
            f"{what}: {type(error).__name__}: {error}: an event may have no choices, and a delta "
            "no content"
        ) from None
    if any(not isinstance(piece, str) for piece in got):
        raise Wrong(f"{what}: gives {got!r}; pieces of text are str")
    if "" in got:
        raise Wrong(f"{what}: gives empty pieces; events without text give nothing")
    if "�" in "".join(got):
        raise Wrong(f"{what}: gives {''.join(got)!r}: a character was decoded in two halves")
    if got != wanted:
        why = ": it came all in one piece" if "".join(got) == "".join(wanted) else ""
        raise Wrong(f"{what}: gives {got!r}; it must be {wanted!r}{why}")


def _grade_early(read_stream: Callable[..., Any]) -> None:
    taken = 0

    def chunks() -> Iterator[bytes]:
        nonlocal taken
        for event in _events(["first", "second", "third"], False, False, "\n", ""):
            taken += 1
            yield event

    first = next(iter(read_stream(chunks())))
    if taken > 1:
        raise Wrong(
            f"the first piece, {first!r}, comes only after {taken} of 4 events have been read: the "
            "user stares at an empty screen until the answer is complete"
        )


# -- 00.2 ---------------------------------------------------------------------------------------


@grader(
    "00.2",
    answer=("latencies", "goodput"),
    hints=[
        "Five tokens have four gaps between them.",
        "The time before the first token is TTFT's alone; TPOT begins at the first token.",
        "Goodput counts requests, not tokens, and divides by the time of the whole measurement.",
    ],
)
def times(latencies: Callable[..., Any], goodput: Callable[..., Any]) -> None:
    """TTFT, TPOT and goodput on made-up timestamps."""
    rng = random.Random(2)
    for count in (2, 3, 5, 40):
        sent = rng.randrange(100, 200)
        arrivals = [sent + 3.0]
        for _ in range(count - 1):
            arrivals.append(arrivals[-1] + rng.choice([0.0, 0.25, 0.5]))
        arrivals[-1] += 0.5
        _grade_latencies(latencies, sent, arrivals)
    try:
        single = latencies(10.0, [12.0])
    except ZeroDivisionError:
        raise Wrong("a reply of one token: ZeroDivisionError; it has no TPOT, so None") from None
    if tuple(single) != (2.0, None):
        raise Wrong(f"a reply of one token gives {single!r}; it must be (2.0, None)")
    _grade_goodput(goodput)


def _grade_latencies(latencies: Callable[..., Any], sent: float, arrivals: list[float]) -> None:
    ttft, tpot = latencies(sent, list(arrivals))
    if not math.isclose(ttft, arrivals[0] - sent):
        raise Wrong(f"TTFT is {ttft}; sent at {sent}, first token at {arrivals[0]}")
    count, last = len(arrivals), arrivals[-1]
    right = (last - arrivals[0]) / (count - 1)
    if tpot is not None and math.isclose(tpot, right):
        return
    mistakes = {
        (last - arrivals[0]) / count: (
            f"divided by {count} tokens; there are {count - 1} gaps between them, so every server "
            "looks a little faster than it is, and most of all on short replies"
        ),
        (last - sent) / count: "the wait for the first token is in it; that is TTFT's",
        (last - sent) / (count - 1): "the wait for the first token is in it; that is TTFT's",
    }
    for value, why in mistakes.items():
        if tpot is not None and math.isclose(tpot, value):
            raise Wrong(f"TPOT of {count} tokens is {tpot:.3f}, not {right:.3f}: {why}")
    raise Wrong(f"TPOT of {count} tokens is {tpot!r}; it must be {right:.3f}")


def _grade_goodput(goodput: Callable[..., Any]) -> None:
    requests = [
        (0.0, [1.0, 1.25, 1.5]),  # kept, just
        (1.0, [2.5, 2.75, 3.0]),  # TTFT 1.5
        (2.0, [2.5, 3.5, 4.5]),  # TPOT 1
        (3.0, [3.5]),  # kept: one token
        (4.0, [6.0, 7.0]),  # neither
    ]
    try:
        got = goodput(requests, 4.0, 1.0, 0.25)
    except TypeError:
        raise Wrong("a request of one token has no TPOT (None), and nothing to break") from None
    mistakes = {
        len(requests) / 4: "every request is counted; that is throughput",
        2.0: "not divided by the seconds",
        1 / 4: "a request that just keeps its promise counts, and one of a single token too",
        0.0: "a request that just keeps its promise counts, and one of a single token too",
        3 / 4: "both promises must be kept",
        1.0: "both promises must be kept",
    }
    if not math.isclose(got, 2 / 4):
        why = next((text for value, text in mistakes.items() if math.isclose(got, value)), "")
        raise Wrong(f"goodput is {got!r}; 2 of 5 requests kept both in 4 s, so 0.5. {why}".strip())
    uneven = [(0.0, [1.0, 1.0, 1.5]), (0.0, [1.0, 1.1, 2.5])]
    if not math.isclose(goodput(uneven, 1.0, 1.0, 0.25), 1.0):
        raise Wrong(
            "where the gaps of a reply differ, goodput is wrong: the promise is about TPOT, the "
            "mean over all its gaps, not about one of them"
        )
    if not math.isclose(goodput(requests, 10.0, 9.0, 9.0), 0.5):
        raise Wrong("with limits that all keep, goodput is 5 requests / 10 s = 0.5")


# -- 00.3 ---------------------------------------------------------------------------------------


@grader(
    "00.3",
    answer="incomplete",
    hints=[
        "Walk back from the end, at most three bytes: the first that is not 0x80 to 0xBF decides.",
        "That byte says how long its character is. You know how many of its bytes are there.",
        "If all are there, or the byte begins no character, nothing is held back.",
    ],
)
def utf8(incomplete: Callable[..., Any]) -> None:
    """Against Python's own incremental decoder, on every short ending there can be."""
    for text in ("", "plain", "é", "a☃", "日本", "👩", "x�"):
        data = text.encode()
        _grade_ending(incomplete, data, f"the whole text {text!r}")
    for text in ("né", "☃", "→é☃", "a👩b", "👩👩"):
        data = text.encode()
        for end in range(1, len(data)):
            _grade_ending(incomplete, data[:end], f"{text!r} cut after {end} bytes")
    # Endings that begin no character: never to be held, or a reply of broken bytes never comes out.
    leads = (0x41, 0x80, 0xBF, 0xC0, 0xC3, 0xE2, 0xF0, 0xF4, 0xF5, 0xFF)
    for ending in product(leads, repeat=3):
        _grade_ending(incomplete, b"ok " + bytes(ending), f"bytes {bytes(ending).hex(' ')}")


def _held(data: bytes) -> int:
    """What Python's decoder keeps; forbidden second bytes (E0 80, F0 80) are not asked for."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def _grade_ending(incomplete: Callable[..., Any], data: bytes, what: str) -> None:
    tail = data[-3:]
    for n, byte in enumerate(tail[:-1]):
        if (byte, tail[n + 1] & 0xF0) in ((0xF0, 0x80), (0xF4, 0xB0)):
            return
    right, got = _held(data), incomplete(bytes(data))
    if got == right and not isinstance(got, bool):
        return
    if not isinstance(got, int) or isinstance(got, bool) or not 0 <= got <= max(3, len(data)):
        raise Wrong(f"{what}: gives {got!r}; it must be a number from 0 to 3")
    if right == 0 and got:
        whole = not data.decode("utf-8", errors="replace").endswith("�")
        if whole or data.endswith("�".encode()):
            raise Wrong(
                f"{what}: {got} held back, though the last character is complete: every one "
                "beyond ASCII comes a token late"
            )
        raise Wrong(
            f"{what}: {got} held back, but no byte that follows can make a character of them: the "
            "stream stands still on broken bytes"
        )
    if got == 0:
        raise Wrong(f"{what}: nothing held back; the user sees � instead of a character")
    more = "whole characters are held back too" if got > right else "the rest of it shows as �"
    raise Wrong(f"{what}: {got} held back, but the unfinished character has {right} bytes: {more}")


# -- 00.4 ---------------------------------------------------------------------------------------


@grader(
    "00.4",
    answer="StopScanner",
    hints=[
        "Search self.held + piece, never the piece alone.",
        "Hold back the longest end of the text that is a beginning of a stop string, and no more.",
        "Of the stop strings found, take the one with the smallest *end*; min of (end, index).",
        "finish gives out what is held; a stop has emptied it.",
    ],
)
def scanner(StopScanner: Callable[..., Any]) -> None:
    """Against trying every end of the whole text, for every cut into pieces."""
    _scan(StopScanner, ["A knight moves.\nUser: and"], ["\nUser:"], False)
    _scan(StopScanner, ["moves.", "\n", "User", ":", " and"], ["\nUser:"], False)
    _scan(StopScanner, ["moves.", "\n", "User", ":", " and"], ["\nUser:"], True)
    _scan(StopScanner, ["one\n", "two\n"], ["\nUser:"], False)
    _scan(StopScanner, ["xaab"], ["aab", "ab", "b"], False)
    _scan(StopScanner, ["xabcd"], ["abcd", "bc"], False)
    _scan(StopScanner, ["a", "a", "a", "b"], ["aab"], False)
    rng = random.Random(3)
    for _ in range(400):
        text = "".join(rng.choice("aab\n") for _ in range(rng.randrange(1, 14)))
        stop = ["".join(rng.choice("ab\n") for _ in range(rng.randrange(1, 5))) for _ in range(2)]
        cuts = sorted(rng.sample(range(len(text) + 1), rng.randrange(len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        _scan(StopScanner, pieces, stop, rng.random() < 0.5)


def _cut_text(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        for candidate in stop:
            if text[:end].endswith(candidate):
                return text[: end if include else end - len(candidate)], candidate
    return text, None


def _scan(make: Callable[..., Any], pieces: list[str], stop: list[str], include: bool) -> None:
    what = f"pieces {pieces!r}, stop={stop!r}, include={include}"
    one = make(list(stop), include=include)
    whole, _ = _cut_text("".join(pieces), stop, include)
    seen = sent = ""
    for n, piece in enumerate(pieces):
        new = one.push(piece)
        if not isinstance(new, str):
            raise Wrong(f"{what}: push gives {new!r}; it must be a str")
        seen, sent = seen + piece, sent + new
        done, stopped = _cut_text(seen, stop, include)
        if not whole.startswith(sent):
            raise Wrong(
                f"{what}: {sent!r} has been sent, but the text ends as {whole!r}: what is sent "
                "cannot be taken back"
            )
        _grade_stopped(one.stopped_by, stopped, f"{what}, after piece {n}")
        held = 0 if stopped else _may_become(done, stop)
        if sent != done[: len(done) - held]:
            raise Wrong(
                f"{what}: after piece {n}, {sent!r} has been sent; {done[: len(done) - held]!r} is "
                "certain by then: the stream stutters"
                if len(sent) < len(done) - held
                else f"{what}: after piece {n}, {sent!r} has been sent, and its last {held} "
                "characters may yet become a stop string"
            )
    rest = one.finish()
    if sent + (rest or "") != whole:
        lost = (
            "the end of the text is lost" if len(sent + (rest or "")) < len(whole) else "too much"
        )
        raise Wrong(f"{what}: in the end {sent + (rest or '')!r}; it must be {whole!r}: {lost}")


def _may_become(text: str, stop: list[str]) -> int:
    return max(k for s in stop for k in range(len(s)) if not k or text.endswith(s[:k]))


def _grade_stopped(got: Any, right: str | None, what: str) -> None:
    if got == right:
        return
    if right is None:
        raise Wrong(f"{what}: stopped_by is {got!r}, but no stop string is complete")
    if got is None:
        raise Wrong(f"{what}: {right!r} is complete, and was not seen: it lies across two pieces")
    raise Wrong(f"{what}: stopped_by is {got!r}; {right!r} is complete first")


# -- 00.5 ---------------------------------------------------------------------------------------

RULES = {
    "max_tokens": ("integer", 1, 4096),
    "temperature": ("number", 0, 2),
    "top_k": ("integer", -1, 100),
}


@grader(
    "00.5",
    answer="first_bad_field",
    hints=[
        "isinstance(True, int) is true in Python.",
        "Write the comparison so that it is true for good values, and put `not` before it: NaN.",
        "Check the type before you compare: '7' <= 4096 raises.",
    ],
)
def validator(first_bad_field: Callable[..., Any]) -> None:
    """What it lets in, and what it turns away."""
    good: list[dict[str, Any]] = [
        {},
        {"max_tokens": 1, "temperature": 0, "top_k": -1},
        {"max_tokens": 4096, "temperature": 2, "top_k": 100},
        {"temperature": 0.0},
        {"temperature": 1},
        {"temperature": 2.0},
        {"max_tokens": None, "temperature": None},
    ]
    bad: list[tuple[dict[str, Any], str, str]] = [
        ({"temperature": math.nan}, "temperature", "NaN is neither too small nor too large"),
        ({"temperature": math.inf}, "temperature", "infinity is larger than the limit"),
        ({"max_tokens": True}, "max_tokens", "True is an int to Python, and no number to a user"),
        ({"temperature": False}, "temperature", "False is an int to Python, and no number"),
        ({"max_tokens": 0}, "max_tokens", "it is below the limit"),
        ({"max_tokens": 4097}, "max_tokens", "it is above the limit"),
        ({"max_tokens": 10**400}, "max_tokens", "it is above the limit"),
        ({"temperature": 2.000001}, "temperature", "it is above the limit"),
        ({"top_k": 7.0}, "top_k", "it has a fraction: 7.0 is no integer in JSON's reader"),
        ({"max_tokens": "7"}, "max_tokens", "it is text"),
        ({"temperature": [1]}, "temperature", "it is a list"),
        ({"temperature": {}}, "temperature", "it is an object"),
        ({"max_token": 7}, "max_token", "no such field; the client believes it has a limit"),
    ]
    for body in good:
        name = _ask(first_bad_field, body)
        if name is not None:
            raise Wrong(
                f"{body} is refused for {name!r}, but it is fine: borders are allowed, whole "
                "numbers are numbers, and null counts as not given"
            )
    for body, wanted, why in bad:
        name = _ask(first_bad_field, body)
        if name != wanted:
            said = "is let in" if name is None else f"gives {name!r}"
            raise Wrong(f"{body} {said}, not {wanted!r}: {why}")
    several = {"top_k": 3, "temperature": -1, "max_tokens": 0, "x": 1}
    if (name := _ask(first_bad_field, several)) != "temperature":
        raise Wrong(f"{several} gives {name!r}; the first field at fault is 'temperature'")
    _grade_other_rules(first_bad_field)


def _grade_other_rules(first_bad_field: Callable[..., Any]) -> None:
    """The rules are an argument: another endpoint has others."""
    rules = {"limit": ("integer", 5, 9)}
    for body, right in (({"limit": 9}, None), ({"limit": 4}, "limit"), ({"top_k": 1}, "top_k")):
        if first_bad_field(dict(body), dict(rules)) != right:
            raise Wrong(
                f"with the rules {rules}, {body} is judged wrongly: the limits come from `rules`, "
                "and are not the same for every endpoint"
            )


def _ask(first_bad_field: Callable[..., Any], body: dict[str, Any]) -> Any:
    try:
        return first_bad_field(dict(body), dict(RULES))
    except NotImplementedError:
        raise
    except Exception as error:
        raise Wrong(
            f"{body}: {type(error).__name__}: {error}: the client sees 'internal server error' and "
            "cannot know which field was meant"
        ) from None


# -- the chapter --------------------------------------------------------------------------------


@chapter_check(0)
def foundation() -> None:
    """What the learner's cells have built; see built_00.py beside this file."""
    check = runpy.run_path(str(Path(__file__).with_name("built_00.py")))["check"]
    check(_cut_text)
