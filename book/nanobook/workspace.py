"""The learner's workspace: the packages as far as the learner has come, and what is kept of theirs.

`workspace/nanoserve` and `workspace/kernels/nanokernels` are a view that `%chapter` puts together:
the modules of earlier notebooks, and what the learner has built in this one. What the learner
writes is kept beside it, under `.nanobook/`, and never thrown away. This module must not import
what it copies.
"""

import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nanobook import imports
from nanobook.attempts import cut, read_course
from nanobook.banner import Banner
from nanobook.chapters import PACKAGE_FOLDERS, package_files
from nanobook.rebuild import CourseError, chapter_number, find_root
from nanobook.source import HEADER, Piece, join

LENT_FROM = 4
"""From this chapter on, the server and the command line are lent."""

LENT = (
    "nanoserve/server/",
    "nanoserve/cli/",
    "nanoserve/bench/__init__.py",
    "nanoserve/bench/cli.py",
)


def digest(text: str) -> str:
    """A short name for a file's content."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class Workspace:
    """A workspace folder, and the course that it belongs to.

    Args:
        root: the course's root; found from the current folder if not given.

    Raises:
        CourseError: there is no course, or NANOBOOK_WORKSPACE names a folder that is one.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root or find_root()
        named = os.environ.get("NANOBOOK_WORKSPACE")
        self.folder = (Path(named).expanduser() if named else self.root / "workspace").resolve()
        if (self.folder / "chapters").is_dir():  # `%chapter` would clear its packages away
            raise CourseError(
                f"NANOBOOK_WORKSPACE={named} is a course's own folder: name one that is empty, or "
                "none, then it is workspace/"
            )
        self.keep = self.folder / ".nanobook"
        self.course, self.unreadable = read_course(self.root)
        self._files = package_files(self.root)

    # What is remembered.

    @property
    def state(self) -> dict[str, Any]:
        """Bookkeeping: the notebook that is open, what was written where, what was passed."""
        empty: dict[str, Any] = {name: {} for name in ("written", "exercises", "chapters")}
        empty.update(stem=None, lent=[], provided={})
        try:
            loaded = json.loads((self.keep / "state.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return empty
        return {**empty, **loaded}

    def remember(self, **changes: Any) -> None:
        """Change entries of the bookkeeping."""
        self.keep.mkdir(parents=True, exist_ok=True)
        state = {**self.state, **changes}
        text = json.dumps(state, indent=1, sort_keys=True)
        replace_file(self.keep / "state.json", text)

    def reference(self, path: str) -> str:
        """The text of a file as the course has it: the package's, else as the cells make it.

        Raises:
            CourseError: neither has it.
        """
        if path in self._files:
            return self._files[path]
        if path in self.course.files:
            return self.course.files[path]
        raise CourseError(f"{path} is in no package and in no notebook")

    def own(self, path: str) -> str | None:
        """The learner's version of a file, if there is one."""
        return read_text(self.keep / "own" / path)

    def kept(self, path: str) -> list[Path]:
        """Where the learner's version of a file is kept, and its pieces."""
        return [self.keep / "own" / path, self.keep / "pieces" / f"{path}.json"]

    def text(self, path: str) -> str | None:
        """The file as it stands in the workspace."""
        return read_text(self.folder / path)

    # What is written.

    def write(self, path: str, text: str) -> None:
        """Put a file into the view, whole or not at all."""
        self._put(path, text)
        self.remember(written={**self.state["written"], path: digest(text)})

    def _put(self, path: str, text: str) -> None:
        file = self.folder / path
        replace_file(file, text)
        if path.endswith(".py"):
            # Same size and same second: Python would take the old bytecode for the new file's.
            cache = Path(importlib.util.cache_from_source(str(file))).parent
            for stale in cache.glob(f"{file.stem}.*.pyc"):
                stale.unlink(missing_ok=True)

    def write_own(self, path: str, text: str) -> None:
        """Put a file of the learner's into the view, and keep it. What had passed its chapter's
        check, and is now replaced, goes to a backup.
        """
        mine = self.own(path)
        if mine not in (None, text) and self._passed(path, mine) and mine != self.reference(path):
            self.back_up([path])
        replace_file(self.keep / "own" / path, text)
        self.write(path, text)
        self.remember(lent=[other for other in self.state["lent"] if other != path])

    def remove(self, path: str) -> None:
        """Take a file out of the view."""
        (self.folder / path).unlink(missing_ok=True)
        written = dict(self.state["written"])
        written.pop(path, None)
        self.remember(written=written)

    def back_up(self, paths: Iterable[str]) -> str:
        """Copy files of the view and the learner's versions away; the backup's name, if any."""
        taken = [int(p.name) for p in (self.keep / "backups").glob("[0-9]*") if p.name.isdigit()]
        name, copied = f"{max(taken, default=0) + 1:03}", False
        for path in paths:
            for kind, source in (("view", self.folder), ("own", self.keep / "own")):
                if (source / path).is_file():
                    target = self.keep / "backups" / name / kind / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source / path, target)
                    copied = True
        return name if copied else ""

    def view(self) -> list[str]:
        """Every file of the packages in the workspace, without caches and an editor's leavings."""
        files = [
            file.relative_to(self.folder)
            for folder in PACKAGE_FOLDERS.values()
            for file in (self.folder / folder).rglob("*")
            if file.is_file()
        ]
        hidden = (".", "__pycache__")
        return sorted(
            file.as_posix() for file in files if not any(p.startswith(hidden) for p in file.parts)
        )

    # Pieces.

    def pieces(self, path: str) -> list[Piece]:
        """A file's cells as they were last built, or as they can be cut out of the file."""
        text = self.text(path)
        if text is None:
            return []
        stored = read_text(self.keep / "pieces" / f"{path}.json")
        pairs = [] if stored is None else [(symbol, piece) for symbol, piece in json.loads(stored)]
        if pairs and join(pairs) == text:
            return pairs
        return cut(text, {*dict(pairs), *self.course.symbols.get(path, [])})

    def remember_pieces(self, path: str, pieces: list[Piece]) -> None:
        """Keep a file's cells."""
        replace_file(self.keep / "pieces" / f"{path}.json", json.dumps(pieces, indent=1))

    # The view.

    def absorb(self, paths: Iterable[str] | None = None) -> list[str]:
        """Keep what was edited by hand in the view since it was last written; those paths.

        Args:
            paths: look at these only.
        """
        written = self.state["written"]
        edited = {}
        for path in self.view() if paths is None else paths:
            text = self.text(path)
            if text is None or written.get(path) == digest(text):
                continue
            edited[path] = digest(text)
            mine = self.own(path)
            if mine != text and (mine is not None or path in self.course.homes):
                self.back_up([path])
            replace_file(self.keep / "own" / path, text)
        if edited:
            self.remember(written={**written, **edited})
        return list(edited)

    def stem_of(self, name: str) -> str:
        """The notebook that `%chapter NAME` means: `1`, `01`, `01_2` or the whole stem.

        Raises:
            CourseError: there is none.
        """
        wanted = re.sub(r"^\d+", lambda found: f"{int(found[0]):02}", name.removesuffix(".ipynb"))
        for stem in self.course.stems:
            if stem == wanted or stem.startswith(f"{wanted}_"):
                return stem
        known = ", ".join(self.course.stems)
        raise CourseError(f"there is no chapter {name!r}; the notebooks are {known}")

    def prepare(self, stem: str, reference: bool = False, reset: bool = False) -> Banner:
        """Put the view together for a notebook.

        Args:
            stem: the notebook.
            reference: take the reference for earlier modules even where the learner has their own.
            reset: start this notebook's files anew; what was there goes to a backup.

        Raises:
            NotebookError: this notebook, or one before it, cannot be read.
        """
        for other, error in self.unreadable.items():
            if other <= stem:
                raise error
        banner = Banner(stem)
        banner.saved = self.absorb()
        here = self.course.of(stem)
        if reset:
            banner.backup = self.back_up(here)
            for path in here:
                self.remove(path)
                for file in self.kept(path):
                    file.unlink(missing_ok=True)
        wanted: dict[str, str] = {}
        for path in sorted(self.course.before(stem), key=lambda p: not p.endswith("__init__.py")):
            wanted[path], own = self._choose(path, reference, chapter_number(stem))
            (banner.own if own else banner.reference).append(path)
            if not own and self.own(path) not in (None, wanted[path]):
                banner.aside.append(path)
        if chapter_number(stem) >= LENT_FROM:
            for path in self.course.order:
                if path.startswith(LENT) and path not in wanted and path not in here:
                    wanted[path] = self.reference(path)
                    banner.lent.append(path)
        for path in here:
            if (mine := self.own(path)) is not None:
                wanted[path] = mine
                banner.here.append(path)
        for path in self.extras():
            wanted[path] = self.own(path) or ""
            banner.extra.append(path)
        self._show(wanted)
        self.remember(stem=stem, lent=banner.lent)
        return banner

    def extras(self) -> list[str]:
        """The learner's files in the view that the course does not know."""
        known = self.course.homes.keys() | self._files.keys()
        return [p for p in self.view() if p not in known and self.own(p) is not None]

    def fill(self) -> list[str]:
        """Lend every file of the course that the view lacks; their paths. Nothing is replaced."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lent = []
        for path in self._files or self.course.files:
            if self.text(path) is None:
                self.write(path, self.chosen(path))
                lent.append(path)
        self.remember(lent=sorted({*self.state["lent"], *lent}))
        return lent

    def chosen(self, path: str) -> str:
        """A file as later chapters see it: the learner's where it is fit, else the reference."""
        return self._choose(path)[0]

    def _choose(
        self, path: str, reference: bool = False, chapter: int | None = None
    ) -> tuple[str, bool]:
        """A file's text, and whether it is the learner's own.

        Args:
            reference: do not look for one of their own.
            chapter: the one that is open. It cannot have been checked before its last notebook;
                until then a file that was built whole is fit.
        """
        ours, mine = self.reference(path), self.own(path)
        if mine is None or reference or path not in self.course.homes:
            return ours, False
        here = chapter == chapter_number(self.course.homes[path]) and self._whole(path, mine)
        if mine == ours or here or self._passed(path, mine):
            return mine, True
        return ours, False

    def _whole(self, path: str, text: str) -> bool:
        """Whether a text has all that the course's cells of the file define."""
        symbols = self.course.symbols.get(path, [HEADER])
        return {HEADER, *dict(cut(text, symbols))} >= set(symbols)

    def _passed(self, path: str, text: str | None) -> bool:
        """Whether a file's chapter was checked, and passed, with this very text."""
        if text is None or path not in self.course.homes:
            return False
        number = chapter_number(self.course.homes[path])
        passed: dict[str, str] = self.state["chapters"].get(str(number), {})
        return passed.get(path) == digest(text)

    def _show(self, wanted: dict[str, str]) -> None:
        """Make the view hold these files and no others."""
        written = {}
        for path in self.view():
            if path not in wanted:
                (self.folder / path).unlink(missing_ok=True)
        for path, text in wanted.items():
            if self.text(path) != text:
                self._put(path, text)
            written[path] = digest(text)
        self.remember(written=written)
        for folder in PACKAGE_FOLDERS.values():
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
            for inner in sorted((self.folder / folder).rglob("*"), reverse=True):
                if inner.is_dir() and not [p for p in inner.iterdir() if p.name != "__pycache__"]:
                    shutil.rmtree(inner)

    def activate(self) -> None:
        """Make this process, and those it starts, import the packages from the workspace, and find
        course and workspace again from any folder. What is lent later on, to a server, stays
        hidden from this process.
        """
        os.environ["NANOBOOK_ROOT"] = str(self.root)
        os.environ["NANOBOOK_WORKSPACE"] = str(self.folder)
        shown = frozenset(self.state["lent"])
        imports.activate(
            self.folder,
            self.course.homes,
            lambda: frozenset(self.state["lent"]) - shown,
            self.state["stem"],
        )


def read_text(path: Path) -> str | None:
    """A file's text, bytes as they are; None if there is no such file."""
    return path.read_bytes().decode("utf-8", "surrogateescape") if path.is_file() else None


def replace_file(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(text.encode("utf-8", "surrogateescape"))
    os.replace(temporary, path)
