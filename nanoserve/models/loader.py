"""From a folder to a model ready to run: find the class, make it empty, stream the weights in.

Only safetensors files are read: pickle files can run code. Tensors come one at a time and are cast
straight into the model's memory, so that loading never holds the weights twice.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from nanoserve.config.model import ModelConfig
from nanoserve.errors import ModelLoadError
from nanoserve.forward import AttentionBackend
from nanoserve.layers.group import ParallelGroup, SingleRank
from nanoserve.models.registry import MODELS

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
DUMMY_STD = 0.02

Progress = Callable[[str], None]


def load_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    backend: AttentionBackend,
    group: ParallelGroup | None = None,
    progress: Progress | None = None,
) -> nn.Module:
    """Build the model that `config.arch` names and fill it.

    Args:
        dtype, device: what the weights are cast to and where they lie.
        backend: the attention backend all layers will call.
        group: the ranks the weights are split over; by default this process alone.
        progress: told, in words, how far loading has come.

    Returns:
        The model, in inference state (see `nanoserve.models.registry` for its surface).

    Raises:
        ModelLoadError: the architecture is unknown, or the weights are missing, unreadable, or do
            not fit it; one line.
    """
    try:
        model_class = MODELS.load(config.arch.architecture)
    except KeyError as error:
        raise ModelLoadError(f"{config.path}: {error.args[0]}") from error
    # Missing files are found before the time is spent to allocate the model.
    files = [] if config.load_format == "dummy" else find_weight_files(config.path)
    with _defaults(dtype, device):
        model = model_class(config.arch, backend, group or SingleRank())
    if config.load_format == "dummy":
        fill_with_random_weights(model, seed=0)
    else:
        try:
            model.load_weights(iterate_weights(files, progress))
        except ModelLoadError as error:
            raise ModelLoadError(f"{config.path}: {error}") from error
    for module in model.modules():
        process = getattr(module, "process_weights_after_loading", None)
        if process is not None:
            process()
    return model.eval().requires_grad_(False)


@contextmanager
def _defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """New tensors get this type and place inside the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def find_weight_files(folder: str | Path) -> list[Path]:
    """The safetensors files of a model folder, single or sharded.

    Raises:
        ModelLoadError: none there, or a shard that the index names is missing.
    """
    folder = Path(folder)
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(
                set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ModelLoadError(f"{index} is not a usable index: {error!r}") from error
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelLoadError(
                f"{folder} lacks {missing[0]!r}, one of the {len(names)} weight files that "
                f"{INDEX_FILE} names"
            )
        return [folder / name for name in names]
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise ModelLoadError(
            f"{folder} has its weights only as {pickles[0]!r}, a pickle file that could run code: "
            f"convert it to {SINGLE_FILE}"
        )
    raise ModelLoadError(f"{folder} has no weights ({SINGLE_FILE} or {INDEX_FILE})")


def iterate_weights(
    files: list[Path], progress: Progress | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the CPU) of every tensor in the files, one at a time.

    Raises:
        ModelLoadError: a file is damaged, or holds tensors of a type that is no plain float.
    """
    for done, path in enumerate(files):
        if progress is not None:
            progress(f"loading weights, file {done + 1} of {len(files)}")
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                for name in file.keys():  # noqa: SIM118 (a safetensors file is no mapping)
                    tensor = file.get_tensor(name)
                    if tensor.dtype not in WEIGHT_DTYPES:
                        raise ModelLoadError(
                            f"weight {name!r} is {str(tensor.dtype).removeprefix('torch.')}; only "
                            f"float32, float16 and bfloat16 weights are supported"
                        )
                    yield name, tensor
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path.name} cannot be read: {error}") from error


def fill_with_random_weights(model: nn.Module, seed: int) -> None:
    """Seeded small weights, for measuring speed without a checkpoint. Norms stay at one."""
    generators: dict[torch.device, torch.Generator] = {}
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1.0)
            continue
        device = parameter.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        parameter.data.normal_(0.0, DUMMY_STD, generator=generators[device])
