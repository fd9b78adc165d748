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
        written: whether its notebooks are there; until then a placeholder stands in for them.
        built: modules whose source stands in the chapter's cells.
        provided: modules that the chapter copies, because they are not worth reading aloud.
    """

    number: int
    name: str
    title: str
    idea: str
    written: bool
    built: tuple[str, ...]
    provided: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        """All modules that the chapter owns, sorted."""
        return tuple(sorted(self.built + self.provided))


@dataclass(frozen=True)
class CourseMap:
    """All chapters, in order.

    Attributes:
        uncounted: modules, or whole packages, whose lines are left out of the built share.
    """

    chapters: tuple[Chapter, ...]
    uncounted: tuple[str, ...] = ()

    @property
    def modules(self) -> dict[str, Chapter]:
        """Module -> the chapter that owns it."""
        return {module: chapter for chapter in self.chapters for module in chapter.modules}

    def owner(self, path: str) -> Chapter | None:
        """The chapter that owns a file of the packages, by its path from the root.

        A module belongs to the chapter that lists it. An `__init__.py`, or a file that is no
        module, belongs to the first chapter that has a module in or below its folder.
        """
        if (module := module_name(path)) and (chapter := self.modules.get(module)):
            return chapter
        folder = package_name(path)
        return next(
            (
                chapter
                for chapter in self.chapters
                if any(module.startswith(f"{folder}.") for module in chapter.modules)
            ),
            None,
        )

    def counted(self, path: str) -> bool:
        """Whether a file's lines count in the built share."""
        name = module_name(path) or package_name(path)
        return not any(name == part or name.startswith(f"{part}.") for part in self.uncounted)


def load_map(path: Path = MAP_FILE) -> CourseMap:
    """Read and check a map. Raises MapError if it contradicts itself."""
    with path.open("rb") as file:
        data = tomllib.load(file)
    tables = data.get("chapter", [])
    course = CourseMap(
        tuple(_read_chapter(table) for table in tables), tuple(data.get("uncounted", []))
    )
    _check_order(course)
    _check_modules(course)
    return course


def _read_chapter(table: dict[str, Any]) -> Chapter:
    label = f"chapter {table.get('number', '?')}"
    if wrong := sorted(_CHAPTER_KEYS ^ (table.keys() - {"written"})):
        raise MapError(f"{label}: missing or unknown keys: {', '.join(wrong)}")
    modules = {kind: tuple(table[kind]) for kind in ("built", "provided")}
    return Chapter(
        table["number"],
        table["name"],
        table["title"],
        table["idea"],
        bool(table.get("written", False)),
        **modules,
    )


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


def module_name(path: str) -> str | None:
    """The dotted name of a module's path from the root; None for `__init__.py` and other files."""
    if not path.endswith(".py") or path.endswith("__init__.py"):
        return None
    return path.removeprefix("kernels/").removesuffix(".py").replace("/", ".")


def package_name(path: str) -> str:
    """The dotted name of the package whose folder holds a file."""
    return path.removeprefix("kernels/").rpartition("/")[0].replace("/", ".")


def package_files(root: Path) -> dict[str, str]:
    """Path from the root -> text of every file of both packages; empty where they are absent."""
    return {
        file.relative_to(root).as_posix(): file.read_bytes().decode("utf-8")
        for folder in PACKAGE_FOLDERS.values()
        for file in sorted((root / folder).rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    }


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
