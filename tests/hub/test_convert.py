"""Converted weights and tokenizer against formulas written down again from the formats."""

import json
from pathlib import Path

import numpy as np
import pytest
from nanofixtures.embedded import embedded_folder
from nanofixtures.tiny_gguf import write_tiny_gguf

from nanoserve.errors import ModelLoadError
from nanoserve.hub import embedded
from nanoserve.hub.convert import LAYER_TENSOR_NAMES, convert_gguf, unpermute_rope
from nanoserve.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def converted(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    shares: list[float] = []
    convert_gguf(tiny_gguf, folder, shares.append)
    assert shares == sorted(shares) and shares[0] == 0 and shares[-1] == 1
    return folder


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    assert {str(t.dtype) for t in tensors.values()} == {"torch.bfloat16"}
    return {name: t.float().numpy() for name, t in tensors.items()}


def dequantized(tensor: object) -> np.ndarray:
    """ggml's Q4_1, Q8_0 and F32 blocks, read from their definitions."""
    data, kind = tensor.data, tensor.tensor_type.name  # type: ignore[attr-defined]
    shape = tuple(int(n) for n in reversed(tensor.shape))  # type: ignore[attr-defined]
    if kind == "F32":
        return np.array(data).reshape(shape)
    size = {"Q4_1": 20, "Q8_0": 34}[kind]
    blocks = np.ascontiguousarray(data).reshape(-1, size)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    if kind == "Q8_0":
        return (scale * blocks[:, 2:].view(np.int8)).reshape(shape)
    low = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (scale * nibbles + low).reshape(shape)


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Nearest bf16, ties to even, by torch."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16).float().numpy()


def test_weights_are_the_dequantized_ones(tiny_gguf: Path, converted: Path) -> None:
    from gguf import GGUFReader

    tensors = read_tensors(converted)
    source = {t.name: dequantized(t) for t in GGUFReader(tiny_gguf).tensors}
    assert len(tensors) == len(source)  # tied embeddings: no lm_head
    expected = {
        "model.embed_tokens.weight": source["token_embd.weight"],
        "model.norm.weight": source["output_norm.weight"],
        "model.layers.1.mlp.down_proj.weight": source["blk.1.ffn_down.weight"],
        "model.layers.1.mlp.up_proj.weight": source["blk.1.ffn_up.weight"],
        "model.layers.1.mlp.gate_proj.weight": source["blk.1.ffn_gate.weight"],
        "model.layers.1.self_attn.v_proj.weight": source["blk.1.attn_v.weight"],
        "model.layers.1.self_attn.o_proj.weight": source["blk.1.attn_output.weight"],
        "model.layers.0.input_layernorm.weight": source["blk.0.attn_norm.weight"],
        "model.layers.0.post_attention_layernorm.weight": source["blk.0.ffn_norm.weight"],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(tensors[name], to_bf16(values), err_msg=name)


def test_query_and_key_rows_follow_the_rotation() -> None:
    """Attention scores by llama.cpp's rotation of neighbours equal those of rotated halves."""
    rng = np.random.default_rng(1)
    heads, dim, hidden = 3, 8, 12
    query, key = rng.standard_normal((2, heads * dim, hidden))
    x, y = rng.standard_normal((2, hidden))
    angle = 10000.0 ** (-np.arange(0, dim, 2) / dim)

    def neighbours(rows: np.ndarray, position: int) -> np.ndarray:
        pairs = rows.reshape(heads, dim // 2, 2)
        turn = np.exp(1j * position * angle)
        return (pairs[..., 0] + 1j * pairs[..., 1]) * turn

    def halves(rows: np.ndarray, position: int) -> np.ndarray:
        pairs = rows.reshape(heads, 2, dim // 2)
        turn = np.exp(1j * position * angle)
        return (pairs[:, 0] + 1j * pairs[:, 1]) * turn

    stored = (neighbours(query @ x, 5) * neighbours(key @ y, 2).conj()).real.sum(-1)
    new_query, new_key = unpermute_rope(query, heads), unpermute_rope(key, heads)
    ours = (halves(new_query @ x, 5) * halves(new_key @ y, 2).conj()).real.sum(-1)
    np.testing.assert_allclose(ours, stored, rtol=1e-12)
    assert not np.allclose(new_query, query)


def test_query_and_key_are_unpermuted(tiny_gguf: Path, converted: Path) -> None:
    from gguf import GGUFReader

    tensors = read_tensors(converted)
    source = {t.name: dequantized(t) for t in GGUFReader(tiny_gguf).tensors}
    for name, heads in (("attn_q", 2), ("attn_k", 1)):
        ours = tensors[f"model.layers.0.{LAYER_TENSOR_NAMES[name]}.weight"]
        stored = to_bf16(source[f"blk.0.{name}.weight"]).reshape(heads, 16, 2, 64)
        np.testing.assert_array_equal(ours.reshape(heads, 2, 16, 64)[:, 1], stored[:, :, 1])
        np.testing.assert_array_equal(ours.reshape(heads, 2, 16, 64)[:, 0], stored[:, :, 0])


def test_transformers_loads_the_folder(converted: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(converted)
    config = model.config
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings and model.lm_head.weight is model.model.embed_tokens.weight
    assert model.generation_config.eos_token_id == 2
    assert (model.generation_config.temperature, model.generation_config.top_p) == (0.2, 0.9)
    assert (config.num_key_value_heads, config.intermediate_size, config.vocab_size) == (1, 96, 263)


def test_tokenizer_of_the_file(converted: Path) -> None:
    tokenizer = Tokenizer.from_folder(converted)
    text = "abcab1212 <tool><|im_end|> abX"
    pieces = [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)]
    digits = ["1", "2", "1", "2"]  # split before any merge
    assert pieces == ["abc", "ab", *digits, "Ġ", "<tool>", "<|im_end|>", "Ġ", "ab", "X"]
    assert tokenizer.eos_token_id == 2
    # A control token is left out of the text, a token that the user defined is not.
    assert tokenizer.decode(tokenizer.encode(text)) == "abcab1212 <tool> abX"
    chat = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "noise.gguf").write_bytes(b"GGUF" + bytes(100))
    write_tiny_gguf(tmp_path / "other.gguf", pre="llama-bpe")
    for name in ("noise", "other"):
        with pytest.raises(ModelLoadError) as caught:
            convert_gguf(tmp_path / f"{name}.gguf", tmp_path)
        assert f"{name}.gguf" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_every_weight_of_the_embedded_model() -> None:
    from gguf import GGUFReader

    ours = read_tensors(Path(embedded_folder()))
    source = embedded.find_gguf()
    assert source is not None
    tensors = GGUFReader(source).tensors
    assert len(tensors) == len(ours) == 272
    for tensor in tensors:
        values = to_bf16(dequantized(tensor))
        stem, layer = tensor.name.removesuffix(".weight"), ""
        if stem.startswith("blk."):
            _, number, stem = stem.split(".")
            layer = f"layers.{number}."
        name = {"token_embd": "embed_tokens", "output_norm": "norm"} | LAYER_TENSOR_NAMES
        mine = ours[f"model.{layer}{name[stem]}.weight"]
        if stem in ("attn_q", "attn_k"):
            # Row 2i of a stored head is row i of ours, row 2i + 1 is row i + 32.
            mine = mine.reshape(-1, 2, 32, 576).swapaxes(1, 2).reshape(values.shape)
        np.testing.assert_array_equal(mine, values, err_msg=tensor.name)


@pytest.mark.slow
def test_embedded_model_answers() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    folder = embedded_folder()
    config = json.loads(Path(folder, "config.json").read_text())
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-5, 100000.0)
    tokenizer = Tokenizer.from_folder(folder)
    ids = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    output = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)
    answer = output[0, len(ids) :].tolist()
    assert tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] == 2
