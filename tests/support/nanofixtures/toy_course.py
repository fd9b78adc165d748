"""A course of two chapters and two toy packages, and real IPython shells that run its cells.

Each shell is a process of its own: what the cells do to `sys.modules`, to Triton and to the
environment must not reach the tests' process, and a second shell is what a restarted kernel is.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanobook import notebook as nb

HELPER = '''\
"""Boxes."""

from __future__ import annotations

SCALE = 2


def grow(x: int) -> Never:
    return x * SCALE


class Box:
    """Holds a number."""

    def __init__(self, x):
        self.x = x

    def grown(self):
        return grow(self.x)
'''
USER = '''\
"""Uses boxes."""

from nanoserve.helper import Box, grow


def twice(x):
    return Box(grow(x))
'''
KERN = '''\
"""Kernels."""

import torch
import triton
import triton.language as tl


@triton.jit
def scaled(x):
    return x * 2


@triton.jit
def kernel(x_ptr, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(x_ptr + offsets, scaled(tl.load(x_ptr + offsets)))


def launch():
    x = torch.ones(4)
    kernel[(1,)](x, 4)
    return x.tolist()
'''
CALLER = '''\
"""Another module's kernel."""

import torch
import triton
import triton.language as tl

from nanokernels.kern import scaled


@triton.jit
def outer(x_ptr, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(x_ptr + offsets, scaled(tl.load(x_ptr + offsets)) + 1)


def call():
    x = torch.ones(4)
    outer[(1,)](x, 4)
    return x.tolist()
'''

# Path -> text; and path -> its cells' symbols, for the files that are built.
FILES = {
    "nanoserve/__init__.py": '"""Toy."""\n',
    "nanoserve/py.typed": "",
    "nanoserve/helper.py": HELPER,
    "kernels/nanokernels/__init__.py": '"""Toy kernels."""\n',
    "kernels/nanokernels/kern.py": KERN,
    "nanoserve/user.py": USER,
    "nanoserve/table.py": '"""A table."""\n\nROWS = 3\n',
    "kernels/nanokernels/caller.py": CALLER,
    "nanoserve/server/__init__.py": '"""Serves."""\n',
}
NOTEBOOKS: dict[str, list[str]] = {
    "00_1_base": [
        "%provide nanoserve/__init__.py nanoserve/py.typed",
        "%%build nanoserve/helper.py::header",
        "%%build nanoserve/helper.py::grow",
        "%%build nanoserve/helper.py::Box",
        "%%build nanoserve/helper.py::Box.grown",
    ],
    "00_2_kernels": [
        "%%build kernels/nanokernels/__init__.py::header",
        "%%build kernels/nanokernels/kern.py::header",
        "%%build kernels/nanokernels/kern.py::scaled",
        "%%build kernels/nanokernels/kern.py::kernel",
        "%%build kernels/nanokernels/kern.py::launch",
    ],
    "01_user": [
        "%%build nanoserve/user.py::header",
        "%%build nanoserve/user.py::twice",
        "%provide nanoserve/table.py",
        "%%build kernels/nanokernels/caller.py::header",
        "%%build kernels/nanokernels/caller.py::outer",
        "%%build kernels/nanokernels/caller.py::call",
    ],
    "04_serve": ["%provide nanoserve/server/__init__.py"],
}


def write_course(root: Path, with_packages: bool = True) -> Path:
    """Write the toy course below `root`; 04_serve is a placeholder."""
    from nanobook.rebuild import write_files
    from nanobook.sync import fill

    (root / "chapters").mkdir(parents=True)
    for stem, firsts in NOTEBOOKS.items():
        start = nb.Cell("code", f"%load_ext nanobook\n%chapter {stem}", "chapter")
        notebook = nb.Notebook([start, *(nb.Cell("code", first) for first in firsts)])
        assert fill(notebook, FILES) == []
        if stem == "04_serve":
            notebook.nanobook["placeholder"] = True
        nb.write(root / "chapters" / f"{stem}.ipynb", notebook)
    if with_packages:
        write_files(FILES.items(), root)
    return root


def copy_course(root: Path, repository: Path) -> Path:
    """The real course, below `root`. Files that no notebook holds yet are provided, each at the
    end of its chapter.
    """
    from nanobook.chapters import load_map, package_files
    from nanobook.rebuild import Course
    from nanobook.sync import fill

    root.mkdir()
    shutil.copytree(repository / "chapters", root / "chapters")
    for name in ("nanoserve", "kernels", "exercises"):
        (root / name).symlink_to(repository / name)
    files, course_map = package_files(repository), load_map()
    rest: dict[str, list[str]] = {}
    for path in sorted(files.keys() - Course.read(root).homes.keys()):
        owner = course_map.owner(path)
        number = owner.number if owner else 0  # in time for whoever needs it
        rest.setdefault(f"{number:02}_z_rest", []).append(path)
    for stem, paths in rest.items():
        notebook = nb.Notebook([nb.Cell("code", f"%provide {' '.join(paths)}")])
        fill(notebook, files)
        nb.write(root / "chapters" / f"{stem}.ipynb", notebook)
    return root


def cells(root: Path, stem: str) -> list[str]:
    """The code cells of a notebook."""
    notebook = nb.read(root / "chapters" / f"{stem}.ipynb")
    return [cell.source for cell in notebook.cells if cell.kind == "code"]


@dataclass
class Ran:
    """What one cell did.

    Attributes:
        out: what it printed; a value's repr with it.
        error: "Kind: message" and the notes, or "".
        shown: the traceback that the reader sees.
    """

    out: str
    error: str
    shown: str = field(repr=False)


SHELL = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

class Shell(InteractiveShell):
    def _showtraceback(self, kind, value, lines):
        self.shown = "\\n".join(lines)

shell = Shell.instance(colors="nocolor")
results = []
for cell in json.load(sys.stdin):
    shell.shown = ""
    with capture_output() as captured:
        result = shell.run_cell(cell, store_history=True)
    error = result.error_before_exec or result.error_in_exec
    said = "" if error is None else "\\n".join(
        [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", [])]
    )
    out = captured.stdout + captured.stderr
    results.append([out, said, re.sub("\\x1b\\\\[[0-9;]*m", "", shell.shown)])
sys.stdout.write("\\x00" + json.dumps(results))
"""


class Toy:
    """A toy course, its workspace, and shells to run cells in."""

    def __init__(self, root: Path, workspace: Path, **environment: str) -> None:
        self.root, self.workspace, self.environment = root, workspace, environment

    def env(self) -> dict[str, str]:
        """The environment of a kernel that belongs to this course."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("NANOBOOK", "PYTHONPATH"))}
        return {
            **kept,
            "NANOBOOK_ROOT": str(self.root),
            "NANOBOOK_WORKSPACE": str(self.workspace),
            "TRITON_INTERPRET": "1",
            "IPYTHONDIR": str(self.workspace.parent / "ipython"),
            **self.environment,
        }

    def run(self, *sources: str, cwd: Path | None = None) -> list[Ran]:
        """Run cells in a fresh shell, with the commands loaded."""
        done = subprocess.run(
            [sys.executable, "-P", "-c", SHELL],
            input=json.dumps(["%load_ext nanobook", *sources]),
            env=self.env(),
            cwd=cwd or self.root,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        results: list[Any] = json.loads(done.stdout.rpartition("\0")[2])
        return [Ran(*result) for result in results[1:]]

    def good(self, *sources: str, cwd: Path | None = None) -> list[Ran]:
        """The same, and no cell may fail."""
        results = self.run(*sources, cwd=cwd)
        for source, ran in zip(sources, results, strict=True):
            assert not ran.error, f"{source}\n{ran.error}\n{ran.shown}"
        return results

    def cells(self, stem: str) -> list[str]:
        """A notebook's code cells, without the one that loads the commands."""
        return [f"%chapter {stem}", *cells(self.root, stem)[1:]]

    def text(self, path: str) -> str:
        """A file of the workspace."""
        return (self.workspace / path).read_text(encoding="utf-8")

    def has(self, path: str) -> bool:
        """Whether the workspace shows a file."""
        return (self.workspace / path).is_file()
