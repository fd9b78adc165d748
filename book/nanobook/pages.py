"""The book's pages as Sphinx takes them: notebooks dressed for reading, and what is generated.

A dressed notebook has lost what matters in Jupyter alone, and each of its build cells has an anchor
for the map of the course to point at. All of it is text in and text out: this module must not run a
cell, nor know how a page is rendered.
"""

import ast
import html
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanobook import notebook as nb
from nanobook.chapters import Chapter, CourseMap
from nanobook.rebuild import Course, chapter_number

LEXER = "nanobook"  # a name for Python with the course's magics, made known in the book's conf.py

# Cells whose outputs tell a learner about a workspace, and a reader nothing.
_WORKSPACE_MAGICS = ("%%build", "%provide", "%chapter", "%load_ext nanobook")

# Remarks to linters.
_FOR_TOOLS = re.compile(r"[ \t]+# noqa\b.*$", re.M)
_WIDEST_OUTPUT = 88  # columns that fit
_HEADING = re.compile(r"^#+ (.+?)\s*$", re.M)


def dressed(text: str) -> str:
    """A notebook's JSON, made ready for the book."""
    data = json.loads(text)
    data["metadata"].pop("nanobook", None)
    data["metadata"]["language_info"] = {"name": "python", "pygments_lexer": LEXER}
    cells: list[dict[str, Any]] = []
    heading = ""
    for cell in data["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = (_HEADING.findall(source) or [heading])[-1]
        else:
            _dress_code(cell, heading)
        if source.startswith("%%build"):
            anchor = f'<div class="nb-anchor" id="{html.escape(cell["id"])}"></div>'
            cells.append(_markdown(f"{cell['id'][:56]}-anchor", anchor))
        cells.append(cell)
    data["cells"] = cells
    return json.dumps(data, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def _dress_code(cell: dict[str, Any], heading: str) -> None:
    source = "".join(cell["source"])
    if source.startswith(_WORKSPACE_MAGICS):
        cell["outputs"] = []
    if not source.startswith("%%build"):
        cell["source"] = _FOR_TOOLS.sub("", source)
    cell["metadata"]["mystnb"] = {"image": {"alt": f"Figure: {heading}"}}
    printed = "".join("".join(output.get("text", "")) for output in cell["outputs"])
    if any(len(line) > _WIDEST_OUTPUT for line in printed.splitlines()):
        tags = cell["metadata"].setdefault("tags", [])
        tags.append("long-lines")  # the class that book.css wraps: it is prose, no table


def _markdown(cell_id: str, source: str) -> dict[str, Any]:
    return {"cell_type": "markdown", "id": cell_id, "metadata": {}, "source": source}


@dataclass(frozen=True)
class Part:
    """One chapter as the book shows it.

    Attributes:
        chapter: its entry in the map.
        written: stems of its notebooks, without placeholders.
        exercises: stems of its exercise notebooks.
    """

    chapter: Chapter
    written: tuple[str, ...]
    exercises: tuple[str, ...]

    @property
    def label(self) -> str:
        """Number and title, as in `3 · The block table`."""
        return f"{self.chapter.number} · {self.chapter.title}"


def parts(root: Path, course_map: CourseMap) -> list[Part]:
    """All chapters of the map, with the notebooks that are there."""
    course = Course.read(root)
    found = []
    for chapter in course_map.chapters:
        chapters = [
            stem
            for stem in course.stems
            if chapter_number(stem) == chapter.number and stem not in course.placeholders
        ]
        exercises = sorted(
            path.stem for path in root.glob(f"exercises/{chapter.number:02d}_*.ipynb")
        )
        found.append(Part(chapter, tuple(chapters), tuple(exercises)))
    return found


def contents(course_parts: list[Part]) -> str:
    """The table of contents: the sidebar's tree, and a card a chapter."""
    trees, cards = [], []
    for part in course_parts:
        documents = [f"chapters/{stem}" for stem in part.written]
        documents += [f"exercises/{stem}" for stem in part.exercises]
        if part.written:
            lines = "\n".join(documents)
            trees.append(f"```{{toctree}}\n:hidden:\n:caption: {part.label}\n\n{lines}\n```\n")
            link = f":link: {documents[0]}\n:link-type: doc\n"
            cards.append(f":::{{grid-item-card}} {part.label}\n{link}\n{part.chapter.idea}\n:::\n")
        else:
            later = f":class-card: nb-later\n\n{part.chapter.idea} *(not written yet)*"
            cards.append(f":::{{grid-item-card}} {part.label}\n{later}\n:::\n")
    return "\n".join([*trees, "::::{grid} 1 1 2 2\n:gutter: 3\n", *cards, "::::\n"])


def course_map_page(root: Path, course_map: CourseMap) -> str:
    """Chapter by chapter: which notebook holds which file, and in which cells."""
    course = Course.read(root)
    lines = []
    for chapter in course_map.chapters:
        stems = [stem for stem in course.stems if chapter_number(stem) == chapter.number]
        lines.append(f"## {chapter.number} · {chapter.title}\n\n{chapter.idea}\n")
        if not any(course.of(stem) for stem in stems):
            lines.append("*No module of its own yet.*\n")
        for stem in stems:
            if course.of(stem):
                lines.append(_notebook_files(course, stem))
    return "\n".join(lines)


def _notebook_files(course: Course, stem: str) -> str:
    notebook = nb.read(course.root / "chapters" / f"{stem}.ipynb")
    ids = nb.cell_ids(notebook)
    built: dict[str, list[str]] = {}
    for one in nb.directives(notebook):
        if one.symbol is not None:
            page = f"chapters/{stem}.html#{ids[one.cell_index]}"
            names = html.escape(", ".join(_names(one.symbol, one.body)))
            built.setdefault(one.path, []).append(f'<a href="{page}">{names}</a>')
    if stem in course.placeholders:
        heading = "Not written yet; until then its files are provided whole:"
    else:
        heading = f"{{doc}}`chapters/{stem}`"
    rows = [f"- `{path}`: {' · '.join(links)}" for path, links in built.items()]
    if provided := [f"`{path}`" for path in course.of(stem) if path not in built]:
        rows.append(f"- provided: {', '.join(provided)}")
    return "\n".join([heading, "", *rows, ""])


def _names(symbol: str, body: str) -> list[str]:
    """What a build cell is looked up by: its symbol, and the functions and classes in it."""
    try:
        statements = ast.parse(body).body
    except SyntaxError:  # methods, without their class
        return [symbol]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    defined = [statement.name for statement in statements if isinstance(statement, kinds)]
    return [symbol, *(name for name in defined if name != symbol)]
