"""The tokenizer against an independent byte-pair encoder, and the chat template's edges."""

import json
import subprocess
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from nanofixtures.bytes_tokenizer import TURN_END, byte_chars, write_bytes_tokenizer
from nanofixtures.embedded import embedded_folder

from nanoserve.errors import InvalidRequestError, ModelLoadError
from nanoserve.tokenizer.tokenizer import Tokenizer

GPT2_SPLIT = regex.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
TEXTS = [
    "",
    "Hello, world!",
    "def f(x: int = 1234) -> float:\n    return x ** 2.5  # 10% of 3,141,592\n\n\tpass",
    "for i in range(100):\n        print(f'{i:>10}')\n",
    "   leading, trailing   and \t\t mixed \r\n\r\n whitespace \u00a0\u3000 ",
    "I'll we've don't IT'S 'tis",
    "2024-12-01T04:26:00Z 0x1F 1e-5 v1.2.3 ½ Ⅷ ٣٤ ²",
    "naïve café, Ångström, ﬁ ligature, e\u0301 combining",
    "漢字かな交じり文、中文字符。한국어 ภาษาไทย العربية हिन्दी",
    "👨‍👩‍👧‍👦 👍🏽 🇫🇷 ❤️ \U0001f9d1\u200d\U0001f680",
    "a" * 300 + " " * 50 + "\n" * 20,
    "\x00\x01\x7f\ufeff\ufffd\u2028",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|<|im_end|>>",
]


class ReferenceBPE:
    """Byte-pair encoding as the papers tell it: split, then merge by the first rule that fits."""

    def __init__(self, folder: str) -> None:
        model = json.loads(Path(folder, "tokenizer.json").read_text())
        self.vocab = model["model"]["vocab"]
        merges = [m.split(" ") if isinstance(m, str) else m for m in model["model"]["merges"]]
        self.ranks = {tuple(m): rank for rank, m in enumerate(merges)}
        special = [token["content"] for token in model["added_tokens"]]
        self.special = regex.compile("(" + "|".join(map(regex.escape, special)) + ")")
        self.chars = byte_chars()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(self.special.split(text)):
            if i % 2:
                ids.append(self.vocab[part])
                continue
            for piece in regex.split(r"(\p{N})", part):
                for word in GPT2_SPLIT.findall(piece):
                    ids += [self.vocab[s] for s in self._merge(word) if s in self.vocab]
        return ids

    def _merge(self, word: str) -> list[str]:
        symbols = [self.chars[b] for b in word.encode()]
        while len(symbols) > 1:
            pairs = list(pairwise(symbols))
            best = min(pairs, key=lambda p: self.ranks.get(p, len(self.ranks)))
            if best not in self.ranks:
                break
            at = pairs.index(best)
            symbols[at : at + 2] = ["".join(best)]
        return symbols


@cache
def smol() -> Tokenizer:
    return Tokenizer.from_folder(embedded_folder())


@cache
def reference() -> ReferenceBPE:
    return ReferenceBPE(embedded_folder())


def bytes_tokenizer(folder: Path, **kwargs: object) -> Tokenizer:
    write_bytes_tokenizer(folder, **kwargs)
    return Tokenizer.from_folder(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_embedded_tokenizer_equals_a_plain_bpe(text: str) -> None:
    ids = smol().encode(text)
    assert ids == reference().encode(text)
    assert smol().decode(ids, skip_special_tokens=False) == text


@settings(max_examples=150, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_embedded_tokenizer_equals_a_plain_bpe_on_any_text(text: str) -> None:
    ids = smol().encode(text)
    assert ids == reference().encode(text)
    # A few bytes that its training text never had (some control characters, and 0xF1 and 0xF2,
    # which begin the planes from U+40000) are not in the model's vocabulary.
    if not set(text.encode()) & {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2}:
        assert smol().decode(ids, skip_special_tokens=False) == text


def test_embedded_tokenizer_equals_a_plain_bpe_on_source_code() -> None:
    """Python's own library: the kind of text in which a missing digits rule shows."""
    lines = Path(json.__file__).with_name("decoder.py").read_text().splitlines(keepends=True)
    lines += Path(json.__file__).parents[1].joinpath("calendar.py").read_text().splitlines(True)
    assert [smol().encode(line) for line in lines] == [reference().encode(line) for line in lines]


def test_embedded_tokenizer_facts() -> None:
    """Ids and rules that are known from the model's makers and from llama.cpp."""
    tokenizer = smol()
    assert tokenizer.size == 49152
    assert tokenizer.eos_token_id == 2
    assert tokenizer.encode("<|im_start|>") == [1]
    assert tokenizer.encode("<|im_end|>") == [2]
    assert tokenizer.encode("hi") == tokenizer.encode("hi", add_special_tokens=False)
    digits = tokenizer.encode("1234")
    assert [tokenizer.token_text(i) for i in digits] == ["1", "2", "3", "4"]
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.slow
def test_embedded_tokenizer_through_transformers() -> None:
    """AutoTokenizer, which the model's users use, reads the folder the same way."""
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(embedded_folder())
    for text in TEXTS:
        assert auto(text)["input_ids"] == smol().encode(text)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat = auto.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert chat["input_ids"] == smol().encode_chat(messages)
    assert (auto.bos_token_id, auto.eos_token_id, auto.pad_token_id) == (1, 2, 2)


def test_token_bytes_add_up_to_the_text() -> None:
    text = TEXTS[9]
    tokenizer = smol()
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_text(tokenizer.encode("👍")[0]) == "\ufffd"
    assert tokenizer.token_text(2) == "<|im_end|>"
    assert tokenizer.token_bytes(tokenizer.size) == b""


def test_a_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        smol().encode("half \ud83d")


def test_limits_in_the_file_do_not_cut_prompts(tmp_path: Path) -> None:
    write_bytes_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    contents = json.loads(path.read_text())
    contents["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    path.write_text(json.dumps(contents))
    assert Tokenizer.from_folder(tmp_path).encode("abcdefgh") == list(b"abcdefgh")


# -- chat -----------------------------------------------------------------------------------------


def test_A50_no_template_says_how_to_supply_one(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(tmp_path, chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="--chat-template FILE") as caught:
        tokenizer.encode_chat([{"role": "user", "content": "hi"}])
    assert caught.value.status == 400
    assert tokenizer.encode("hi") == list(b"hi")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}!"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_A49_one_begin_token(tmp_path: Path) -> None:
    """The template writes the begin token and the tokenizer adds one: a chat must have just one."""
    from tokenizers import processors

    tokenizer = bytes_tokenizer(
        tmp_path, chat_template="<|endoftext|>{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    assert tokenizer.encode("hi") == [256, *b"hi"]
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [256, *b"hi"]


def test_chat_arguments(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer(tmp_path)
    messages: list[dict[str, str | None]] = [
        {"role": "user", "content": "a", "name": None},
        {"role": "assistant", "content": "b"},
    ]
    turn = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb"
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == turn + "<|im_end|>\n"
    left_open = tokenizer.render_chat(messages, False, continue_final_message=True)
    assert left_open == turn
    tokenizer.chat_template = "{{ mood }} {{ tools | length }}"
    assert tokenizer.render_chat(messages, tools=[{"type": "function"}], mood="calm") == "calm 1"


@pytest.mark.parametrize(
    ("template", "messages", "kwargs", "expected"),
    [
        ("x", [], {}, "at least one message"),
        ("{{ raise_exception('roles must alternate') }}", None, {}, "roles must alternate"),
        ("{{ messages[0].absent.field }}", None, {}, "cannot render"),
        ("{% for %}", None, {}, "cannot render"),
        ("{{ 1 / 0 }}", None, {}, "division by zero"),
        ("{{ ''.__class__.__mro__ }}", None, {}, "cannot render"),
        ("x", None, {"chat_template": "{{ 7 * 7 }}"}, "may not set 'chat_template'"),
        ("x", None, {"tokenize": True}, "may not set 'tokenize'"),
        ("x", None, {"continue_final_message": True}, "cannot render"),
    ],
)
def test_chats_that_cannot_be_rendered_are_the_clients_error(
    tmp_path: Path, template: str, messages: list | None, kwargs: dict, expected: str
) -> None:
    tokenizer = bytes_tokenizer(tmp_path, chat_template=template)
    messages = [{"role": "user", "content": "hi"}] if messages is None else messages
    with pytest.raises(InvalidRequestError, match=expected) as caught:
        tokenizer.render_chat(messages, **kwargs)
    assert "\n" not in caught.value.message


# -- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("contents", [None, "", "{}", "not json"])
def test_A83_a_tokenizer_that_cannot_be_read_is_one_line(
    tmp_path: Path, contents: str | None
) -> None:
    if contents is not None:
        (tmp_path / "tokenizer.json").write_text(contents)
    with pytest.raises(ModelLoadError, match="tokenizer") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_folder_without_tokenizer_json(tmp_path: Path) -> None:
    """The older pair of files is turned into a tokenizer by transformers."""
    vocab = {char: byte for byte, char in enumerate(byte_chars())} | {
        "ab": 256,
        "<|endoftext|>": 257,
    }
    (tmp_path / "vocab.json").write_text(json.dumps(vocab))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("abé") == [256, *"é".encode()]
    assert tokenizer.is_bytes and tokenizer.eos_token_id == 257


def test_no_torch_is_needed(tmp_path: Path) -> None:
    """The process that serves HTTP loads, encodes, renders and decodes without torch.

    Older supported transformers import torch with the class itself: there it can only be
    held that nothing is added.
    """
    write_bytes_tokenizer(tmp_path)
    script = f"""
import sys
import transformers
from transformers import PreTrainedTokenizerFast
by_itself = "torch" in sys.modules
assert not by_itself or int(transformers.__version__.split(".")[1]) < 24
from nanoserve.sampling_params import SamplingParams
from nanoserve.tokenizer.detokenizer import IncrementalDetokenizer
from nanoserve.tokenizer.tokenizer import Tokenizer
t = Tokenizer.from_folder({str(tmp_path)!r})
ids = t.encode_chat([{{"role": "user", "content": "hi"}}])
d = IncrementalDetokenizer(t, SamplingParams(), ids)
d.update(list(b"yes"))
assert d.text == "yes" and t.eos_token_id == {TURN_END}
assert ("torch" in sys.modules) == by_itself
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])
