"""A GGUF file like the embedded model's, small enough to be converted in every test."""

from pathlib import Path

import numpy as np

from nanofixtures.bytes_tokenizer import CHAT_TEMPLATE, SPECIAL, byte_chars

# One odd word for each rule: it must be whole (special), or merged (normal).
MERGES = ["a b", "ab c", "1 2"]
TOKENS = [*SPECIAL, *byte_chars(), "ab", "abc", "12", "<tool>"]
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, LAYERS = 64, 96, 2, 1, 2
HEAD_DIM = HIDDEN // HEADS


def write_tiny_gguf(path: Path, pre: str = "smollm") -> None:
    """Write a Llama with random Q4_1, Q8_0 and F32 weights, as llama.cpp's converter would."""
    import gguf
    from gguf import GGMLQuantizationType as Kind

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    kinds = [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL) - 1) + [4]
    writer.add_token_types(kinds)
    writer.add_token_merges(MERGES)
    for add, token_id in (
        (writer.add_bos_token_id, 1),
        (writer.add_eos_token_id, 2),
        (writer.add_unk_token_id, 0),
        (writer.add_pad_token_id, 2),
    ):
        add(token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
    rng = np.random.default_rng(0)

    def add_tensor(name: str, shape: tuple[int, ...], kind: Kind) -> None:
        values = rng.standard_normal(shape).astype(np.float32)
        data = values if kind is Kind.F32 else gguf.quants.quantize(values, kind)
        writer.add_tensor(name, data, raw_dtype=kind)

    add_tensor("token_embd.weight", (len(TOKENS), HIDDEN), Kind.Q8_0)
    add_tensor("output_norm.weight", (HIDDEN,), Kind.F32)
    kv = KV_HEADS * HEAD_DIM
    for layer in range(LAYERS):
        for name, shape in {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INTERMEDIATE, HIDDEN),
            "ffn_up": (INTERMEDIATE, HIDDEN),
            "ffn_down": (HIDDEN, INTERMEDIATE),
        }.items():
            add_tensor(f"blk.{layer}.{name}.weight", shape, Kind.Q4_1)
        for name in ("attn_norm", "ffn_norm"):
            add_tensor(f"blk.{layer}.{name}.weight", (HIDDEN,), Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
