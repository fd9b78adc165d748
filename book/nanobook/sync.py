"""Bring the notebooks in line with the packages, and say where they are not.

The `.py` files are what people edit; `sync` rewrites the cells that carry them, fills in the files
that travel as metadata, and makes a placeholder notebook for each chapter that is not written yet.
`check` changes nothing and lists every difference. This module works on text: it must not import
the packages or run a cell.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanobook import notebook as nb
from nanobook.chapters import Chapter, CourseMap, module_name, package_files
from nanobook.rebuild import Course, CourseError, chapter_number, notebooks
from nanobook.source import CutError, split

MAX_CELL_LINES = 66
"""A build cell is read in one go; this leaves room for a long docstring."""

MIN_BUILT_SHARE = 0.6
"""Of a written chapter's counted lines, how many must stand in cells."""

_DIFF_LINES = 30


def sync(root: Path, course_map: CourseMap) -> tuple[list[str], list[str]]:
    """Rewrite the notebooks below `root` from the packages.

    Returns:
        (names of the files that changed, problems that keep a notebook from being filled).
    """
    files = package_files(root)
    changed, problems = _sync_placeholders(root, course_map, files), []
    for path in [*notebooks(root), *exercise_notebooks(root)]:
        try:
            notebook = nb.read(path)
            problems += [f"{path.name}: {problem}" for problem in fill(notebook, files)]
        except nb.NotebookError as error:
            problems.append(f"{path.name}: {error}")
            continue
        if nb.write(path, notebook):
            changed.append(path.relative_to(root).as_posix())
    return changed, problems


def exercise_notebooks(root: Path) -> list[Path]:
    """The exercises' notebooks, in order."""
    return sorted((root / "exercises").glob("[0-9][0-9]_*.ipynb"))


def fill(notebook: nb.Notebook, files: dict[str, str]) -> list[str]:
    """Put the packages' text into a notebook's cells and metadata; what could not be, in words."""
    problems: list[str] = []
    found = nb.directives(notebook)
    built: dict[str, list[nb.Directive]] = {}
    provided: dict[str, list[str]] = {}
    for directive in found:
        if directive.path not in files:
            problems.append(f"{directive.path}: there is no such file in the packages")
        elif directive.symbol is None:
            provided[directive.path] = files[directive.path].splitlines(keepends=True)
        else:
            built.setdefault(directive.path, []).append(directive)
    for path, cells in built.items():
        try:
            pieces = split(files[path], [str(cell.symbol) for cell in cells])
        except CutError as error:
            problems.append(f"{path}: {error}")
            continue
        for cell, piece in zip(cells, pieces, strict=True):
            magic = f"%%build {path}::{cell.symbol}"
            notebook.cells[cell.cell_index].source = f"{magic}\n{piece}"
    if provided:
        notebook.nanobook["provided"] = provided
    else:
        notebook.nanobook.pop("provided", None)
    return problems


def _sync_placeholders(root: Path, course_map: CourseMap, files: dict[str, str]) -> list[str]:
    """Make, refresh or remove the placeholders; the names of the files that changed."""
    changed = []
    wanted = {}
    for chapter in course_map.chapters:
        owned = [path for path in files if course_map.owner(path) == chapter]
        if owned and not chapter.written:
            wanted[f"{chapter.number:02}_{chapter.name}"] = _placeholder(chapter, owned)
    for path in notebooks(root):
        if path.stem not in wanted and _is_placeholder(path):
            path.unlink()
            changed.append(path.relative_to(root).as_posix())
    for stem, notebook in wanted.items():
        fill(notebook, files)
        path = root / "chapters" / f"{stem}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        if nb.write(path, notebook):
            changed.append(path.relative_to(root).as_posix())
    return changed


def _is_placeholder(path: Path) -> bool:
    try:
        return nb.read(path).placeholder
    except nb.NotebookError:
        return False


def _placeholder(chapter: Chapter, paths: list[str]) -> nb.Notebook:
    """A notebook that only provides a chapter's files. `__init__` files come first."""
    inits = [path for path in paths if module_name(path) is None]
    modules = [path for path in paths if module_name(path) is not None]
    lines = "\n".join(f"%provide {path}" for path in [*inits, *modules])
    text = (
        f"# {chapter.number} · {chapter.title}\n\n*{chapter.idea}*\n\n"
        "This chapter is not written yet. Its modules exist, and work: this notebook provides them "
        "as they stand, so that the chapters after it can be read and the packages can be rebuilt."
    )
    return nb.Notebook(
        [
            nb.Cell("markdown", text, id="not-written-yet"),
            nb.Cell("code", f"%load_ext nanobook\n%chapter {chapter.number:02}", id="chapter"),
            nb.Cell("code", lines, id="provide"),
        ],
        {"placeholder": True},
    )


@dataclass(frozen=True)
class Shares:
    """How a chapter's counted lines reach a reader.

    Attributes:
        built, provided, placeholder: lines in build cells, provided in a written chapter, and
            provided by a placeholder.
    """

    built: int
    provided: int
    placeholder: int

    @property
    def total(self) -> int:
        """All counted lines."""
        return self.built + self.provided + self.placeholder

    @property
    def built_share(self) -> float:
        """Built lines over all; 1 if there is none to count."""
        return self.built / self.total if self.total else 1.0

    def __str__(self) -> str:
        def percent(lines: int) -> str:
            return f"{lines / self.total if self.total else 0:4.0%} ({lines} lines)"

        return (
            f"built {percent(self.built)}, provided {percent(self.provided)}, "
            f"placeholder {percent(self.placeholder)}"
        )


def shares(course: Course, course_map: CourseMap) -> dict[int, Shares]:
    """Chapter number -> its shares, without the lines that the map leaves out of the count."""
    counts: dict[int, list[int]] = {chapter.number: [0, 0, 0] for chapter in course_map.chapters}
    for path, text in course.files.items():
        home = course.homes[path]
        number = chapter_number(home)
        if number in counts and course_map.counted(path):
            kind = 0 if path in course.symbols else 2 if home in course.placeholders else 1
            counts[number][kind] += len(text.splitlines())
    return {number: Shares(*lines) for number, lines in counts.items()}


def total_shares(by_chapter: dict[int, Shares]) -> Shares:
    """All chapters' shares together."""
    return Shares(
        sum(one.built for one in by_chapter.values()),
        sum(one.provided for one in by_chapter.values()),
        sum(one.placeholder for one in by_chapter.values()),
    )


def check(root: Path, course_map: CourseMap) -> list[str]:
    """Everything that keeps the notebooks from being the packages, in words; empty if nothing."""
    try:
        course = Course.read(root)
    except (CourseError, nb.NotebookError) as error:
        return [str(error)]
    files = package_files(root)
    if not files:
        return [f"the packages are not in {root}: there is nothing to compare the notebooks with"]
    return [
        *_homeless(course, course_map, files),
        *_misplaced(course, course_map),
        *_drift(course, files),
        *_unwritten(course, course_map),
        *_cells(root),
        *_thin(course, course_map),
    ]


def _homeless(course: Course, course_map: CourseMap, files: dict[str, str]) -> Iterator[str]:
    for path in sorted(files.keys() - course.homes.keys()):
        owner = course_map.owner(path)
        if owner is None:
            yield f"{path} belongs to no chapter of chapters.toml"
        elif owner.written:
            build = f"build it (%%build {path}::header) or " if path.endswith(".py") else ""
            yield (
                f"{path} has no cell: chapter {owner.number} ({owner.name}) must {build}provide it "
                f"(%provide {path})"
            )
        else:
            yield f"{path} is not in the placeholder of chapter {owner.number}: nanobook sync"
    for path in sorted(course.homes.keys() - files.keys()):
        yield f"{course.homes[path]} holds {path}, but the packages do not"


def _misplaced(course: Course, course_map: CourseMap) -> Iterator[str]:
    for path, home in course.homes.items():
        owner = course_map.owner(path)
        if owner is None:
            continue
        if owner.number != chapter_number(home):
            yield f"{path} belongs to chapter {owner.number} ({owner.name}), but {home} holds it"
        elif owner.written and (module := module_name(path)) is not None:
            listed = "built" if module in owner.built else "provided"
            found = "built" if path in course.symbols else "provided"
            if listed != found:
                yield f"{path} is {found} in {home}, but listed as {listed} in chapters.toml"


def _drift(course: Course, files: dict[str, str]) -> Iterator[str]:
    for path, text in course.files.items():
        if path in files and text != files[path]:
            diff = difflib.unified_diff(
                text.splitlines(),
                files[path].splitlines(),
                f"{course.homes[path]}.ipynb, cells of {path}",
                path,
                n=1,
                lineterm="",
            )
            lines = list(diff)
            more = f"\n... and {len(lines) - _DIFF_LINES} lines more"
            shown = "\n".join(lines[:_DIFF_LINES]) + (more if len(lines) > _DIFF_LINES else "")
            yield f"{path} and its cells differ (nanobook sync takes the file's side):\n{shown}"


def _unwritten(course: Course, course_map: CourseMap) -> Iterator[str]:
    for chapter in course_map.chapters:
        stems = [stem for stem in course.stems if chapter_number(stem) == chapter.number]
        standing_in = [stem for stem in stems if stem in course.placeholders]
        if chapter.written and standing_in:
            yield f"chapter {chapter.number} is written, yet {standing_in[0]} is a placeholder"
        elif chapter.written and not stems:
            yield f"chapter {chapter.number} is marked written, but it has no notebook"
        elif not chapter.written and len(stems) > len(standing_in):
            yield f"chapter {chapter.number} has notebooks, but is not marked written"


def _cells(root: Path) -> Iterator[str]:
    """What is wrong inside single notebooks: their form, and cells that are too long."""
    for path in [*notebooks(root), *exercise_notebooks(root)]:
        notebook = nb.read(path)
        if nb.dumps(notebook) != path.read_text(encoding="utf-8"):
            yield f"{path.name} is not in its normal form: nanobook sync"
        for directive in nb.directives(notebook):
            lines = directive.body.count("\n") + 1
            if lines > MAX_CELL_LINES:
                yield (
                    f"{path.name}: {directive.path}::{directive.symbol} has {lines} lines, more "
                    f"than a cell should ({MAX_CELL_LINES}): cut it at a method or a function"
                )


def _thin(course: Course, course_map: CourseMap) -> Iterator[str]:
    by_chapter = shares(course, course_map)
    for chapter in course_map.chapters:
        share = by_chapter[chapter.number].built_share
        if chapter.written and share < MIN_BUILT_SHARE:
            yield (
                f"chapter {chapter.number} builds {share:.0%} of its lines in cells; at least "
                f"{MIN_BUILT_SHARE:.0%} is the rule"
            )
