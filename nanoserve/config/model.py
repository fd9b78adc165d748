"""Which model is served, where its files are, and in which type it computes."""

from dataclasses import dataclass

from nanoserve.config.arch import ModelArch
from nanoserve.errors import ConfigError

DTYPES = ("auto", "float32", "float16", "bfloat16")


@dataclass
class ModelConfig:
    """One model.

    Attributes:
        model: what the user asked for (Hub id, folder, or the embedded model's name).
        path: local folder with config.json and the weights.
        tokenizer_path: local folder with the tokenizer.
        served_model_name: the names the HTTP API answers to; the first is the one it reports.
        arch: what config.json says.
        dtype: "auto" or a torch dtype's name; "auto" is resolved by the platform in the worker.
        max_model_len: most tokens of prompt and output together.
        load_format: "auto" reads safetensors; "dummy" fills random weights (benchmarks).
        seed: seeds what draws no seed of its own; None draws from the system.
        tokenizer_size: ids the tokenizer knows (highest id + 1); output rows past it are padding
            and never sampled. None takes every row.
    """

    model: str
    path: str
    tokenizer_path: str
    served_model_name: list[str]
    arch: ModelArch
    dtype: str = "auto"
    max_model_len: int = 2048
    load_format: str = "auto"
    seed: int | None = None
    tokenizer_size: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.load_format not in ("auto", "safetensors", "dummy"):
            raise ConfigError(
                f"load_format must be auto, safetensors or dummy, not {self.load_format!r}"
            )
        if self.max_model_len < 2:
            raise ConfigError(
                f"max_model_len must be at least 2 (one prompt token, one output token), "
                f"not {self.max_model_len}"
            )
