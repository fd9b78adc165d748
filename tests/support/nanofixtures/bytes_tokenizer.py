"""A tokenizer whose first 256 tokens are the 256 bytes: any text event can be produced at will.

Ids: 0-255 the bytes; 256 end of text, 257 turn start, 258 turn end (special); 259 and up the words
"w259 ", "w260 " ... which no text is ever encoded to but which decode to themselves.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END_OF_TEXT, TURN_START, TURN_END = 256, 257, 258
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] or '' }}"
    "{% for call in message.get('tool_calls') or [] %}[{{ call.function.name }}]{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_chars() -> list[str]:
    """The printable character that stands for each byte in a byte-level vocabulary."""
    keep = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars, spare = {b: chr(b) for b in keep}, 256
    for b in range(256):
        if b not in chars:
            chars[b] = chr(spare)
            spare += 1
    return [chars[b] for b in range(256)]


def write_bytes_tokenizer(
    folder: str | Path, size: int = 512, chat_template: str | None = CHAT_TEMPLATE
) -> None:
    """Write tokenizer.json and tokenizer_config.json with `size` tokens into folder."""
    space = byte_chars()[32]
    vocab = {char: byte for byte, char in enumerate(byte_chars())}
    vocab |= {token: 256 + i for i, token in enumerate(SPECIAL)}
    vocab |= {f"w{i}{space}": i for i in range(259, size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
