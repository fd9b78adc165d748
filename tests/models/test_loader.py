"""Loading: shards, casts, ties, and errors that name what is wrong in one line."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from nanofixtures.forward import DirectModel, model_config
from nanofixtures.tiny import make_tiny
from safetensors.torch import load_file, save_file

from nanoserve.attention.torch_paged import TorchPagedBackend
from nanoserve.errors import ModelLoadError
from nanoserve.models.loader import load_model
from nanoserve.models.registry import MODELS

CPU = torch.device("cpu")
IDS = [[5, 300, 17, 44, 9, 500, 2, 2, 81]]


def load(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    return load_model(model_config(folder, **overrides), dtype, CPU, TorchPagedBackend())


def logits(folder: Path) -> torch.Tensor:
    return DirectModel(folder, TorchPagedBackend()).step(IDS)


def change_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; names are given with '__' for '.'."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        if tensor is None:
            del weights[name]
        else:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def refusal(folder: Path, **overrides: Any) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, **overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_sharded_equals_single(tmp_path: Path) -> None:
    single = make_tiny(tmp_path / "single")
    sharded = make_tiny(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(single), logits(sharded))


def test_progress_is_told_for_each_file(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, max_shard_size="100KB")
    lines: list[str] = []
    load_model(model_config(folder), torch.float32, CPU, TorchPagedBackend(), progress=lines.append)
    files = len(list(folder.glob("*.safetensors")))
    assert lines == [f"loading weights, file {i + 1} of {files}" for i in range(files)]


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("computed", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_cast_to_the_type_of_computation(
    stored: str, computed: torch.dtype, tmp_path: Path
) -> None:
    folder = make_tiny(tmp_path, dtype=stored)
    model = load(folder, computed)
    assert {p.dtype for p in model.parameters()} == {computed}
    saved = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(model.model.embed_tokens.weight, saved.to(computed))
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("computed", [torch.float16, torch.bfloat16])
def test_half_precision_stays_near_fp32(computed: torch.dtype, tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, "Qwen3ForCausalLM")
    expected = logits(folder)
    actual = DirectModel(folder, TorchPagedBackend(), dtype=computed).step(IDS)
    assert actual.dtype == computed
    error = (actual.float() - expected).abs().max() / expected.std()
    assert error < (0.02 if computed == torch.float16 else 0.15)


def test_tied_embeddings_share_one_table_and_ignore_a_stored_head(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path, tie_word_embeddings=True)
    model = load(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    before = logits(folder)
    change_weights(folder, lm_head__weight=torch.randn(512, 64))
    assert torch.equal(logits(folder), before)


def test_old_checkpoints_with_rope_buffers_load(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    change_weights(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    load(folder)


def test_dummy_weights_need_no_files_and_are_seeded(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    (folder / "model.safetensors").unlink()
    first, second = (load(folder, torch.bfloat16, load_format="dummy") for _ in range(2))
    pairs = list(zip(first.parameters(), second.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b in pairs)
    assert all(bool(p.isfinite().all()) for p in first.parameters())
    assert first.model.layers[0].mlp.down_proj.weight.std() > 0.01


def test_packed_and_plain_products_agree(tmp_path: Path) -> None:
    from nanoserve.layers.gemm import PackedProduct, PlainProduct, cpu_product

    weight, bias = torch.randn(96, 64), torch.randn(96)
    if not isinstance(cpu_product(weight), PackedProduct):
        pytest.skip("this CPU has no packed product")
    for num_tokens in (0, 1, 2, 3, 4, 5, 33):
        x = torch.randn(num_tokens, 64)
        for b in (None, bias):
            expected = PlainProduct(weight)(x, b)
            assert torch.allclose(PackedProduct(weight)(x, b), expected, atol=1e-4)
    assert isinstance(cpu_product(weight.bfloat16()), PlainProduct)


def test_a_model_class_of_a_third_party_is_found(tmp_path: Path) -> None:
    from nanoserve.models.llama import LlamaForCausalLM

    class Other(LlamaForCausalLM):
        pass

    folder = make_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Other"]}))
    message = refusal(folder)
    assert "unknown architecture 'Other'" in message
    assert "LlamaForCausalLM" in message and "Qwen3ForCausalLM" in message
    MODELS.register("Other", Other)
    try:
        assert isinstance(load(folder), Other)
    finally:
        del MODELS._entries["Other"]


def test_A83_missing_and_unexpected_weights_are_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "missing")
    change_weights(folder, model__layers__1__self_attn__k_proj__weight=None)
    assert "lack 'model.layers.1.self_attn.k_proj.weight'" in refusal(folder)
    change_weights(folder, model__norm__weight=None, lm_head__weight=None)
    change_weights(folder, model__layers__0__mlp__up_proj__weight=None)
    assert "and 1 more" in refusal(folder)
    folder = make_tiny(tmp_path / "unexpected")
    change_weights(folder, model__layers__1__self_attn__q_norm__weight=torch.ones(16))
    assert "hold 'model.layers.1.self_attn.q_norm.weight'" in refusal(folder)


def test_A83_a_wrong_shape_is_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    change_weights(folder, model__layers__0__self_attn__k_proj__weight=torch.zeros(64, 64))
    message = refusal(folder)
    assert "k_proj.weight' has shape [64, 64]" in message and "[32, 64]" in message


def test_A83_missing_or_damaged_files_are_named(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path / "sharded", max_shard_size="100KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.unlink()
    assert shard.name in refusal(folder)
    shard.write_bytes(data[:100])
    assert shard.name in refusal(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "index" in refusal(folder)
    folder = make_tiny(tmp_path / "none")
    (folder / "model.safetensors").unlink()
    assert "no weights" in refusal(folder)


def test_A92_pickle_weights_are_never_opened(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    (folder / "model.safetensors").unlink()
    proof = tmp_path / "ran"

    class Harmful:
        def __reduce__(self) -> Any:
            return (Path.touch, (proof,))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Harmful()))
    message = refusal(folder)
    assert "pytorch_model.bin" in message and "could run code" in message
    assert not proof.exists()


def test_integer_weights_and_other_activations_are_refused(tmp_path: Path) -> None:
    folder = make_tiny(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_act": "gelu"}))
    assert "'gelu'" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(config))
    change_weights(folder, model__norm__weight=torch.ones(64, dtype=torch.int8))
    assert "int8" in refusal(folder)
