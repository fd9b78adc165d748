"""A typed reading of a model's config.json: what the layers need, under one set of names.

transformers has changed how config.json spells things (`rope_theta` and `rope_scaling` became
`rope_parameters` in version 5, `torch_dtype` became `dtype`); both spellings are read here, so that
the models never look at the raw file. Whether an architecture can be built is not known here: the
model registry says. Needs no torch and no transformers.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from nanoserve.errors import ModelLoadError

DTYPES = ("float32", "float16", "bfloat16")
ROPE_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


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
        max_position_embeddings: as config.json says; `context_length` counts rope scaling too.
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

    @property
    def context_length(self) -> int:
        """Tokens a sequence may have, counting what rope scaling stretches the positions to.

        "linear" and "dynamic" multiply max_position_embeddings by their factor, "yarn" the length
        it was first trained with; a "llama3" config states the stretched length itself.
        """
        limit, params = self.max_position_embeddings, self.rope.params
        if self.rope.rope_type in ("linear", "dynamic"):
            return max(limit, int(limit * params["factor"]))
        if self.rope.rope_type == "yarn":
            return max(limit, int(params["original_max_position_embeddings"] * params["factor"]))
        return limit

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelArch":
        """Read folder/config.json (and generation_config.json's end tokens).

        Raises:
            ModelLoadError: no config.json, not JSON, a field that is needed is missing, or one
                that says the model is of a kind not served here; one line that names it.
        """
        path = Path(folder) / "config.json"
        if not Path(folder).is_dir():
            raise ModelLoadError(f"model folder {str(folder)!r} does not exist")
        if not path.is_file():
            raise ModelLoadError(f"model folder {str(folder)!r} has no config.json")
        raw = _read_json(path)
        generation = path.with_name("generation_config.json")
        generation_raw = _read_json(generation) if generation.is_file() else {}
        return cls.from_dict(raw, generation_raw, source=str(path))

    @classmethod
    def from_dict(
        cls,
        raw: dict[str, Any],
        generation: dict[str, Any] | None = None,
        source: str = "config.json",
    ) -> "ModelArch":
        """The same from a parsed config.json; `source` names the file in error messages."""
        architecture = _architecture(raw, source)
        _refuse_other_kinds(raw, architecture, source)
        reader = _Fields(raw, architecture, source)
        hidden_size = reader.size("hidden_size")
        num_layers = reader.size("num_hidden_layers")
        num_heads = reader.size("num_attention_heads")
        num_kv_heads = reader.size("num_key_value_heads", default=num_heads)
        default_head_dim = 128 if architecture == "Qwen3ForCausalLM" else hidden_size // num_heads
        head_dim = reader.size("head_dim", default=default_head_dim)
        max_positions = reader.size("max_position_embeddings")
        if num_heads % num_kv_heads:
            reader.fail(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads")
        if head_dim % 2:
            reader.fail(
                f"head_dim is {head_dim}, but rotary embedding turns pairs: it must be even"
            )
        attention_bias = bool(raw.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=reader.size("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=reader.size("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=reader.number("rms_norm_eps", default=1e-6),
            hidden_act=str(raw.get("hidden_act") or "silu"),
            rope=_rope(reader, max_positions),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
            o_bias=attention_bias and architecture != "Qwen2ForCausalLM",
            mlp_bias=bool(raw.get("mlp_bias", False)),
            sliding_window=_sliding_windows(reader, num_layers),
            eos_token_ids=_eos_token_ids(raw, generation or {}),
            bos_token_id=raw.get("bos_token_id"),
            dtype=_dtype(reader),
            raw=raw,
        )


class _Fields:
    """Checked access to the fields of one config.json."""

    def __init__(self, raw: dict[str, Any], architecture: str, source: str) -> None:
        self.raw = raw
        self.architecture = architecture
        self.source = source

    def fail(self, problem: str) -> NoReturn:
        raise ModelLoadError(f"{self.source} ({self.architecture}): {problem}")

    def number(self, name: str, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None:
            value = default
        if value is None:
            self.fail(f"the field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            self.fail(f"{name} must be a positive number, not {value!r}")
        return value

    def size(self, name: str, default: int | None = None) -> int:
        value = self.number(name, default)
        if value != int(value):
            self.fail(f"{name} must be a whole number, not {value!r}")
        return int(value)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return value


def _architecture(raw: dict[str, Any], source: str) -> str:
    names = raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelLoadError(f"{source} names no model class (field 'architectures')")
    return names[0]


def _refuse_other_kinds(raw: dict[str, Any], architecture: str, source: str) -> None:
    """Models that would load in part and then answer nonsense are refused by name."""
    for part in ("vision_config", "audio_config", "text_config"):
        if raw.get(part) is not None:
            raise ModelLoadError(
                f"{source}: {architecture} is a multimodal model ({part}); only text models are "
                f"supported"
            )
    if raw.get("is_encoder_decoder"):
        raise ModelLoadError(
            f"{source}: {architecture} is an encoder-decoder model; only decoders are supported"
        )
    quantization = raw.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise ModelLoadError(
            f"{source}: the weights are quantized ({method or 'quantization_config'}); only "
            f"float32, float16 and bfloat16 weights are supported"
        )


def _rope(reader: _Fields, max_positions: int) -> RopeSettings:
    raw = reader.raw
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        reader.fail(f"rope settings must be an object, not {rope!r}")
    per_layer_type = [value for value in rope.values() if isinstance(value, dict)]
    if per_layer_type:
        if any(value != per_layer_type[0] for value in per_layer_type):
            reader.fail("rope_parameters differ between layer types, which is not supported")
        rope = per_layer_type[0]
    params = {k: v for k, v in rope.items() if k not in ("rope_type", "type", "rope_theta")}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    theta = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if rope_type not in ROPE_NEEDS:
        known = ", ".join(ROPE_NEEDS)
        reader.fail(f"rope type {rope_type!r} is not supported; known: {known}")
    if (params.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        reader.fail("partial_rotary_factor other than 1 is not supported")
    if rope_type in ("yarn", "llama3"):
        name = "original_max_position_embeddings"
        params[name] = raw.get(name) or params.get(name) or max_positions
    if rope_type == "yarn" and params.get("factor") is None:
        params["factor"] = max_positions / params["original_max_position_embeddings"]
    missing = [name for name in ROPE_NEEDS[rope_type] if params.get(name) is None]
    if missing:
        reader.fail(f"rope type {rope_type!r} needs {missing[0]!r}")
    return RopeSettings(float(theta), rope_type, params)


def _sliding_windows(reader: _Fields, num_layers: int) -> list[int | None]:
    """One window a layer, by the rules of the transformers class of that name."""
    raw, architecture = reader.raw, reader.architecture
    is_qwen = architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM")
    in_use = raw.get("use_sliding_window", not is_qwen) and architecture != "LlamaForCausalLM"
    if raw.get("sliding_window") is None or not in_use:
        return [None] * num_layers
    window = reader.size("sliding_window")
    layer_types = raw.get("layer_types")
    if layer_types and architecture != "MistralForCausalLM":
        unknown = set(layer_types) - {"full_attention", "sliding_attention"}
        if unknown or len(layer_types) != num_layers:
            reader.fail(f"layer_types {sorted(unknown) or len(layer_types)} is not supported")
        return [window if kind == "sliding_attention" else None for kind in layer_types]
    first = raw.get("max_window_layers", 28) if is_qwen else 0
    return [window if layer >= first else None for layer in range(num_layers)]


def _eos_token_ids(*sources: dict[str, Any]) -> list[int]:
    ids: list[int] = []
    for source in sources:
        value = source.get("eos_token_id")
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token not in ids:
                ids.append(token)
    return ids


def _dtype(reader: _Fields) -> str:
    value = reader.raw.get("dtype") or reader.raw.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        reader.fail(f"weights of type {name!r} are not supported; known: {', '.join(DTYPES)}")
    return name
