"""Chapter notebooks as tests: each runs in an empty workspace, and must leave its files there.

A plugin for nbval (`-p nanofixtures.notebooks`). Beside what nbval does (every cell is a test), a
notebook's kernel gets a workspace of its own, and after its last cell the files that the notebook
is home of must lie in that workspace, byte for byte as in the package. This module must not know
what any chapter does.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nanobook.rebuild import Course, notebooks
from nbval.plugin import IPyNbCell, IPyNbFile

# How long nbval waits for output that a finished cell has sent: 5 s is short on a busy machine.
OUTPUT_TIMEOUT = 30

# How an object looks that nobody has given a text for reading.
OBJECT = re.compile(r"<[^<>]* at 0x|<matplotlib|<BarContainer|\bText\(")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Iterator[None]:
    """Have the course's notebooks collected as chapters; others stay what nbval makes of them."""
    collected = yield
    return [
        ChapterFile.from_parent(parent, path=file_path)
        if isinstance(one, IPyNbFile) and file_path in notebooks(file_path.parents[1])
        else one
        for one in collected
    ]


class ChapterFile(IPyNbFile):
    """A chapter's notebook."""

    scratch: Path | None = None

    def setup(self) -> None:
        """Start the kernel, in an empty workspace and without the user's own IPython settings."""
        self.scratch = Path(tempfile.mkdtemp(prefix="nanobook-"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("NANOBOOK_WORKSPACE", str(self.workspace))
            patch.setenv("NANOBOOK_ROOT", str(self.root))
            patch.setenv("IPYTHONDIR", str(self.scratch / "ipython"))
            super().setup()

    @property
    def root(self) -> Path:
        """The course's root."""
        return self.path.parents[1]

    @property
    def workspace(self) -> Path:
        """Where the notebook's cells write."""
        assert self.scratch is not None
        return self.scratch / "workspace"

    def collect(self) -> Iterator[pytest.Item]:
        """The cells, then the looks at what they have left."""
        cells = list(super().collect())
        for cell in cells:
            cell.output_timeout = OUTPUT_TIMEOUT
        yield from cells
        yield StrayValuesItem.from_parent(self, name="no stray values", cells=cells)
        yield FilesItem.from_parent(self, name="files equal the package's")

    def teardown(self) -> None:
        """Stop the kernel and drop the workspace."""
        super().teardown()
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


class LastLook(pytest.Item):
    """A look at what a chapter's cells have left, after the last of them."""

    parent: ChapterFile

    def problems(self) -> Iterator[str]:
        """One line for each thing that is wrong."""
        raise NotImplementedError

    def runtest(self) -> None:
        """Fails with all problems, if there are any."""
        if problems := list(self.problems()):
            pytest.fail("\n".join(problems), pytrace=False)

    def reportinfo(self) -> tuple[os.PathLike[str], int, str]:
        """What pytest prints of it."""
        return self.path, 0, f"{self.path.name}::{self.name}"


class FilesItem(LastLook):
    """The files that the notebook is home of are the package's."""

    def problems(self) -> Iterator[str]:
        """Each file that is absent or differs."""
        for path in Course.read(self.parent.root).of(self.parent.path.stem):
            built, wanted = self.parent.workspace / path, self.parent.root / path
            if not built.is_file():
                yield f"{path}: no cell of this notebook has written it"
            elif built.read_bytes() != wanted.read_bytes():
                yield f"{path}: what the cells have written differs from the package's"


class StrayValuesItem(LastLook):
    """No cell shows an object that nobody wants to read, such as what `ax.bar(...)` returns."""

    def __init__(self, *, cells: list[IPyNbCell], **rest: Any) -> None:
        super().__init__(**rest)
        self.cells = cells

    def problems(self) -> Iterator[str]:
        """Each cell whose last line's value is a bare object, or a list of them."""
        for cell in self.cells:
            for output in cell.test_outputs or []:
                text = output.get("data", {}).get("text/plain", "")
                if output["output_type"] == "execute_result" and OBJECT.search(text):
                    line = cell.cell.source.rstrip().rpartition("\n")[2]
                    yield f"{cell.name} shows {text.strip()[:60]!r}: write '_ = {line.strip()}'"
