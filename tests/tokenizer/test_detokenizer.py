"""Streaming text: it adds up to one-shot decoding, and nothing leaves too early or too late."""

from functools import cache
from itertools import pairwise
from tempfile import mkdtemp

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from nanofixtures.bytes_tokenizer import END_OF_TEXT, TURN_END, write_bytes_tokenizer
from nanofixtures.embedded import embedded_folder
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from nanoserve.sampling_params import SamplingParams
from nanoserve.tokenizer.detokenizer import (
    IncrementalDetokenizer,
    check_stop_strings,
    held_back_length,
)
from nanoserve.tokenizer.tokenizer import Tokenizer

FAMILY = "👨‍👩‍👧‍👦"
# Without the characters that SmolLM2's vocabulary cannot spell (see test_tokenizer.py).
UNICODE = st.text(
    st.characters(
        max_codepoint=0x3FFFF,
        exclude_categories=["Cs"],
        exclude_characters="\x04\x06\x13\x14\x16\x1d",
    ),
    max_size=24,
)


@cache
def byte_level() -> Tokenizer:
    folder = mkdtemp()
    write_bytes_tokenizer(folder)
    return Tokenizer.from_folder(folder)


@cache
def smol() -> Tokenizer:
    return Tokenizer.from_folder(embedded_folder())


def _wrap(backend: Backend) -> Tokenizer:
    from transformers import PreTrainedTokenizerFast

    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


@cache
def sentencepiece(strip: bool = True) -> Tokenizer:
    """Llama 2's kind: ▁ for a space, bytes as <0x00>, and a first space that decoding drops."""
    words = [
        "<s>",
        "</s>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        "▁he",
        "llo",
        "é",
        "▁▁",
        "x",
    ]
    backend = Backend(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    backend.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>")])
    return _wrap(backend)


@cache
def wordpiece() -> Tokenizer:
    words = ["[PAD]", "hello", "wor", "##ld", ",", "!", "don", "'", "t", "##s", "[SEP]"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[PAD]"))
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("[SEP]", special=True)])
    return _wrap(backend)


def stream(
    tokenizer: Tokenizer,
    ids: list[int],
    cuts: list[int] = (),  # type: ignore[assignment]
    prompt: list[int] = (),  # type: ignore[assignment]
    **params: object,
) -> tuple[list[str], IncrementalDetokenizer, str | None]:
    """Feed ids in pieces; the deltas, the detokenizer (finished), and the stop string."""
    detokenizer = IncrementalDetokenizer(tokenizer, SamplingParams(**params), prompt)  # type: ignore[arg-type]
    edges = sorted({0, len(ids), *(c for c in cuts if c < len(ids))})
    deltas, stopped_by = [], None
    for start, end in pairwise(edges):
        stopped_by = detokenizer.update(ids[start:end])
        deltas.append(detokenizer.next_delta())
        assert detokenizer.text == "".join(deltas)
        if stopped_by is not None:
            break
    detokenizer.finish()
    deltas.append(detokenizer.next_delta())
    assert detokenizer.text == "".join(deltas)
    return deltas, detokenizer, stopped_by


def every(ids: list[int]) -> list[int]:
    """Cuts after each token."""
    return list(range(len(ids)))


# -- the text is that of one-shot decoding --------------------------------------------------------

BYTES = st.lists(
    st.one_of(
        st.integers(0, 511),
        st.sampled_from(
            [*"é€😀".encode(), 0xC0, 0xE2, 0xED, 0xA0, 0xF0, 0xF4, 0xFF, 0x80, TURN_END]
        ),
    ),
    max_size=40,
)


@settings(max_examples=250, deadline=None)
@given(BYTES, st.lists(st.integers(0, 40)), st.booleans())
@example(list("é".encode())[:1], [], True)
@example([0xF0, 0x9F, TURN_END, 0x98, 0x80], [2], True)
def test_SA9_any_bytes_in_any_split_equal_one_shot(
    ids: list[int], cuts: list[int], skip: bool
) -> None:
    _, detokenizer, _ = stream(byte_level(), ids, cuts, skip_special_tokens=skip)
    assert detokenizer.text == byte_level().decode(ids, skip_special_tokens=skip)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(0, 49151), max_size=30), st.lists(st.integers(0, 30)))
def test_SA9_any_tokens_of_the_embedded_model_equal_one_shot(
    ids: list[int], cuts: list[int]
) -> None:
    _, detokenizer, _ = stream(smol(), ids, cuts)
    assert detokenizer.text == smol().decode(ids)


@settings(max_examples=120, deadline=None)
@given(UNICODE, UNICODE)
def test_SA9_text_streams_without_marks_and_without_delay(prompt: str, text: str) -> None:
    for tokenizer in (byte_level(), smol()):
        ids = tokenizer.encode(text)
        detokenizer = IncrementalDetokenizer(
            tokenizer, SamplingParams(skip_special_tokens=False), tokenizer.encode(prompt)
        )
        for count, token_id in enumerate(ids, start=1):
            detokenizer.update([token_id])
            # Every character whose bytes are all there is out, and no other.
            complete = b"".join(map(tokenizer.token_bytes, ids[:count])).decode(errors="ignore")
            assert detokenizer.text == complete
        assert detokenizer.text == text


@pytest.mark.parametrize("text", [FAMILY, "Ångström naïve", "漢字かな", "a" + FAMILY + "é字"])
def test_A27_characters_over_several_tokens(text: str) -> None:
    ids = list(text.encode())
    deltas, _, _ = stream(byte_level(), ids, every(ids))
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    for end in range(len(ids)):
        cut, detokenizer, _ = stream(byte_level(), ids[:end], every(ids))
        assert detokenizer.text == byte_level().decode(ids[:end])
        # A mark can only be the very last thing, when the length cut a character.
        assert "\ufffd" not in "".join(cut[:-1])


def test_T133_broken_bytes_do_not_hold_the_stream() -> None:
    """Bytes that can never become a character are marked at once, and text goes on after them."""
    ids = [0xFF] * 50 + list(b"ok")
    deltas, _, _ = stream(byte_level(), ids, every(ids))
    assert deltas == ["\ufffd"] * 50 + ["o", "k", ""]


def test_prompt_that_ends_inside_a_character_is_not_repeated() -> None:
    prompt = list("hi €".encode())[:-1]
    _, detokenizer, _ = stream(byte_level(), [0xAC, ord("!")], prompt=prompt)
    assert detokenizer.text == byte_level().decode([0xAC, ord("!")]) == "\ufffd!"


def test_ids_beyond_the_tokenizer_have_no_text() -> None:
    """A model's vocabulary may be padded beyond its tokenizer's."""
    _, detokenizer, _ = stream(byte_level(), [ord("a"), 9999, ord("b")])
    assert detokenizer.text == byte_level().decode([ord("a"), 9999, ord("b")]) == "ab"


# -- other families of tokenizers -----------------------------------------------------------------

PIECES = st.lists(
    st.one_of(st.integers(258, 263), st.sampled_from([list("é€".encode()), list("😀".encode())])),
    max_size=12,
).map(
    lambda items: [t for i in items for t in ([b + 2 for b in i] if isinstance(i, list) else [i])]
)


@settings(max_examples=120, deadline=None)
@given(PIECES, PIECES, st.booleans())
def test_SA9_sentencepiece_adds_to_the_prompt(
    prompt: list[int], ids: list[int], strip: bool
) -> None:
    tokenizer = sentencepiece(strip)
    _, detokenizer, _ = stream(tokenizer, ids, every(ids), prompt=[0, *prompt])
    before = tokenizer.decode([0, *prompt])
    assert before + detokenizer.text == tokenizer.decode([0, *prompt, *ids])


def test_sentencepiece_first_space() -> None:
    tokenizer = sentencepiece()
    assert tokenizer.is_bytes and tokenizer.strips_first_space
    hello = [259, 260]
    assert stream(tokenizer, hello)[1].text == "hello"
    assert stream(tokenizer, hello, prompt=[0])[1].text == "hello"
    assert stream(tokenizer, hello, prompt=[0, 263])[1].text == " hello"


def test_sentencepiece_broken_bytes() -> None:
    """Good characters beside broken bytes stay; those already streamed could not be taken back."""
    ids = [2 + b for b in "€".encode()] + [2 + 0xE2]
    assert sentencepiece().decode(ids) == "\ufffd" * 4
    assert stream(sentencepiece(), ids)[1].text == "€\ufffd"


@settings(max_examples=120, deadline=None)
@given(st.lists(st.integers(1, 10), max_size=16), st.lists(st.integers(1, 10), max_size=16))
def test_SA9_wordpiece_adds_to_the_prompt(prompt: list[int], ids: list[int]) -> None:
    tokenizer = wordpiece()
    assert not tokenizer.is_bytes
    _, detokenizer, _ = stream(tokenizer, ids, every(ids), prompt=prompt)
    before = tokenizer.decode(prompt)
    assert before + detokenizer.text == tokenizer.decode([*prompt, *ids])


def test_window_decoder_holds_parts_of_characters() -> None:
    """A decoder that is bytes and something more falls back to windows, with the same promises."""
    backend = Backend(models.BPE({f"<0x{b:02X}>": b for b in range(256)}, []))
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("~", "-")]
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = _wrap(backend)
    assert not tokenizer.is_bytes
    ids = list(("a~" + FAMILY).encode())
    deltas, _, _ = stream(tokenizer, ids, every(ids))
    assert "".join(deltas) == tokenizer.decode(ids) == "a-" + FAMILY
    assert not any("\ufffd" in delta for delta in deltas)
    deltas, _, _ = stream(tokenizer, [0xE2, 0x82], [1])
    assert deltas == ["", "", "\ufffd\ufffd"]


def test_window_stays_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for a token does not grow with the text."""
    tokenizer, lengths = wordpiece(), []
    decode = tokenizer.decode

    def counted(ids: list[int], skip_special_tokens: bool = True) -> str:
        lengths.append(len(ids))
        return decode(ids, skip_special_tokens)

    monkeypatch.setattr(tokenizer, "decode", counted)
    ids = [1, 2, 3, 4, 10] * 40
    stream(tokenizer, ids, every(ids), prompt=[1] * 100, max_tokens=None)
    assert max(lengths) <= 9


# -- stop strings ---------------------------------------------------------------------------------


def test_T134_check_stop_strings() -> None:
    text = " The user is a"
    for stop in (["a", "is"], ["is", "a"]):
        assert check_stop_strings(text, len(text), stop, False) == ("is", 10)
        assert check_stop_strings(text, len(text), stop, True) == ("is", 12)
    assert check_stop_strings("abc", 3, ["abc", "b"], False) == ("b", 1)
    assert check_stop_strings("abc", 3, ["abc", "bc"], False) == ("abc", 0)
    assert check_stop_strings("abc", 3, ["bc", "abc"], False) == ("bc", 1)
    assert check_stop_strings("abc", 3, ["bc"], True) == ("bc", -1)
    assert check_stop_strings("abc", 1, ["b"], False) is None
    assert check_stop_strings("abc", 1, ["ab", "bc"], False) == ("bc", 1)
    assert check_stop_strings("abc", 3, [], False) is None


@pytest.mark.parametrize(
    ("text", "stop", "held"),
    [
        ("abcd", ["cdefg"], 2),
        ("abcd", ["d", "e"], 0),
        ("aab", ["aabaac"], 3),
        ("xaabaab", ["aabaac"], 3),
        ("xaabaa", ["aabaac"], 5),
        ("xyz", ["abc"], 0),
        ("ab", ["bcd", "abcd"], 2),
    ],
)
def test_held_back_length(text: str, stop: list[str], held: int) -> None:
    assert held_back_length(text, stop) == held


@pytest.mark.parametrize(
    ("stop", "text", "why"), [("cdefg", "ab", "cdefg"), ("cdeX", "abcdefgh", None)]
)
def test_A28_stop_string_over_several_tokens(stop: str, text: str, why: str | None) -> None:
    backend = Backend(models.BPE({w: i for i, w in enumerate(("ab", "cd", "ef", "gh"))}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = _wrap(backend)
    deltas, detokenizer, stopped_by = stream(
        tokenizer, [0, 1, 2, 3], every([0, 1, 2, 3]), stop=[stop]
    )
    assert (detokenizer.text, stopped_by) == (text, why)
    assert deltas[:2] == ["ab", ""]  # "cd" may yet become either
    assert stream(tokenizer, [0, 1, 2, 3], stop=[stop])[1].text == text


def _oracle(
    parts: list[str], stop: list[str], min_tokens: int, include: bool
) -> tuple[str, str | None, list[str]]:
    """By brute force: the whole text, the stop string, and what may be out after each token."""
    text = ""
    out: list[str] = []
    for count, part in enumerate(parts, start=1):
        old, text = len(text), text + part
        for end in range(old + 1, len(text) + 1):
            for candidate in stop:
                if count >= min_tokens and text[:end].endswith(candidate):
                    kept = text[:end] if include else text[: end - len(candidate)]
                    return kept, candidate, [*out, kept]
        proper = [s[:k] for s in stop for k in range(1, len(s))]
        held = max((len(p) for p in proper if text.endswith(p)), default=0)
        out.append(text[: len(text) - held])
    return text, None, out


WORDS = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=14),
    st.lists(WORDS, max_size=4),
    st.integers(0, 8),
    st.booleans(),
)
def test_T135_stop_strings_against_brute_force(
    parts: list[str], stop: list[str], min_tokens: int, include: bool
) -> None:
    vocab = sorted(set(parts)) or ["a"]
    backend = Backend(models.BPE({w: i for i, w in enumerate(vocab)}, []))
    backend.decoder = decoders.Sequence([decoders.Fuse()])  # plain strings, not bytes
    ids = [vocab.index(p) for p in parts]
    deltas, detokenizer, stopped_by = stream(
        _wrap(backend),
        ids,
        every(ids),
        stop=stop,
        min_tokens=min_tokens,
        include_stop_str_in_output=include,
        max_tokens=99,
    )
    text, expected_stop, out = _oracle(parts, stop, min_tokens, include)
    assert (detokenizer.text, stopped_by) == (text, expected_stop)
    released = ["".join(deltas[: i + 1]) for i in range(len(out))]
    assert released == out


@settings(max_examples=120, deadline=None)
@given(UNICODE, UNICODE.filter(bool), st.lists(st.integers(0, 60)))
def test_stop_strings_in_any_split_of_bytes(text: str, stop: str, cuts: list[int]) -> None:
    ids = list((text + stop + text).encode())
    _, detokenizer, stopped_by = stream(byte_level(), ids, cuts, stop=[stop])
    whole = text + stop + text
    assert stopped_by == stop
    assert detokenizer.text == whole[: whole.index(stop)]


def test_tokens_after_a_stop_are_ignored() -> None:
    detokenizer = IncrementalDetokenizer(byte_level(), SamplingParams(stop=["b"]), [])
    assert detokenizer.update(list(b"abc")) == "b"
    assert detokenizer.update(list(b"xyz")) is None
    detokenizer.finish()
    detokenizer.finish()
    assert (detokenizer.next_delta(), detokenizer.next_delta(), detokenizer.text) == ("a", "", "a")


def test_stop_inside_a_token() -> None:
    backend = Backend(models.BPE({"Hello. And": 0, " more": 1}, []))
    backend.decoder = decoders.ByteLevel()
    for include, text in ((False, "Hello"), (True, "Hello.")):
        _, detokenizer, stopped_by = stream(
            _wrap(backend), [0, 1], stop=["."], include_stop_str_in_output=include
        )
        assert (stopped_by, detokenizer.text) == (".", text)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_T135_stop_token(include: bool, skip: bool) -> None:
    """A stop token's text is left out unless asked for, and a special token's skipped as always."""
    for token_id, word in ((ord("!"), "!"), (END_OF_TEXT, "" if skip else "<|endoftext|>")):
        detokenizer = IncrementalDetokenizer(
            byte_level(),
            SamplingParams(include_stop_str_in_output=include, skip_special_tokens=skip),
            [],
        )
        assert detokenizer.update([*b"hi", token_id], finished_by_stop_token=True) is None
        detokenizer.finish()
        assert detokenizer.text == "hi" + (word if include else "")


def test_what_is_held_is_released_by_a_stop_token() -> None:
    detokenizer = IncrementalDetokenizer(byte_level(), SamplingParams(stop=["###"]), [])
    detokenizer.update([*b"a##", *"é".encode()[:1]])
    assert detokenizer.next_delta() == "a"
    detokenizer.update([TURN_END], finished_by_stop_token=True)
    detokenizer.finish()
    assert detokenizer.next_delta() == "##\ufffd"
    assert detokenizer.text == "a##\ufffd"
