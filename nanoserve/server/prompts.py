"""From the prompt of a request body to token ids.

Chat messages go through the model's chat template; text goes through the tokenizer; token ids pass
as they are (the engine checks them). Text that cannot possibly fit the model's context is refused
before it is tokenized, so that one absurd body cannot hold up everyone's streams.
"""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nanoserve.errors import InvalidRequestError
from nanoserve.server.messages import template_kwargs, template_messages
from nanoserve.server.protocol import ChatMessage
from nanoserve.tokenizer.tokenizer import Tokenizer

# Longer text is tokenized in a thread of its own.
_LONG_TEXT = 20_000


class PromptReader:
    """Tokenizes the prompts of requests.

    Args:
        tokenizer: the served model's tokenizer.
        max_model_len: most tokens the model takes.
    """

    def __init__(self, tokenizer: Tokenizer, max_model_len: int) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        longest = max((len(token) for token in tokenizer.backend.get_vocab()), default=1)
        self._max_characters = max_model_len * max(longest, 1)
        # One thread: it keeps the event loop free, and the tokenizer is never entered twice.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    def close(self) -> None:
        """End the tokenizer's thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def text(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """The token ids of plain text.

        Raises:
            InvalidRequestError: the text is longer than the model's context can be.
        """
        if len(text) > self._max_characters:
            at_least = len(text) // (self._max_characters // self._max_model_len)
            raise InvalidRequestError(
                f"this model's maximum context length is {self._max_model_len} tokens, but the "
                f"prompt has {len(text)} characters, which is at least {at_least} tokens",
                param,
                code="context_length_exceeded",
            )
        if len(text) < _LONG_TEXT:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._thread,
            lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens),
        )

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool,
        add_special_tokens: bool,
        kwargs: Mapping[str, Any] | None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """The token ids of a conversation.

        Args:
            messages: the turns.
            add_generation_prompt: end with the header of the assistant's turn.
            add_special_tokens: let the tokenizer add its begin token to what the template wrote;
                templates write their own, so this is rarely right.
            kwargs: variables for the template.
            continue_final_message: leave the last turn open, for the model to go on with it.

        Raises:
            InvalidRequestError: there is no template, or it refuses the messages.
        """
        variables = template_kwargs(kwargs)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequestError(
                    "continue_final_message needs add_generation_prompt to be false",
                    "continue_final_message",
                )
            variables["continue_final_message"] = True
        turns = template_messages(messages, str(self._tokenizer.chat_template))
        text = self._tokenizer.render_chat(
            turns, add_generation_prompt=add_generation_prompt, **variables
        )
        return await self.text(text, add_special_tokens, "messages")
