"""Log-probabilities in the two shapes of the OpenAI API: chat's and the older completions'."""

from collections.abc import Sequence

from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs

from nanoserve.outputs import Logprob, LogprobsAtPosition
from nanoserve.tokenizer.tokenizer import Tokenizer

# JSON has no minus infinity; the API's word for "very unlikely" is this number.
LOWEST = -9999.0


def chat_logprobs(
    positions: Sequence[LogprobsAtPosition],
    token_ids: Sequence[int],
    top: int,
    tokenizer: Tokenizer,
) -> list[ChatCompletionTokenLogprob]:
    """Chat's form: each token with its bytes and the `top` likeliest tokens at its place.

    The bytes are the token's own, also where they are only a part of a character.
    """
    entries = []
    for token_id, position in zip(token_ids, positions, strict=True):
        likeliest = sorted(position.items(), key=lambda item: -item[1].logprob)[:top]
        entries.append(
            ChatCompletionTokenLogprob(
                token=_text(position[token_id]),
                bytes=list(tokenizer.token_bytes(token_id)),
                logprob=max(position[token_id].logprob, LOWEST),
                top_logprobs=[
                    TopLogprob(
                        token=_text(entry),
                        bytes=list(tokenizer.token_bytes(other)),
                        logprob=max(entry.logprob, LOWEST),
                    )
                    for other, entry in likeliest
                ],
            )
        )
    return entries


def completion_logprobs(
    positions: Sequence[LogprobsAtPosition], token_ids: Sequence[int], offset: int
) -> tuple[Logprobs, int]:
    """The completions' form, as parallel lists.

    Args:
        positions: one dict a token.
        token_ids: the chosen tokens.
        offset: characters of the choice's text before the first of these tokens.

    Returns:
        The lists, and the offset after the last token.
    """
    tokens, chosen_logprobs, tops, offsets = [], [], [], []
    for token_id, position in zip(token_ids, positions, strict=True):
        token = _text(position[token_id])
        tokens.append(token)
        chosen_logprobs.append(max(position[token_id].logprob, LOWEST))
        top: dict[str, float] = {}
        for entry in position.values():  # the chosen token comes first and keeps its place
            top.setdefault(_text(entry), max(entry.logprob, LOWEST))
        tops.append(top)
        offsets.append(offset)
        offset += len(token)
    lists = Logprobs(
        tokens=tokens, token_logprobs=chosen_logprobs, top_logprobs=tops, text_offset=offsets
    )
    return lists, offset


def _text(entry: Logprob) -> str:
    return entry.decoded_token or ""
