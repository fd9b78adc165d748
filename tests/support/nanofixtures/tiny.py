"""TINY: a random model with the true architecture, small enough to run in every test.

2 layers, 4 query and 2 KV heads of 16, hidden size 64, 512 tokens, fp32. The weights are drawn by
the transformers class with a fixed seed and spread wide, norms and biases too, so that a weight
that is forgotten, or a position that is off by one, changes the argmax and not only the last bits.
"""

from pathlib import Path
from typing import Any

import torch

from nanofixtures.bytes_tokenizer import END_OF_TEXT, TURN_END, write_bytes_tokenizer

INITIALIZER_RANGE = 0.2

ROPE_VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 4.0,
        "beta_slow": 1.0,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def tiny_config(arch: str = "LlamaForCausalLM", **overrides: Any) -> Any:
    """The transformers config of a TINY of this architecture; overrides replace its fields."""
    import transformers

    values: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 2048,
        "initializer_range": INITIALIZER_RANGE,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": TURN_END,
        "pad_token_id": END_OF_TEXT,
    }
    if arch == "Qwen2ForCausalLM":
        del values["head_dim"]  # Qwen2 has none of its own: hidden_size / heads
    if arch == "MistralForCausalLM":
        values["sliding_window"] = None
    values |= overrides
    return getattr(transformers, arch.replace("ForCausalLM", "Config"))(**values)


def tiny_reference(arch: str = "LlamaForCausalLM", seed: int = 0, **overrides: Any) -> Any:
    """The transformers model itself (eager attention, fp32, eval): the oracle for a TINY."""
    import transformers

    config = tiny_config(arch, **overrides)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, arch)(config).float().eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if "norm" in name:
                    weight.copy_(1.0 + 0.2 * torch.randn_like(weight))
                elif name.endswith("bias"):
                    weight.copy_(0.2 * torch.randn_like(weight))
    model.generation_config.do_sample = False
    return model


def make_tiny(
    folder: str | Path,
    arch: str = "LlamaForCausalLM",
    seed: int = 0,
    *,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a TINY (configs, weights, byte-level tokenizer) and return its folder.

    Args:
        arch: the transformers class, for example "Qwen3ForCausalLM".
        seed: of the weights.
        dtype: the type the weights are stored in.
        max_shard_size: "100KB" gives a sharded checkpoint.
        overrides: fields of the transformers config.
    """
    folder = Path(folder)
    model = tiny_reference(arch, seed, **overrides).to(getattr(torch, dtype))
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    write_bytes_tokenizer(folder, size=model.config.vocab_size)
    return folder
