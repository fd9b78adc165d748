"""A Llama model from a GGUF file into the files that everything else reads.

GGUF is llama.cpp's one-file format: settings, vocabulary and quantized weights together. What comes
out is what a Hub repository holds: config.json, model.safetensors in bf16, tokenizer.json and the
small files beside it, so that nothing after this needs to know where the model came from.

Two things in the file are not what they seem. llama.cpp rotates neighbouring elements where
transformers rotates the two halves of a head, so the rows of the query and key projections are
stored permuted. And the name of the pre-tokenizer ("smollm") stands for rules that are not in the
file: SmolLM splits digits one by one before the byte-level rule, and adds no token around a text.

The work is done tensor by tensor, and row block by row block, so that memory stays far below the
model's size.
"""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanoserve.errors import ModelLoadError

if TYPE_CHECKING:
    import numpy as np
    from gguf import GGUFReader, ReaderTensor

# Elements dequantized at once: 16 MB as fp32.
CHUNK_ELEMENTS = 4 * 1024 * 1024
CONTROL, USER_DEFINED = 3, 4  # kinds of token in a GGUF vocabulary, beside the normal 1

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Progress = Callable[[float], None]


@dataclass(frozen=True)
class Target:
    """One tensor of the safetensors file: its name, shape and where its values come from."""

    name: str
    shape: tuple[int, ...]
    source: "ReaderTensor"
    rope_heads: int  # heads whose rows are permuted; 0 for most tensors


def convert_gguf(source: Path, folder: Path, progress: Progress = lambda share: None) -> None:
    """Write the model in a GGUF file as a model folder.

    Args:
        source: a GGUF file of architecture "llama" with a byte-level ("gpt2") SmolLM vocabulary.
        folder: an existing folder, to be filled.
        progress: told the share that is done, 0 to 1.

    Raises:
        ModelLoadError: the package `gguf` is missing, or the file holds another kind of model.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelLoadError(
            "reading the embedded model needs the package gguf: pip install gguf"
        ) from error
    progress(0.0)
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError) as error:
        raise ModelLoadError(f"{source} is not a readable GGUF file: {error}") from error
    meta = dict(reader.fields)
    kind = (_value(meta, "general.architecture"), _value(meta, "tokenizer.ggml.pre"))
    if kind != ("llama", "smollm"):
        raise ModelLoadError(f"{source} holds a model of kind {kind}, not ('llama', 'smollm')")
    targets = _targets(reader, meta)
    _write_json(folder / "config.json", model_config(meta, targets))
    _write_json(folder / "generation_config.json", generation_config(meta))
    write_tokenizer(folder, meta)
    progress(0.1)
    _write_safetensors(
        folder / "model.safetensors", targets, lambda share: progress(0.1 + 0.9 * share)
    )


# The settings that the model's card samples with. A model this small, drawn from at temperature 1,
# soon wanders off into characters that mean nothing.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}


# -- settings -------------------------------------------------------------------------------------
def model_config(meta: dict[str, Any], targets: list[Target]) -> dict[str, Any]:
    """The contents of config.json, spelled so that transformers 4 and 5 both read it."""
    names = {target.name: target for target in targets}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": _value(meta, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _value(meta, "tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "hidden_size": _value(meta, "llama.embedding_length"),
        "intermediate_size": _value(meta, "llama.feed_forward_length"),
        "max_position_embeddings": _value(meta, "llama.context_length"),
        "mlp_bias": False,
        "num_attention_heads": _value(meta, "llama.attention.head_count"),
        "num_hidden_layers": _value(meta, "llama.block_count"),
        "num_key_value_heads": _value(meta, "llama.attention.head_count_kv"),
        "pad_token_id": _value(meta, "tokenizer.ggml.padding_token_id"),
        # Stored as fp32: 1e-05 comes back as 9.999999747378752e-06.
        "rms_norm_eps": float(f"{_value(meta, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_scaling": None,
        "rope_theta": _value(meta, "llama.rope.freq_base"),
        "tie_word_embeddings": "lm_head.weight" not in names,
        "torch_dtype": "bfloat16",
        "vocab_size": names["model.embed_tokens.weight"].shape[0],
    }


def generation_config(meta: dict[str, Any]) -> dict[str, Any]:
    """The contents of generation_config.json: the special ids, and how to sample unless asked."""
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return SAMPLING | {
        f"{ours}_token_id": _value(meta, f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in keys.items()
    }


# -- tokenizer ------------------------------------------------------------------------------------
def write_tokenizer(folder: Path, meta: dict[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json from a GGUF's vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _value(meta, "tokenizer.ggml.tokens")
    kinds = _value(meta, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _value(meta, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            special = kind == CONTROL
            add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
            add([AddedToken(token, special=special, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    special_tokens = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    _write_json(
        folder / "tokenizer_config.json",
        {
            # The class that takes tokenizer.json as it is.
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{
                f"{ours}_token": tokens[_value(meta, f"tokenizer.ggml.{theirs}_token_id")]
                for ours, theirs in special_tokens.items()
            },
            "chat_template": _value(meta, "tokenizer.chat_template"),
            "clean_up_tokenization_spaces": False,
            "model_max_length": _value(meta, "llama.context_length"),
        },
    )


# -- weights --------------------------------------------------------------------------------------
def _targets(reader: "GGUFReader", meta: dict[str, Any]) -> list[Target]:
    rope_heads = {
        "attn_q": _value(meta, "llama.attention.head_count"),
        "attn_k": _value(meta, "llama.attention.head_count_kv"),
    }
    targets = []
    for tensor in reader.tensors:
        part = tensor.name.removesuffix(".weight")
        prefix, names = "", TENSOR_NAMES
        if part.startswith("blk."):
            _, layer, part = part.split(".", 2)
            prefix, names = f"model.layers.{layer}.", LAYER_TENSOR_NAMES
        if part not in names:
            raise ModelLoadError(f"the GGUF file has a tensor of unknown name, {tensor.name}")
        name = f"{prefix}{names[part]}.weight"
        shape = tuple(int(size) for size in reversed(tensor.shape))
        targets.append(Target(name, shape, tensor, rope_heads.get(part, 0)))
    return targets


def _write_safetensors(path: Path, targets: list[Target], progress: Progress) -> None:
    """Write the tensors as bf16, one after the other, without holding them all."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for target in targets:
        end = offset + 2 * math.prod(target.shape)
        header[target.name] = {
            "dtype": "BF16",
            "shape": list(target.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format asks for values aligned to 8 bytes
    written = 0
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for target in targets:
            for chunk in _bf16_chunks(target):
                written += file.write(chunk.data)
                progress(written / offset)


def _bf16_chunks(target: Target) -> Iterator["np.ndarray"]:
    """A tensor's values as bf16 bit patterns (uint8 pairs), some rows at a time."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize, quantize

    data, kind = target.source.data, target.source.tensor_type
    rows = target.shape[0] if len(target.shape) > 1 else 1
    step = rows if target.rope_heads else max(1, CHUNK_ELEMENTS * rows // math.prod(target.shape))
    for start in range(0, rows, step):
        block = data[start : start + step] if len(target.shape) > 1 else data[None]
        values = dequantize(block, kind)
        if target.rope_heads:
            values = unpermute_rope(values, target.rope_heads)
        yield quantize(values, GGMLQuantizationType.BF16)


def unpermute_rope(weight: "np.ndarray", num_heads: int) -> "np.ndarray":
    """Rows of a query or key projection from llama.cpp's order to transformers'.

    Within a head llama.cpp stores rows (0, d/2, 1, d/2 + 1, ...), so that the two elements that one
    angle turns are neighbours.

    Args:
        weight: [num_heads * head_dim, hidden_size].

    Returns:
        The same shape, each head's rows in the order 0, 1, ..., d - 1.
    """
    pairs = weight.reshape(num_heads, weight.shape[0] // num_heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _value(meta: dict[str, Any], key: str) -> Any:
    if key not in meta:
        raise ModelLoadError(f"the GGUF file does not say {key}")
    return meta[key].contents()


def _write_json(path: Path, contents: dict[str, Any]) -> None:
    path.write_text(json.dumps(contents, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
