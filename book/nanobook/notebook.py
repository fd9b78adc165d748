"""Notebooks as files that a person can review: read, normalised, written, always the same way.

Keys are sorted, ids come from what a cell holds, volatile metadata is dropped, and outputs stay
only in cells tagged `keep-output`. Here too is how the course's directives are found in the cells.
This module must not know what the packages contain, nor run a cell.
"""

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEEP_OUTPUT = "keep-output"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}

_BUILD = re.compile(r"%%build\s+(\S+?)::(\S+)\s*$")
_PROVIDE = re.compile(r"%provide\s+(.+?)\s*$")
# Ids that an editor made up: eight or more hex digits, uuids, and counters.
_MADE_UP = re.compile(r"[0-9a-f]{8}(-?[0-9a-f]{4,12})*|cell-\d+|")
_LONGEST_ID = 64


class NotebookError(ValueError):
    """A notebook is not what the course's tools can read; one line that says where and why."""


@dataclass
class Cell:
    """One cell.

    Attributes:
        kind: "code", "markdown" or "raw".
        source: its text.
        id: unique in the notebook.
        tags: Jupyter's cell tags.
        nanobook: what these tools keep about it (`exercise`: the id of the exercise it holds).
        outputs: nbformat outputs, if they are kept.
    """

    kind: str
    source: str
    id: str = ""
    tags: list[str] = field(default_factory=list)
    nanobook: dict[str, Any] = field(default_factory=dict)
    outputs: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Notebook:
    """A notebook's cells, and what these tools keep in its metadata (`provided`, `placeholder`)."""

    cells: list[Cell]
    nanobook: dict[str, Any] = field(default_factory=dict)

    @property
    def placeholder(self) -> bool:
        """Whether it only stands in for a chapter that is not written yet."""
        return bool(self.nanobook.get("placeholder", False))

    @property
    def provided(self) -> dict[str, str]:
        """Path -> text of the files whose bytes travel in the metadata."""
        return {path: "".join(lines) for path, lines in self.nanobook.get("provided", {}).items()}


@dataclass(frozen=True)
class Directive:
    """A cell, or a line of one, that says where a file's text comes from.

    Attributes:
        kind: "build" or "provide".
        path: the file, from the course's root.
        symbol: which piece of it; None for "provide".
        body: the cell's text below the magic; empty for "provide".
        cell_index: its cell.
    """

    kind: str
    path: str
    symbol: str | None
    body: str
    cell_index: int


def read(path: Path) -> Notebook:
    """Read a notebook. Raises NotebookError if it is not one."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        cells = [_read_cell(cell) for cell in data["cells"]]
        nanobook = data.get("metadata", {}).get("nanobook", {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotebookError(f"{path.name} is not a notebook: {error!r}") from error
    return Notebook(cells, nanobook)


def _read_cell(data: dict[str, Any]) -> Cell:
    metadata = data.get("metadata", {})
    return Cell(
        data["cell_type"],
        "".join(data["source"]),
        data.get("id", ""),
        list(metadata.get("tags", [])),
        dict(metadata.get("nanobook", {})),
        list(data.get("outputs", [])),
    )


def dumps(notebook: Notebook) -> str:
    """The notebook's file: the same text for the same content, whoever writes it."""
    ids = cell_ids(notebook)
    cells = [
        _cell_data(cell, cell_id, ordinal)
        for (cell, cell_id), ordinal in zip(
            zip(notebook.cells, ids, strict=True), _ordinals(notebook), strict=True
        )
    ]
    metadata: dict[str, Any] = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    if notebook.nanobook:
        metadata["nanobook"] = notebook.nanobook
    data = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def write(path: Path, notebook: Notebook) -> bool:
    """Write a notebook in its normal form; True if the file changed."""
    text = dumps(notebook)
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    path.write_text(text, encoding="utf-8")
    return True


def _ordinals(notebook: Notebook) -> list[int]:
    """Each cell's number among the code cells, from 1: its execution count when all are run."""
    count, numbers = 0, []
    for cell in notebook.cells:
        count += cell.kind == "code"
        numbers.append(count)
    return numbers


def _cell_data(cell: Cell, cell_id: str, ordinal: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if cell.tags:
        metadata["tags"] = sorted(set(cell.tags))
    if cell.nanobook:
        metadata["nanobook"] = cell.nanobook
    source = cell.source.rstrip("\n").splitlines(keepends=True)
    data: dict[str, Any] = {
        "cell_type": cell.kind,
        "id": cell_id,
        "metadata": metadata,
        "source": source,
    }
    if cell.kind == "code":
        outputs = cell.outputs if KEEP_OUTPUT in cell.tags else []
        data["outputs"] = [_clean_output(output, ordinal) for output in outputs]
        data["execution_count"] = ordinal if outputs else None
    return data


def _clean_output(output: dict[str, Any], ordinal: int) -> dict[str, Any]:
    clean = {key: value for key, value in output.items() if key != "metadata"}
    if output.get("output_type") in ("display_data", "execute_result"):
        clean["metadata"] = {}
    if output.get("output_type") == "execute_result":
        clean["execution_count"] = ordinal
    return clean


def cell_ids(notebook: Notebook) -> list[str]:
    """An id for each cell: from path and symbol for a build cell, an author's own where there is
    one, else from the cell's first words.
    """
    taken: set[str] = set()
    ids = []
    for cell in notebook.cells:
        wanted = _wanted_id(cell)
        unique, copy = wanted, 2
        while unique in taken:
            unique, copy = f"{wanted[: _LONGEST_ID - 4]}-{copy}", copy + 1
        taken.add(unique)
        ids.append(unique)
    return ids


def _wanted_id(cell: Cell) -> str:
    first = cell.source.lstrip().partition("\n")[0]
    if cell.kind == "code" and (match := _BUILD.match(first)):
        path, symbol = match.groups()
        module = path.removesuffix(".py").removeprefix("kernels/").removeprefix("nanoserve/")
        return _slug(f"build-{module}-{symbol}")
    if not _MADE_UP.fullmatch(cell.id):
        return cell.id[:_LONGEST_ID]
    words = re.findall(r"[A-Za-z0-9]+", first)[:6]
    return _slug("-".join(["text" if cell.kind == "markdown" else "code", *words]))


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:_LONGEST_ID].strip("-")


def directives(notebook: Notebook) -> list[Directive]:
    """The build and provide directives, in cell order.

    Raises:
        NotebookError: a directive stands where the tools would not see all of it.
    """
    found = []
    for index, cell in enumerate(notebook.cells):
        if cell.kind != "code":
            continue
        lines = cell.source.rstrip("\n").split("\n")
        if lines[0].startswith("%%build"):
            match = _BUILD.match(lines[0])
            if match is None:
                raise NotebookError(f"not of the form '%%build path.py::Symbol': {lines[0]!r}")
            body = "\n".join(lines[1:]).rstrip("\n")
            found.append(Directive("build", match[1], match[2], body, index))
            continue
        for line in lines:
            if match := _PROVIDE.match(line):
                found += [Directive("provide", path, None, "", index) for path in match[1].split()]
    return found
