"""A typed reading of a model's config.json: what the layers need, under one set of names.

transformers has changed how config.json spells things (`rope_theta` and `rope_scaling` became
`rope_parameters` in version 5, `torch_dtype` became `dtype`); both spellings are read here, so that
the models never look at the raw file. Needs no torch and no transformers.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanoserve.errors import ModelLoadError


@dataclass
class RopeSettings:
    """Rotary embedding: its base and, for stretched contexts, how it is scaled.

    Attributes:
        theta: base of the frequencies.
        rope_type: "default", "linear", "dynamic", "yarn" or "llama3".
        params: the scaling's own numbers, by transformers' names (factor, beta_fast, ...).
    """

    theta: float = 10000.0
    rope_type: str = "default"
    params: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelArch:
    """What config.json says of a decoder-only model.

    Attributes:
        architecture: class name in `architectures`, the key into the model registry.
        head_dim: size of one attention head (hidden_size / num_heads unless stated).
        qkv_bias, o_bias, mlp_bias: whether those projections add a bias.
        sliding_window: tokens a layer looks back, by layer (None is unlimited); one entry a layer.
        eos_token_ids: every id that ends a sequence (config.json and generation_config.json).
        dtype: the type the weights are stored in, by torch's name.
        raw: the whole of config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    rope: RopeSettings = field(default_factory=RopeSettings)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    sliding_window: list[int | None] = field(default_factory=list)
    eos_token_ids: list[int] = field(default_factory=list)
    bos_token_id: int | None = None
    dtype: str = "float32"
    raw: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelArch":
        """Read folder/config.json (and generation_config.json's end tokens).

        Raises:
            ModelLoadError: no config.json, not JSON, or a field that is needed is missing.
        """
        raise NotImplementedError
