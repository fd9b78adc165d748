"""Token ids back to text while they are still coming, and the strings that stop it.

Two things must never reach the user: half a character, and the start of a stop string that is then
cut off. So text is *held back* while it can still turn into something else, and not a moment
longer. Whatever is streamed adds up to exactly the text that the finished sequence decodes to.

`tokenizers.DecodeStream` does the first part too, but it decodes a window of tokens again until it
ends in a whole character: broken bytes make it hold the whole reply (and cost the square of its
length), a half character at the end of the prompt makes it repeat the prompt, and what it holds at
the end cannot be had. Here a token is what it is, a few bytes, and a UTF-8 decoder that keeps at
most three of them does the rest in constant time.

This module must not know why a sequence ended, only what its text is.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from nanoserve.sampling_params import SamplingParams
from nanoserve.tokenizer.tokenizer import Tokenizer

# Tokens of the prompt that are decoded to know what the output's first token follows.
CONTEXT_TOKENS = 8
# A UTF-8 character has at most four bytes: after as many tokens a U+FFFD at the end stays one.
MAX_PARTS_OF_A_CHARACTER = 4
REPLACEMENT = "\ufffd"


class TextDecoder(Protocol):
    """Turns one token after the other into text."""

    def feed(self, token_id: int) -> str:
        """The text that this token completes; often the token's own, sometimes none."""

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character."""


class ByteTextDecoder:
    """For tokenizers whose text is their tokens' bytes in a row (`Tokenizer.is_bytes`).

    The text is that of the output's bytes alone: a character that the prompt began is not mended.
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], strip_space: bool) -> None:
        self._token_bytes = tokenizer.token_bytes
        self._skip = skip
        self._strip_space = strip_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        """See TextDecoder."""
        if token_id in self._skip:
            return ""
        return self._stripped(self._utf8.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        """See TextDecoder."""
        return self._stripped(self._utf8.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if text and self._strip_space:
            self._strip_space = False
            return text.removeprefix(" ")
        return text


class WindowTextDecoder:
    """For every other tokenizer: decode a short window with and without the newest tokens.

    The window starts with tokens that are already out, so that a rule about neighbours (WordPiece's
    "##", a space between words) sees them; the difference of the two texts is what is new. The idea
    of the two offsets is from text-generation-inference.
    """

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], context: Sequence[int]) -> None:
        self._tokenizer, self._skip = tokenizer, skip
        self._window, self._pending = [i for i in context if i not in skip], 0
        self._prefix = self._decode(self._window)

    def feed(self, token_id: int) -> str:
        """See TextDecoder."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        self._pending += 1
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT) and self._pending < MAX_PARTS_OF_A_CHARACTER:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """See TextDecoder."""
        return self._advance(self._decode(self._window)) if self._pending else ""

    def _advance(self, text: str) -> str:
        new = text[len(self._prefix) :]
        if new:
            # Tokens without text stay in the window: the next one needs a neighbour.
            self._window = self._window[-self._pending :]
            self._prefix, self._pending = self._decode(self._window), 0
        return new

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


def make_text_decoder(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool
) -> TextDecoder:
    """The decoder for an output that follows this prompt."""
    skip = tokenizer.special_ids if skip_special_tokens else frozenset()
    if not tokenizer.is_bytes:
        return WindowTextDecoder(tokenizer, skip, prompt_token_ids[-CONTEXT_TOKENS:])
    starts_the_text = tokenizer.strips_first_space and not any(
        tokenizer.token_bytes(token_id) for token_id in prompt_token_ids if token_id not in skip
    )
    return ByteTextDecoder(tokenizer, skip, starts_the_text)


def check_stop_strings(
    text: str, new_char_count: int, stop: Sequence[str], include_in_output: bool
) -> tuple[str, int] | None:
    """The stop string that the newest characters complete first, and where to cut the text.

    Args:
        text: the text so far.
        new_char_count: how many of its last characters are new; a stop string that was complete
            before them has been passed over already.
        stop: the stop strings; of two that complete at one character the first listed wins.
        include_in_output: cut after the stop string instead of before it.

    Returns:
        (stop string, length to cut the text to), the length being -1 if there is nothing to cut;
        None if no stop string is complete. The contract is that of vLLM's check_stop_strings.
    """
    best: tuple[int, str] | None = None
    for candidate in stop:
        start = max(0, len(text) - new_char_count - len(candidate) + 1)
        found = text.find(candidate, start)
        end = found + len(candidate)
        if found >= 0 and (best is None or end < best[0]):
            best = end, candidate
    if best is None:
        return None
    end, matched = best
    cut = end if include_in_output else end - len(matched)
    return matched, cut if cut < len(text) else -1


def held_back_length(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of the text may yet become a stop string."""
    longest = 0
    for candidate in stop:
        # Only where its first character stands can a stop string begin; the leftmost is longest.
        at = text.find(candidate[0], max(0, len(text) - len(candidate) + 1))
        while at >= 0 and not candidate.startswith(text[at:]):
            at = text.find(candidate[0], at + 1)
        if at >= 0:
            longest = max(longest, len(text) - at)
    return longest


class IncrementalDetokenizer:
    """The text of one sequence as its tokens arrive.

    Args:
        tokenizer: the model's tokenizer.
        params: stop, min_tokens, skip_special_tokens, include_stop_str_in_output.
        prompt_token_ids: what the output follows; with a tokenizer that drops a text's first space
            it tells whether the output starts the text.

    Once finished, and if no stop string cut it, `text` is `tokenizer.decode(output)`, in any split
    into tokens and updates. (Two families depend on neighbours, so there it is what the output adds
    to the decoded prompt: tokenizers that drop a first space, and WordPiece. With SentencePiece's
    byte fallback a broken character is marked as UTF-8 marks it, and does not, as in one-shot
    decoding, spoil the whole characters beside it.)
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int]
    ) -> None:
        self._decoder = make_text_decoder(tokenizer, prompt_token_ids, params.skip_special_tokens)
        self._stop = params.stop
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._finished = False
        self._held = ""
        self._released: list[str] = []
        self._delta: list[str] = []

    def update(
        self, new_token_ids: Sequence[int], finished_by_stop_token: bool = False
    ) -> str | None:
        """Take in tokens; returns the stop string that they complete, else None.

        Args:
            new_token_ids: the next output tokens. Those after the one that completes a stop string
                are ignored, as is every later call.
            finished_by_stop_token: the last of them is a stop or end token; it adds no text unless
                include_stop_str_in_output asks for it.
        """
        if finished_by_stop_token and not self._include_stop:
            new_token_ids = new_token_ids[:-1]
        for token_id in new_token_ids:
            if self._finished:
                break
            self._num_tokens += 1
            stopped_by = self._add(self._decoder.feed(token_id))
            if stopped_by is not None:
                return stopped_by
        return None

    def finish(self) -> None:
        """No more tokens will come: let go of what is held back. A second call does nothing."""
        if not self._finished:
            self._finished = True
            self._release(self._held + self._decoder.flush())
            self._held = ""

    def next_delta(self) -> str:
        """The text that may go out and has not been handed out yet."""
        delta = "".join(self._delta)
        self._delta.clear()
        return delta

    @property
    def text(self) -> str:
        """All text that may go out so far; the whole text once finished."""
        self._released = ["".join(self._released)]
        return self._released[0]

    def _add(self, new: str) -> str | None:
        if not new:
            return None
        if not self._stop:
            self._release(new)
            return None
        text = self._held + new
        if self._num_tokens >= self._min_tokens:
            match = check_stop_strings(text, len(new), self._stop, self._include_stop)
            if match is not None:
                stopped_by, cut = match
                self._release(text if cut < 0 else text[:cut])
                self._held, self._finished = "", True
                return stopped_by
        keep = held_back_length(text, self._stop)
        self._release(text[: len(text) - keep])
        self._held = text[len(text) - keep :]
        return None

    def _release(self, text: str) -> None:
        if text:
            self._released.append(text)
            self._delta.append(text)
