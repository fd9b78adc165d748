"""Rotary frequencies against transformers', at true head sizes; and the turning itself."""

from typing import Any

import pytest
import torch
from nanofixtures.tiny import tiny_config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanoserve.config.arch import ModelArch
from nanoserve.layers.rotary import RotaryEmbedding, rope_angles, rotary_embedding

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 4096}

CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "factor": 3.0, "rope_theta": 1e4},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "llama3": {
        **LLAMA3,
        "rope_type": "llama3",
        "original_max_position_embeddings": 8192,
        "rope_theta": 5e5,
    },
    "llama3-32": {
        **LLAMA3,
        "rope_type": "llama3",
        "factor": 32.0,
        "original_max_position_embeddings": 512,
        "rope_theta": 1e4,
    },
    "yarn": {**YARN, "rope_type": "yarn", "rope_theta": 1e6},
    "yarn-betas": {
        **YARN,
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-factor": {**YARN, "rope_type": "yarn", "rope_theta": 1e4, "attention_factor": 1.25},
    "yarn-mscale": {
        **YARN,
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", list(CASES))
def test_frequencies_and_scale_are_those_of_transformers(kind: str, head_dim: int) -> None:
    config = tiny_config(
        hidden_size=4 * head_dim,
        head_dim=head_dim,
        max_position_embeddings=8192,
        rope_parameters=dict(CASES[kind]),
    )
    config.architectures = ["LlamaForCausalLM"]
    arch = ModelArch.from_dict(config.to_dict())
    angles, scale = rope_angles(arch, 2)
    theirs = LlamaRotaryEmbedding(config)
    assert scale == pytest.approx(theirs.attention_scaling)
    assert torch.allclose(angles[1], theirs.inv_freq, rtol=1e-6, atol=0)
    assert bool((angles[0] == 0).all())


def test_turning_is_half_split_and_by_position() -> None:
    config = tiny_config()
    config.architectures = ["LlamaForCausalLM"]
    rotary = RotaryEmbedding(ModelArch.from_dict(config.to_dict()))
    positions = torch.tensor([0, 7, 7, 2047, 3])
    fused = torch.randn(5, 9, 16)
    x = fused[:, 2:8]  # a strided view, as the model hands over
    actual = rotary_embedding(x, *rotary(positions))
    cos, sin = LlamaRotaryEmbedding(config)(x, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(x.transpose(0, 1), x.transpose(0, 1), cos, sin)
    assert torch.allclose(actual, expected[0].transpose(0, 1), atol=1e-5)
    assert torch.equal(actual[0], x[0])
