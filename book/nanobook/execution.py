"""Running a notebook from first to last cell, and keeping what came out until anything changes.

The outputs of a notebook depend on its cells, on the packages that they call, on the exercises, on
the recorded data and on the versions of what lies below: all of that is in the key under which an
executed copy is kept. This module must not know what becomes of the copies.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import nbformat

CELL_TIMEOUT = 300  # seconds

# Whatever a cell can call or read, beside the notebook itself.
_INPUTS = ("nanoserve", "kernels", "book/nanobook", "book/data", "exercises")
_DEPENDENCIES = (
    "ipykernel",
    "ipywidgets",
    "matplotlib",
    "numpy",
    "torch",
    "transformers",
    "triton",
)
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


class ExecutionError(RuntimeError):
    """A cell has failed; the message names it and ends with its traceback."""


def fingerprint(root: Path, names: Sequence[str] = _INPUTS) -> str:
    """A hash over everything that a notebook below `root` can call or read.

    Compiled and hidden files are left out; file names count as contents do.
    """
    digest = hashlib.sha256()
    for name in names:
        for file in sorted((root / name).rglob("*")):
            parts = file.relative_to(root).parts
            if file.is_file() and not any(p[0] == "." or p == "__pycache__" for p in parts):
                _add(digest, "/".join(parts).encode(), file.read_bytes())
    _add(digest, sys.version.encode())
    for name in _DEPENDENCIES:
        _add(digest, f"{name} {_version(name)}".encode())
    return digest.hexdigest()


def _add(digest: "hashlib._Hash", *parts: bytes) -> None:
    for part in parts:  # with its length, so that moving a byte over a border is a change
        digest.update(len(part).to_bytes(8, "big") + part)


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


# While OpenMP's idle threads spin, two processes that compute slow each other twenty times over.
CALM_THREADS = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "10000"}


class Executed:
    """Executed copies of notebooks, below one folder.

    Args:
        root: the course's root.
        folder: where the copies are kept; made when needed.
    """

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self._rest = fingerprint(root)

    def find(self, notebook: Path) -> Path | None:
        """The copy, if one was made from just this notebook and just these packages."""
        copy = self._copy(notebook)
        return copy if copy.is_file() else None

    def make(self, notebook: Path) -> Path:
        """Run a notebook and keep the copy; older copies of it go.

        Raises:
            ExecutionError: a cell has failed; nothing is kept.
        """
        text = execute(notebook, self.root)
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(f"{notebook.stem}.*.ipynb"):
            old.unlink()
        copy = self._copy(notebook)
        copy.write_text(text, encoding="utf-8")
        return copy

    def _copy(self, notebook: Path) -> Path:
        digest = hashlib.sha256(self._rest.encode())
        _add(digest, notebook.name.encode(), notebook.read_bytes())
        return self.folder / f"{notebook.stem}.{digest.hexdigest()[:16]}.ipynb"


def execute(notebook: Path, root: Path) -> str:
    """The notebook as JSON text, with the outputs of a run in a fresh kernel and workspace.

    Raises:
        ExecutionError: a cell has failed or took longer than CELL_TIMEOUT.
    """
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    content = nbformat.read(notebook, as_version=4)
    with tempfile.TemporaryDirectory(prefix="nanobook-") as scratch:
        environment = {
            **CALM_THREADS,
            **os.environ,
            "NANOBOOK_STATIC": "1",
            "NANOBOOK_ROOT": str(root),
            "NANOBOOK_WORKSPACE": str(Path(scratch, "workspace")),
            "IPYTHONDIR": str(Path(scratch, "ipython")),
        }
        client = NotebookClient(
            content,
            km=_kernel_manager(),
            timeout=CELL_TIMEOUT,
            coalesce_streams=True,
            record_timing=False,
            resources={"metadata": {"path": str(notebook.parent)}},
        )
        try:
            # What cells print comes back as outputs; the rest is the kernel talking about itself.
            client.execute(env=environment, cleanup_kc=True, stderr=subprocess.DEVNULL)
        except CellExecutionError as error:
            # Told from what the cell holds now: the error itself does not know the cell's id.
            raise ExecutionError(f"{notebook.name}, {_failure(content)}") from error
        except (CellTimeoutError, DeadKernelError) as error:
            raise ExecutionError(f"{notebook.name}: {error}") from error
    return nbformat.writes(content)


def _kernel_manager() -> Any:
    """For the kernel of this very interpreter, whatever kernels the user has registered."""
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    return AsyncKernelManager(
        kernel_name="python3", kernel_spec_manager=KernelSpecManager(kernel_dirs=[])
    )


def _failure(content: "nbformat.NotebookNode") -> str:
    """The last cell that has raised without being meant to, and its traceback."""
    failures = [
        (cell.id, output.traceback)
        for cell in content.cells
        if "raises-exception" not in cell.metadata.get("tags", [])
        for output in cell.get("outputs", [])
        if output.output_type == "error"
    ]
    cell_id, traceback = failures[-1]
    return _ANSI.sub("", "\n".join([f"cell {cell_id}:", *traceback]))
