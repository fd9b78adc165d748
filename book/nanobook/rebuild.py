"""Both packages from the notebooks alone: which cell holds which file, and the files themselves.

`Course.read` goes through the chapters in order and gathers each file's pieces; nothing but the
notebooks is read, so it works where the packages are absent. This module must not run a cell.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nanobook import notebook as nb
from nanobook.source import HEADER, Piece, join, split

_STEM = re.compile(r"\d\d_[a-z0-9_]+")


class CourseError(ValueError):
    """The notebooks contradict each other; one line that says where."""


def find_root(start: Path | None = None) -> Path:
    """The course's root, the folder that holds chapters/.

    NANOBOOK_ROOT names it; else it is sought upwards from `start` (by default the current folder),
    and else it is where these tools lie.

    Raises:
        CourseError: none of these holds a course.
    """
    if named := os.environ.get("NANOBOOK_ROOT"):
        if not (Path(named) / "chapters").is_dir():
            raise CourseError(f"NANOBOOK_ROOT={named} holds no chapters/")
        return Path(named).resolve()
    here = (start or Path.cwd()).resolve()
    tools = Path(__file__).resolve().parents[2]
    for folder in (here, *here.parents):
        if notebooks(folder):
            return folder
    if (tools / "chapters").is_dir():
        return tools
    raise CourseError("there is no course here: set NANOBOOK_ROOT to the folder with chapters/")


def notebooks(root: Path) -> list[Path]:
    """The chapters' notebooks, in the order of the course. An editor's copies are none of them."""
    found = (root / "chapters").glob("[0-9][0-9]_*.ipynb")
    return sorted(path for path in found if _STEM.fullmatch(path.stem))


def chapter_number(stem: str) -> int:
    """The chapter that a notebook belongs to, by its name."""
    return int(stem[:2])


@dataclass(frozen=True)
class Course:
    """What the notebooks hold.

    Attributes:
        root: the folder that holds chapters/.
        stems: the notebooks' names, in order.
        placeholders: those of them that stand in for an unwritten chapter.
        homes: path of a file -> the notebook that holds it.
        symbols: path of a built file -> its cells' symbols, in order.
        files: path -> text, as the cells make it.
        order: all paths, in the order in which a reader meets them.
    """

    root: Path
    stems: tuple[str, ...]
    placeholders: frozenset[str]
    homes: dict[str, str]
    symbols: dict[str, list[str]]
    files: dict[str, str]
    order: list[str]

    @classmethod
    def read(cls, root: Path) -> "Course":
        """Read every chapter notebook below `root`.

        Raises:
            CourseError: a file has two homes, or its cells are not in order.
            nb.NotebookError: a notebook cannot be read.
        """
        homes: dict[str, str] = {}
        pieces: dict[str, list[Piece]] = {}
        files: dict[str, str] = {}
        placeholders = set()
        paths = notebooks(root)
        for path in paths:
            notebook = nb.read(path)
            if notebook.placeholder:
                placeholders.add(path.stem)
            provided = notebook.provided
            for directive in nb.directives(notebook):
                _claim(homes, pieces, directive, path.stem)
                if directive.symbol is not None:
                    pieces.setdefault(directive.path, []).append((directive.symbol, directive.body))
                else:
                    # Sync fills it in; until then the rebuilt file is empty and differs.
                    files[directive.path] = provided.get(directive.path, "")
        files.update({path: join(parts) for path, parts in pieces.items()})
        symbols = {path: [symbol for symbol, _ in parts] for path, parts in pieces.items()}
        stems = tuple(path.stem for path in paths)
        return cls(root, stems, frozenset(placeholders), homes, symbols, files, list(homes))

    def of(self, stem: str) -> list[str]:
        """The files whose home a notebook is, in cell order."""
        return [path for path in self.order if self.homes[path] == stem]

    def before(self, stem: str) -> list[str]:
        """The files whose home comes before a notebook, in order."""
        return [path for path in self.order if self.homes[path] < stem]

    def pieces(self, path: str) -> list[Piece]:
        """A built file's (symbol, text) pairs, as the cells hold them."""
        symbols = self.symbols[path]
        return list(zip(symbols, split(self.files[path], symbols), strict=True))


def _claim(
    homes: dict[str, str], pieces: dict[str, list[Piece]], directive: nb.Directive, stem: str
) -> None:
    path = directive.path
    if path not in homes:
        if directive.symbol not in (None, HEADER):
            raise CourseError(f"{stem}: the first cell of {path} must be ::{HEADER}")
        homes[path] = stem
        return
    if homes[path] != stem:
        raise CourseError(f"{path} has two homes: {homes[path]} and {stem}")
    if directive.symbol is None or path not in pieces:
        raise CourseError(f"{stem}: {path} is provided, and comes twice")
    if directive.symbol in [symbol for symbol, _ in pieces[path]]:
        raise CourseError(f"{stem}: {path}::{directive.symbol} comes twice")


def write_files(files: Iterable[tuple[str, str]], target: Path) -> None:
    """Write (path, text) pairs below `target`, bytes as they are."""
    for path, text in files:
        file = target / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("utf-8"))
