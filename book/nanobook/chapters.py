"""The map of the course, typed: which chapter owns which module, and where the modules lie.

`chapters.toml` beside this file is the one place where that is written down; everything else that
depends on it asks here. This module must not know what any other module contains.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAP_FILE = Path(__file__).with_name("chapters.toml")

# Import name -> folder of the package, from the repository's (or a workspace's) root.
PACKAGE_FOLDERS = {"nanoserve": "nanoserve", "nanokernels": "kernels/nanokernels"}

_CHAPTER_KEYS = {"number", "name", "title", "idea", "built", "provided"}
_MODULE_NAME = re.compile(rf"({'|'.join(PACKAGE_FOLDERS)})(\.[a-z_][a-z0-9_]*)+")


class MapError(ValueError):
    """The map contradicts itself; the message is one line that says where."""


@dataclass(frozen=True)
class Chapter:
    """One chapter of the course.

    Attributes:
        number: its place in the order.
        name: short name, as in file names.
        title: as a reader sees it.
        idea: the one idea, in a sentence.
        built: modules whose source stands in the chapter's cells.
        provided: modules that the chapter copies, because they are not worth reading aloud.
    """

    number: int
    name: str
    title: str
    idea: str
    built: tuple[str, ...]
    provided: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that the chapter owns, sorted."""
        return tuple(sorted(self.built + self.provided))


@dataclass(frozen=True)
class CourseMap:
    """All chapters, in order."""

    chapters: tuple[Chapter, ...]

    @property
    def modules(self) -> dict[str, Chapter]:
        """Module -> the chapter that owns it."""
        return {module: chapter for chapter in self.chapters for module in chapter.modules}


def load_map(path: Path = MAP_FILE) -> CourseMap:
    """Read and check a map. Raises MapError if it contradicts itself."""
    with path.open("rb") as file:
        tables = tomllib.load(file).get("chapter", [])
    course = CourseMap(tuple(_read_chapter(table) for table in tables))
    _check_order(course)
    _check_modules(course)
    return course


def _read_chapter(table: dict[str, Any]) -> Chapter:
    label = f"chapter {table.get('number', '?')}"
    if wrong := sorted(_CHAPTER_KEYS ^ table.keys()):
        raise MapError(f"{label}: missing or unknown keys: {', '.join(wrong)}")
    modules = {kind: tuple(table[kind]) for kind in ("built", "provided")}
    return Chapter(table["number"], table["name"], table["title"], table["idea"], **modules)


def _check_order(course: CourseMap) -> None:
    numbers = [chapter.number for chapter in course.chapters]
    if numbers != sorted(set(numbers)):
        raise MapError(f"chapter numbers must rise, each once; they are {numbers}")
    names = [chapter.name for chapter in course.chapters]
    if len(set(names)) != len(names):
        raise MapError(f"two chapters have the same name: {', '.join(names)}")


def _check_modules(course: CourseMap) -> None:
    owner: dict[str, int] = {}
    for chapter in course.chapters:
        for module in chapter.built + chapter.provided:
            if not _MODULE_NAME.fullmatch(module):
                raise MapError(f"chapter {chapter.number}: {module!r} is not a module of ours")
            if module in owner:
                raise MapError(
                    f"{module} is listed twice: chapters {owner[module]} and {chapter.number}"
                )
            owner[module] = chapter.number
    for module in owner:
        parent = module.rpartition(".")[0]
        if parent in owner:
            raise MapError(f"{parent} is a package (of {module}): only leaf modules are listed")


def source_files(root: Path) -> Iterator[tuple[str, Path]]:
    """Every module file below `root`, with its dotted name; a package's name stands for its
    `__init__.py`.
    """
    for package, folder in PACKAGE_FOLDERS.items():
        for file in sorted((root / folder).rglob("*.py")):
            parts = (package, *file.relative_to(root / folder).with_suffix("").parts)
            yield ".".join(parts).removesuffix(".__init__"), file


def differences(course: CourseMap, root: Path) -> list[str]:
    """What the map and the files below `root` disagree on, one sentence each; empty if nothing."""
    present = {name for name, file in source_files(root) if file.name != "__init__.py"}
    listed = course.modules
    unknown = [
        f"{name} is not in chapters.toml: add it to its chapter" for name in present - listed.keys()
    ]
    missing = [
        f"{name} is listed in chapter {chapter.number} ({chapter.name}), but there is no such file"
        for name, chapter in listed.items()
        if name not in present
    ]
    return sorted(unknown) + sorted(missing)
