"""Reading config.json: both of transformers' spellings, and refusals that name what is wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from nanofixtures.tiny import ROPE_VARIANTS, tiny_config

from nanoserve.config.arch import ModelArch
from nanoserve.errors import ModelLoadError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
}


def read(**overrides: Any) -> ModelArch:
    return ModelArch.from_dict(BASE | overrides)


@pytest.mark.parametrize("kind", ["default", *ROPE_VARIANTS])
def test_both_spellings_of_rope_read_the_same(kind: str) -> None:
    variant = ROPE_VARIANTS.get(kind, {"rope_type": "default"})
    new = read(rope_parameters={**variant, "rope_theta": 5e5})
    settings = {k: v for k, v in variant.items() if k != "rope_type"}
    old = read(rope_theta=5e5, rope_scaling={**settings, "rope_type": kind})
    older = read(rope_theta=5e5, rope_scaling={**settings, "type": kind})
    assert new.rope == old.rope == older.rope
    assert new.rope.theta == 5e5
    assert new.rope.rope_type == kind


def test_no_rope_settings_is_the_default_and_null_scaling_too() -> None:
    assert read().rope == read(rope_scaling=None).rope
    assert read().rope.theta == 10000.0
    assert read(rope_theta=1e6, rope_scaling=None).rope.theta == 1e6


def test_rope_equal_for_all_layer_types_is_read_and_differing_is_refused() -> None:
    plain = {"rope_type": "default", "rope_theta": 7e4}
    nested = {"full_attention": plain, "sliding_attention": dict(plain)}
    assert read(rope_parameters=nested).rope.theta == 7e4
    nested["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    with pytest.raises(ModelLoadError, match="differ between layer types"):
        read(rope_parameters=nested)


def test_context_length_counts_rope_scaling() -> None:
    assert read().context_length == 2048
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).context_length == 4096
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    assert read(rope_scaling=yarn).context_length == 8192
    assert read(rope_scaling=yarn, max_position_embeddings=8192).context_length == 8192
    llama3 = {**ROPE_VARIANTS["llama3"], "original_max_position_embeddings": 256}
    assert read(rope_scaling=llama3).context_length == 2048


def test_defaults() -> None:
    arch = read()
    assert (arch.num_kv_heads, arch.head_dim, arch.dtype) == (4, 16, "float32")
    assert arch.sliding_window == [None] * 3
    assert arch.eos_token_ids == []
    assert read(head_dim=24).head_dim == 24
    assert read(head_dim=None).head_dim == 16
    assert read(num_key_value_heads=2).num_kv_heads == 2


def test_both_spellings_of_dtype() -> None:
    assert read(torch_dtype="bfloat16").dtype == "bfloat16"
    assert read(dtype="float16").dtype == "float16"
    assert read(dtype="torch.bfloat16").dtype == "bfloat16"


def test_biases_by_architecture() -> None:
    def biases(arch: ModelArch) -> tuple[bool, bool, bool]:
        return arch.qkv_bias, arch.o_bias, arch.mlp_bias

    assert biases(read()) == (False, False, False)
    assert biases(read(attention_bias=True, mlp_bias=True)) == (True, True, True)
    assert biases(read(architectures=["Qwen2ForCausalLM"])) == (True, False, False)
    assert biases(read(architectures=["Qwen3ForCausalLM"])) == (False, False, False)


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("LlamaForCausalLM", {"sliding_window": 8}, [None] * 3),
        ("MistralForCausalLM", {"sliding_window": 8}, [8] * 3),
        ("MistralForCausalLM", {"sliding_window": None}, [None] * 3),
        ("Qwen2ForCausalLM", {"sliding_window": 8}, [None] * 3),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, [None] * 3),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1},
            [None, 8, 8],
        ),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": 8,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            [8, None, 8],
        ),
    ],
)
def test_sliding_window_rules(
    architecture: str, fields: dict[str, Any], expected: list[int | None]
) -> None:
    assert read(architectures=[architecture], **fields).sliding_window == expected


def test_end_tokens_of_both_files_are_merged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": 5}))
    assert ModelArch.from_folder(tmp_path).eos_token_ids == [5]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    assert ModelArch.from_folder(tmp_path).eos_token_ids == [5, 7]
    (tmp_path / "config.json").write_text(json.dumps(BASE | {"eos_token_id": None}))
    assert ModelArch.from_folder(tmp_path).eos_token_ids == [7, 5]


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"]
)
def test_reads_what_transformers_writes(name: str, tmp_path: Path) -> None:
    config = tiny_config(name, num_key_value_heads=1)
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    arch = ModelArch.from_folder(tmp_path)
    assert arch.architecture == name
    assert (arch.num_layers, arch.num_heads, arch.num_kv_heads, arch.head_dim) == (2, 4, 1, 16)
    assert arch.rope.theta == config.rope_parameters["rope_theta"]
    assert arch.eos_token_ids == [258]


def test_A83_a_folder_that_is_no_model_gets_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="does not exist"):
        ModelArch.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        ModelArch.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ModelLoadError, match="not JSON"):
        ModelArch.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match="JSON object"):
        ModelArch.from_folder(tmp_path)
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ModelLoadError, match="not JSON"):
        ModelArch.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architectures": None}, "architectures"),
        ({"architectures": []}, "architectures"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"num_attention_heads": None}, "'num_attention_heads' is missing"),
        ({"hidden_size": "64"}, "hidden_size must be"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"num_hidden_layers": 1.5}, "whole number"),
        ({"num_key_value_heads": 3}, "cannot share"),
        ({"head_dim": 15}, "even"),
        ({"vision_config": {}}, "multimodal"),
        ({"text_config": {"hidden_size": 1}}, "multimodal"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "needs 'factor'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["linear_attention"] * 3,
            },
            "linear_attention",
        ),
    ],
)
def test_A83_what_cannot_be_served_is_named_in_one_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(**change)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
