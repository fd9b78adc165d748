"""The course as a learner's notebooks and files still tell it.

Learners work in the chapters' own notebooks. They duplicate one before they try something, copy a
cell, build an earlier file once more, save a magic half typed. None of that may keep a `%chapter`
from working, so what contradicts the course is passed over here, where `Course.read`, which authors
rely on, says no. This module must not know what the learner's version of a file is used for.
"""

from collections.abc import Collection, Iterator
from pathlib import Path

from nanobook import notebook as nb
from nanobook.chapters import PACKAGE_FOLDERS, package_files
from nanobook.rebuild import Course, notebooks
from nanobook.source import HEADER, CutError, Piece, join, split, symbols_of

_PACKAGES = tuple(f"{folder}/" for folder in PACKAGE_FOLDERS.values())


def read_course(root: Path) -> tuple[Course, dict[str, nb.NotebookError]]:
    """The course below `root`: of every piece the first that stands where it can. And, by their
    stems, the notebooks that cannot be read at all.
    """
    unreadable: dict[str, nb.NotebookError] = {}
    homes: dict[str, str] = {}
    pieces: dict[str, list[Piece]] = {}
    files: dict[str, str] = {}
    placeholders = set()
    packaged = package_files(root)
    paths = notebooks(root)
    for path in paths:
        try:
            notebook = nb.read(path)
        except nb.NotebookError as error:
            unreadable[path.stem] = error
            continue
        if notebook.placeholder:
            placeholders.add(path.stem)
        for one in _directives(notebook):
            if not one.path.startswith(_PACKAGES):
                continue
            built = pieces.get(one.path)
            if one.symbol is None:
                text = notebook.provided.get(one.path, packaged.get(one.path))
                if one.path not in homes and text is not None:
                    homes[one.path], files[one.path] = path.stem, text
            elif one.path not in homes and one.symbol == HEADER:
                homes[one.path], pieces[one.path] = path.stem, [(HEADER, one.body)]
            elif built and homes[one.path] == path.stem and one.symbol not in dict(built):
                built.append((one.symbol, one.body))
    files.update({path: join(parts) for path, parts in pieces.items()})
    symbols = {path: [symbol for symbol, _ in parts] for path, parts in pieces.items()}
    stems = tuple(path.stem for path in paths)
    course = Course(root, stems, frozenset(placeholders), homes, symbols, files, list(homes))
    return course, unreadable


def _directives(notebook: nb.Notebook) -> Iterator[nb.Directive]:
    """Those that can be read, cell by cell."""
    for cell in notebook.cells:
        try:
            yield from nb.directives(nb.Notebook([cell]))
        except nb.NotebookError:
            continue


def cut(text: str, wanted: Collection[str]) -> list[Piece]:
    """A file's pieces at those of the wanted symbols that it has; where somebody has edited it so
    that it cannot be cut at one, the piece above goes on.
    """
    symbols = [HEADER]
    try:
        for symbol in symbols_of(text):
            if symbol in wanted and _cuttable(text, symbol):
                symbols.append(symbol)
        return list(zip(symbols, split(text, symbols), strict=True))
    except (CutError, SyntaxError):
        return [(HEADER, text.rstrip("\n"))]


def _cuttable(text: str, symbol: str) -> bool:
    try:
        return bool(split(text, [HEADER, symbol]))
    except CutError:
        return False
