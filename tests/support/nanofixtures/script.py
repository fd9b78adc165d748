"""SCRIPT: a model that says exactly what a test wrote down, run by the real engine.

The folder's script.json maps prompts to replies. The model keeps no state between steps: it stores
each token's id in its KV cache and reads the whole sequence back through the block table, finds the
prompt in it, and forces the reply's next token. A wrong block table, slot or position therefore
makes it say the wrong thing. Ids are bytes (nanofixtures.bytes_tokenizer), so any text event can be
produced at will. It runs wherever `NANOSERVE_PLUGINS=nanofixtures.script:register` is set.
"""

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanofixtures.bytes_tokenizer import TURN_END, write_bytes_tokenizer

PLUGIN = "nanofixtures.script:register"
VOCAB = 512
FALLBACK = ord("?")


def register() -> None:
    """Make the architecture known to nanoserve (a plugin hook)."""
    from nanoserve.models.registry import MODELS

    MODELS.register("ScriptForCausalLM", "nanofixtures.script:ScriptForCausalLM")


def write_script(
    folder: str | Path,
    replies: dict[str, str | bytes | list[int]],
    *,
    end: bool = True,
    endless: Sequence[str] = (),
    max_position_embeddings: int = 2048,
    tokenizer_size: int = VOCAB,
    vocab_size: int = VOCAB,
    flat: Sequence[str] = (),
    raises: Sequence[str] = (),
    delay: dict[str, float] | None = None,
    chat_template: str | bool | None = True,
) -> str:
    """Write a SCRIPT model folder.

    Args:
        replies: text that the prompt contains -> what to answer (text, bytes, or token ids). The
            reply starts after the prompt: right after the key for a completion, after the next
            generation prompt for a chat.
        end: append the turn's end token to each reply; without it the last byte repeats.
        endless: keys whose reply gets no end token, whatever `end` says.
        flat: keys after which all logits are equal (sampling tests).
        raises: keys at which the model raises.
        delay: key -> seconds each step with such a row sleeps.
        chat_template: False writes a tokenizer without a template.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    kwargs: dict[str, Any] = {} if chat_template is True else {"chat_template": None}
    write_bytes_tokenizer(folder, tokenizer_size, **kwargs)
    tokens = {
        key: list(r.encode() if isinstance(r, str) else r)
        + ([TURN_END] if end and key not in endless else [])
        for key, r in replies.items()
    }
    script = {"replies": tokens, "flat": list(flat), "raises": list(raises), "delay": delay or {}}
    config = {
        "architectures": ["ScriptForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": 4,
        "intermediate_size": 4,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eos_token_id": TURN_END,
        "torch_dtype": "float32",
        "script": script,
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": TURN_END}))
    from safetensors.torch import save_file

    save_file({"script.weight": torch.zeros(1)}, str(folder / "model.safetensors"))
    return str(folder)


class _Layer(nn.Module):
    """Stands where an attention layer stands: the worker sizes the cache from it."""

    def __init__(self) -> None:
        super().__init__()
        from nanoserve.forward import AttentionShape

        self.shape = AttentionShape(num_heads=1, num_kv_heads=1, head_dim=4, scale=1.0)
        self.layer_index = 0
        self.kv_group = 0


class ScriptForCausalLM(nn.Module):
    """See the module's docstring."""

    def __init__(self, arch: Any, backend: Any, group: Any) -> None:
        super().__init__()
        script = arch.raw["script"]
        self.vocab_size = arch.vocab_size
        self.flat, self.raises, self.delay = script["flat"], script["raises"], script["delay"]
        self.replies = {tuple(k.encode()): reply for k, reply in script["replies"].items()}
        self.attention_layers = [_Layer()]
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.seen: list[list[int]] = []

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Nothing to load: the script is in the config."""
        return {name for name, _ in weights}

    def forward(self, batch: Any, kv_caches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Hidden states whose first column is the next token's id (-1: all tokens alike)."""
        meta, cache = batch.attn[0], kv_caches[0]
        # With one head, the keys' part of the cache is a table of slots in either layout.
        numbers = cache[0].view(-1, 4)[:, 0]
        slots = meta.slot_mapping
        numbers[slots[slots >= 0]] = batch.input_ids[slots >= 0].to(numbers.dtype)
        hidden = torch.zeros(batch.input_ids.numel(), 4, dtype=torch.float64, device=cache.device)
        start = 0
        for row, (count, length) in enumerate(zip(meta.query_lens, meta.seq_lens_cpu, strict=True)):
            places = torch.arange(length, device=cache.device)
            blocks = meta.block_table[row].long()[places // meta.block_size]
            ids = numbers[blocks * meta.block_size + places % meta.block_size]
            known = [int(x) for x in ids]
            self.seen.append(known)
            for offset in range(count):
                hidden[start + offset, 0] = self._next(known[: length - count + offset + 1])
            start += count
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The forced token at 20, all others at 0."""
        logits = torch.zeros(hidden.shape[0], self.vocab_size, device=hidden.device)
        for row, token in enumerate(hidden[:, 0].long().tolist()):
            if token >= 0:
                logits[row, token] = 20.0
        return logits

    def _next(self, known: list[int]) -> int:
        for key, reply in self.replies.items():
            at = _find(known, key)
            if at is None:
                continue
            text = bytes(key).decode()
            if any(word in text for word in self.raises):
                raise RuntimeError(f"the script raises at {text!r}")
            if text in self.delay:
                time.sleep(self.delay[text])
            done = len(known) - self._reply_start(known, at + len(key))
            if any(word in text for word in self.flat):
                return -1
            return reply[min(done, len(reply) - 1)] if done >= 0 else FALLBACK
        return FALLBACK

    @staticmethod
    def _reply_start(known: list[int], after_key: int) -> int:
        """A chat's reply starts after the generation prompt, a completion's right after its key."""
        header = [257, *b"assistant\n"]
        at = _find(known[after_key:], tuple(header))
        return after_key if at is None else after_key + at + len(header)


def _find(ids: list[int], key: tuple[int, ...]) -> int | None:
    """Where key starts in ids, the last time it does."""
    for start in range(len(ids) - len(key), -1, -1):
        if tuple(ids[start : start + len(key)]) == key:
            return start
    return None
