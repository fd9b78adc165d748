"""Text to token ids and back: a thin, exact face on the model's own tokenizer files.

`tokenizer.json` is the truth: it is loaded as it stands, through transformers (which also renders
the chat template) but without torch, so that the process that serves HTTP stays light. Nearly every
model of today writes text as *bytes*: a token is a run of bytes, and a character may be cut
anywhere between two tokens. `token_bytes` shows that, and the streaming detokenizer builds on it.

This module must not know what a request is, nor which model the ids are for.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from nanoserve.errors import InvalidRequestError, ModelLoadError

Message = Mapping[str, Any]

# Arguments of transformers' apply_chat_template that are not a template's own variables: a client
# that could set them could swap the template, or get something else than text.
RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    "conversation chat_template tokenize padding truncation max_length return_tensors return_dict "
    "return_assistant_tokens_mask sanitize_control_tokens tokenizer_kwargs".split()
)


class Tokenizer:
    """A model's tokenizer.

    Args:
        hf: a fast transformers tokenizer; `from_folder` is the usual way here.

    Attributes:
        backend: the `tokenizers.Tokenizer` below.
        eos_token_id: the end-of-sequence token the tokenizer names, if it names one.
        special_ids: ids that `skip_special_tokens` leaves out.
    """

    def __init__(self, hf: Any) -> None:
        self._hf = hf
        self.backend: Any = hf.backend_tokenizer
        # A length limit left in tokenizer.json would cut prompts without a word.
        self.backend.no_truncation()
        self.backend.no_padding()
        self.eos_token_id: int | None = hf.eos_token_id
        added = self.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        self._decoder_types, self._strips_first_space = _decoder_types(self.backend)

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Load the tokenizer in a model's folder. Code in the folder is never run.

        Raises:
            ModelLoadError: no tokenizer files, or none that can be read.
        """
        folder = Path(path)
        try:
            if (folder / "tokenizer.json").is_file():
                # Not AutoTokenizer: for some models it rebuilds the splitting rules from the
                # model's class instead of the file, and it imports torch (1.7 s, 200 MB).
                from transformers import PreTrainedTokenizerFast

                hf = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
            else:
                from transformers import AutoTokenizer

                hf = AutoTokenizer.from_pretrained(
                    str(folder), local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # the libraries raise nearly anything on a file they cannot read
            raise ModelLoadError(
                f"cannot read the tokenizer in {folder}: {_first_line(error)}"
            ) from error
        if getattr(hf, "backend_tokenizer", None) is None:
            raise ModelLoadError(
                f"the tokenizer in {folder} has no tokenizer.json and cannot be turned into one"
            )
        return cls(hf)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written out in it count as such.

        Args:
            add_special_tokens: add what the tokenizer puts around a text (a begin token).

        Raises:
            InvalidRequestError: the text holds half of a surrogate pair and is thus no text.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError as error:
            raise InvalidRequestError(
                "the text is not valid Unicode (it holds half of a surrogate pair)"
            ) from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids, all at once. Bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def size(self) -> int:
        """The highest token id plus one (a model's vocabulary may be padded beyond it)."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    # -- chat ---------------------------------------------------------------------------------
    @property
    def chat_template(self) -> Any:
        """The Jinja template (or named templates) that turns messages into a prompt, or None."""
        return self._hf.chat_template

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        self._hf.chat_template = template

    @property
    def has_chat_template(self) -> bool:
        """Whether messages can be rendered at all (base models have no template)."""
        return bool(self._hf.chat_template)

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt's text for a conversation.

        Args:
            messages: dicts with `role` and `content`; fields that are None count as absent.
            add_generation_prompt: end with the header of the assistant's turn.
            tools: JSON schemas of functions, for templates that know of tools.
            kwargs: further variables for the template (`enable_thinking`, ...), and
                `continue_final_message` to leave the last turn open.

        Raises:
            InvalidRequestError: no template, no messages, or the template refuses them.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template: supply one (nanoserve serve --chat-template "
                "FILE), or send the prompt as plain text to /v1/completions",
                "messages",
            )
        if not messages:
            raise InvalidRequestError("messages must hold at least one message", "messages")
        reserved = sorted(RESERVED_TEMPLATE_ARGUMENTS & set(kwargs))
        if reserved:
            raise InvalidRequestError(
                f"chat_template_kwargs may not set {reserved[0]!r}", "chat_template_kwargs"
            )
        conversation = [{k: v for k, v in m.items() if v is not None} for m in messages]
        try:
            return self._hf.apply_chat_template(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **kwargs,
            )
        except Exception as error:  # a template can raise anything, on purpose or not
            raise InvalidRequestError(
                f"the chat template cannot render these messages: {_first_line(error)}", "messages"
            ) from error

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The prompt's token ids for a conversation: `render_chat`, encoded as it stands.

        The template writes the begin token if the model wants one, so none is added here.
        """
        text = self.render_chat(messages, add_generation_prompt, tools, **kwargs)
        return self.encode(text, add_special_tokens=False)

    # -- single tokens ------------------------------------------------------------------------
    @property
    def is_bytes(self) -> bool:
        """Whether a text is nothing but its tokens' bytes, one after the other."""
        return self._decoder_types is not None

    @property
    def strips_first_space(self) -> bool:
        """Whether decoding drops the space that starts a text (Llama 2's tokenizer)."""
        return self._strips_first_space

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for inside a text; empty for an id that is no token."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._token_bytes(token_id)
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str:
        """One token as text, to be shown (U+FFFD for a part of a character), never skipped."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def _token_bytes(self, token_id: int) -> bytes:
        piece = self.backend.id_to_token(token_id)
        if piece is None:
            return b""
        if self._decoder_types is None:
            return self.backend.decode([token_id], skip_special_tokens=False).encode()
        if "ByteLevel" in self._decoder_types:
            try:
                return bytes(_BYTE_OF_CHAR[char] for char in piece)
            except KeyError:  # an added token, written as plain text
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def _byte_chars() -> list[str]:
    """GPT-2's alphabet: the printable character that stands for each of the 256 bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    chars = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    return [chars[b] for b in range(256)]


_BYTE_OF_CHAR = {char: byte for byte, char in enumerate(_byte_chars())}


def _decoder_types(backend: Any) -> tuple[frozenset[str] | None, bool]:
    """The steps of a backend's decoder if they amount to joining bytes, else None; and its strip.

    Two families do: ByteLevel (GPT-2, Llama 3, Qwen, SmolLM), and SentencePiece with byte fallback
    (Llama 2, Gemma), where "▁" is a space and "<0xE2>" a byte.
    """
    if backend.decoder is None:
        return None, False
    state = json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    types = frozenset(step["type"] for step in steps)
    if types - {"Fuse"} == {"ByteLevel"}:
        return types, False
    spaces = {"pattern": {"String": "\u2581"}, "content": " "}
    plain = (
        types <= {"Replace", "ByteFallback", "Fuse", "Strip"}
        and {"Replace", "ByteFallback", "Fuse"} <= types
        and all(spaces.items() <= step.items() for step in steps if step["type"] == "Replace")
    )
    strips = [step for step in steps if step["type"] == "Strip"]
    if not plain or any((s["content"], s["start"], s["stop"]) != (" ", 1, 0) for s in strips):
        return None, False
    return types, bool(strips)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
