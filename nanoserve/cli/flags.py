"""The engine's settings as command-line flags: one a field of EngineArgs, with vLLM's spelling.

The flags are made from the fields, so that a new setting cannot be forgotten here: a field without
a line in HELP fails the tests. Imports no torch.
"""

import argparse
import dataclasses
from typing import Any

from nanoserve import envs
from nanoserve.cli.numbers import human_int
from nanoserve.config.args import EngineArgs

HELP = {
    "model": "Hub id or folder of the model; the embedded SmolLM2-135M-Instruct if left out",
    "tokenizer": "Hub id or folder of another tokenizer",
    "revision": "branch, tag or commit of a Hub model",
    "served_model_name": "name or names the API answers to; the first is reported",
    "dtype": "type to compute in",
    "max_model_len": "most tokens of prompt and output together; 8k is 8000, 8K is 8192",
    "load_format": "how weights come: from safetensors, or random (dummy)",
    "seed": "seeds requests that bring no seed of their own",
    "block_size": "tokens a KV cache block holds",
    "kv_cache_memory": "memory for the KV cache in bytes, or as 4GiB",
    "num_gpu_blocks_override": "exact number of KV cache blocks",
    "gpu_memory_utilization": "share of the GPU's memory the engine may use",
    "enable_prefix_caching": "let requests that begin alike share KV blocks",
    "prefix_caching_hash_algo": "what names a block; xxhash only among trusted users",
    "max_num_seqs": "most requests running at once",
    "max_num_batched_tokens": "most tokens computed in one step",
    "enable_chunked_prefill": "let a prompt be computed over several steps",
    "long_prefill_token_threshold": "most tokens of one request in one step; 0 is no limit",
    "scheduling_policy": "first come first served, or lowest priority value first",
    "device": "where to compute",
    "attention_backend": "registry name of the attention backend; the platform chooses if left out",
}
_CHOICES = {
    "dtype": ("auto", "float32", "float16", "bfloat16"),
    "load_format": ("auto", "safetensors", "dummy"),
    "scheduling_policy": ("fcfs", "priority"),
    "prefix_caching_hash_algo": ("sha256", "xxhash"),
    "device": ("auto", "cpu", "cuda"),
}
_HUMAN = {"max_model_len", "kv_cache_memory", "max_num_batched_tokens"}
_ALIASES = {"kv_cache_memory": ["--kv-cache-memory-bytes"]}
LOG_LEVELS = ("debug", "info", "warning", "error")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add a flag for every engine setting."""
    group = parser.add_argument_group("engine")
    for field in dataclasses.fields(EngineArgs):
        options = ["--" + field.name.replace("_", "-"), *_ALIASES.get(field.name, [])]
        # A flag that is not given stays out of the namespace, so that EngineArgs' default holds.
        group.add_argument(*options, **_kind(field), help=_help(field), default=argparse.SUPPRESS)


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add --log-level."""
    parser.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        type=str.lower,
        default=str(envs.get("NANOSERVE_LOG_LEVEL")).lower(),
        help="level of messages on stderr; debug shows the traces of errors (default: %(default)s)",
    )


def engine_args(namespace: argparse.Namespace) -> EngineArgs:
    """The engine settings among the parsed arguments."""
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    return EngineArgs(**{k: v for k, v in vars(namespace).items() if k in names})


def _kind(field: dataclasses.Field[Any]) -> dict[str, Any]:
    text = str(field.type)
    if text == "<class 'bool'>":
        return {"action": argparse.BooleanOptionalAction}
    if "list[str]" in text:
        return {"nargs": "+", "metavar": "NAME"}
    if field.name in _CHOICES:
        return {"choices": _CHOICES[field.name]}
    if "int" in text:
        return {"type": _whole_number if field.name in _HUMAN else int, "metavar": "N"}
    if "float" in text:
        return {"type": float, "metavar": "X"}
    return {"metavar": field.name.rsplit("_", 1)[-1].upper()}


def _whole_number(text: str) -> int:
    try:
        return human_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _help(field: dataclasses.Field[Any]) -> str:
    text = HELP[field.name]
    if field.default in (None, dataclasses.MISSING):
        return text
    return f"{text} (default: {field.default})"
