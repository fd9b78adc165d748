"""One build cell: put the piece into its file, import the file anew, and everything that uses it.

Running only the new symbol does not work: once an earlier symbol has grown, `inspect.getsource`
reads the wrong lines (and with it Triton, which compiles from source), old instances no longer
pickle, and the header's `from __future__` does not reach later cells. So the whole file is written
and imported; so is every loaded module of the workspace that imports it. If any of that fails, the
last good file and modules stay.
"""

import ast
import importlib
import linecache
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from nanobook.chapters import PACKAGE_FOLDERS
from nanobook.imports import dotted, is_ours
from nanobook.names import rebind
from nanobook.source import HEADER, Piece, bound_names, join, locate, symbols_of
from nanobook.workspace import Workspace, digest, read_text, replace_file


class BuildError(ValueError):
    """A cell cannot be built as asked; the message is one line that says why."""


class ElsewhereError(RuntimeError):
    """A module came from another place than the workspace."""


@dataclass
class Built:
    """What a build cell did.

    Attributes:
        path, symbol: what was built.
        lines: of the piece.
        reloaded: other modules that were imported anew because they use this one.
        stale: names in the notebook whose objects were made by the code before, with their class.
    """

    path: str
    symbol: str
    lines: int
    reloaded: list[str] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = f"{self.lines} line{'' if self.lines == 1 else 's'}"
        text = f"built {self.path}::{self.symbol} · {lines}"
        if self.reloaded:
            text += f" · imported anew: {_few(self.reloaded, 3)}"
        if self.stale:
            text += f"\nstale, make them again: {_few(self.stale, 8)}"
        return text


def _few(names: list[str], most: int) -> str:
    """Names, or the first of many."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most} more"


def build(
    workspace: Workspace, path: str, symbol: str, body: str, namespace: dict[str, Any]
) -> Built:
    """Build one piece, bind its names in `namespace`, and rebind those that came from before.

    Raises:
        BuildError: the path or the symbol cannot be built.
        SyntaxError: with the cell's name and line.
        Exception: whatever the module raised when it was imported.
    """
    body = body.rstrip("\n")
    if workspace.absorb([path]):
        workspace.back_up([path])  # edited by hand: this cell is about to replace a part of it
    before = workspace.text(path)
    pieces = _with_piece(workspace, path, symbol, body)
    text = join(pieces)
    _compile(path, symbol, pieces, text)
    if symbol != HEADER and symbol not in symbols_of(text):
        indent = " (a method stands indented, as in its class)" if "." in symbol else ""
        raise BuildError(f"the cell builds {symbol}, but does not define it{indent}")
    built = Built(path, symbol, body.strip("\n").count("\n") + 1)
    if text == before:
        workspace.write_own(path, text)
        module = _import(workspace, path)
    else:
        with _Swap(workspace, path, pieces, text) as swap:
            workspace.write_own(path, text)
            workspace.remember_pieces(path, pieces)
            module = swap.reload()
        built.reloaded = swap.others
        built.stale = rebind(namespace, swap.old)
    workspace.remember_pieces(path, pieces)
    for name in bound_names(pieces, symbol):
        if hasattr(module, name):
            namespace[name] = getattr(module, name)
    return built


def provide(workspace: Workspace, path: str, namespace: dict[str, Any]) -> bool:
    """Put a provided file into the workspace; False if the learner's own is there, and is kept.

    Raises:
        CourseError: the course has no such file.
    """
    text = workspace.reference(path)
    workspace.absorb([path])
    now, mine = workspace.text(path), workspace.own(path)
    given = workspace.state["provided"]
    if mine is not None and now == mine and mine != text and given.get(path) != digest(mine):
        return False
    if now == text or not path.endswith(".py"):
        workspace.write_own(path, text)
    else:
        with _Swap(workspace, path, [(HEADER, text)], text) as swap:
            workspace.write_own(path, text)
            swap.reload(only_if_loaded=True)
        rebind(namespace, swap.old)
    workspace.remember(provided={**workspace.state["provided"], path: digest(text)})
    return True


def _with_piece(workspace: Workspace, path: str, symbol: str, body: str) -> list[Piece]:
    """The file's pieces with this one put in its place."""
    if not path.startswith(tuple(f"{folder}/" for folder in PACKAGE_FOLDERS.values())):
        folders = " or ".join(f"{folder}/" for folder in PACKAGE_FOLDERS.values())
        raise BuildError(f"{path!r}: only files in {folders} are built")
    if not path.endswith(".py") or ".." in Path(path).parts:
        raise BuildError(f"{path!r} is no module's file")
    pieces = [] if path in workspace.state["lent"] else workspace.pieces(path)
    names = [name for name, _ in pieces]
    if HEADER not in names and symbol != HEADER:
        raise BuildError(f"{path}::{symbol}: run the cell {path}::{HEADER} first")
    if symbol in names:
        return [(name, body if name == symbol else text) for name, text in pieces]
    pieces.insert(_place(names, symbol, workspace.course.symbols.get(path, [])), (symbol, body))
    return pieces


def _place(names: list[str], symbol: str, order: list[str]) -> int:
    """Where a new piece goes: in the course's order; what the course does not know goes to its
    class, or to the end.
    """
    if symbol == HEADER:
        return 0
    if symbol in order:
        later = set(order[order.index(symbol) :])
        return next((i for i, name in enumerate(names) if name in later), len(names))
    owner = symbol.partition(".")[0]
    family = [i for i, name in enumerate(names) if name.partition(".")[0] == owner]
    return family[-1] + 1 if family and "." in symbol else len(names)


def _import(workspace: Workspace, path: str) -> ModuleType:
    """Import a file's module, and make sure that it is this file's.

    Raises:
        ElsewhereError: it is another's.
    """
    module = importlib.import_module(dotted(path))
    found = Path(str(module.__file__)).resolve()
    if found != workspace.folder / path:
        raise ElsewhereError(
            f"{dotted(path)} was imported from {found}, not from the workspace: something has "
            "changed Python's path; run the cell with %chapter again"
        )
    return module


def _compile(path: str, symbol: str, pieces: list[Piece], text: str) -> None:
    """Raise a SyntaxError that points into the cell at fault."""
    try:
        _parse(path, text)
    except SyntaxError as error:
        place = locate(pieces, error.lineno or 1)
        cell, line = (place.symbol, place.line) if place else (symbol, 1)
        if (own := _error_alone(path, symbol, dict(pieces)[symbol], cell)) is not None:
            error, cell, line = own, symbol, own.lineno or 1
        error.filename = f"%%build {path}::{cell}"
        if error.end_lineno is not None and error.lineno is not None:
            error.end_lineno += line - error.lineno
        error.lineno = line
        error.args = (error.msg, (error.filename, line, error.offset, error.text))
        raise error.with_traceback(None) from None


def _parse(path: str, text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come when the file is imported
        compile(text, f"<{path}>", "exec", dont_inherit=True)  # no name of a file that could exist


def _error_alone(path: str, symbol: str, piece: str, shown_in: str) -> SyntaxError | None:
    """What is wrong with a piece by itself, in the cell's own lines. Of a function without a body,
    say, or of a line that ends its class too early: in the file that shows only in a cell below.
    """
    magic = "class _:\n" if "." in symbol else "\n"  # stands for the cell's first line
    text = f"{magic}{piece}\n"
    try:
        _parse(path, text)
    except SyntaxError as error:
        error.lineno = min(error.lineno or 1, piece.count("\n") + 2)
        return error
    last = ast.parse(text).body[-1]
    if shown_in == symbol or "." not in shown_in or isinstance(last, ast.ClassDef):
        return None
    early = SyntaxError(f"this line ends the class, which goes on in the cell of {shown_in}")
    early.lineno, early.offset, early.text = last.lineno, 1, text.splitlines()[last.lineno - 1]
    return early


class _Swap:
    """Old modules out, new ones in; back again if anything fails."""

    def __init__(self, workspace: Workspace, path: str, pieces: list[Piece], text: str) -> None:
        self.workspace, self.path, self.pieces, self.text = workspace, path, pieces, text
        self.file = str(workspace.folder / path)
        self.name = dotted(path)
        self.before = workspace.text(path)
        self.kept = {file: read_text(file) for file in workspace.kept(path)}
        self.lent = path in workspace.state["lent"]
        self.old: dict[str, ModuleType] = {}
        self.others: list[str] = []

    def __enter__(self) -> "_Swap":
        names = _users(self.workspace, self.name)
        self.old = {name: sys.modules[name] for name in names if name in sys.modules}
        self.loaded_before = set(sys.modules)
        self.parents = {
            name: (parent, getattr(parent, name.rpartition(".")[2], None))
            for name in [*names, self.name]
            if (parent := sys.modules.get(name.rpartition(".")[0])) is not None
        }
        linecache.cache.pop(self.file, None)
        return self

    def reload(self, only_if_loaded: bool = False) -> ModuleType:
        """Import the file and all that uses it, in the order of the course."""
        for name in self.old:
            del sys.modules[name]
        importlib.invalidate_caches()
        order = {dotted(path): index for index, path in enumerate(self.workspace.course.order)}
        names = sorted(self.old, key=lambda name: (order.get(name, -1), name))
        if self.name not in names and not only_if_loaded:
            names.append(self.name)
        for name in names:
            importlib.import_module(name)
            self._adopt(name)
        if self.name in names:
            _import(self.workspace, self.path)
        self.others = [name for name in names if name != self.name]
        return sys.modules.get(self.name) or ModuleType(self.name)

    def _adopt(self, name: str) -> None:
        """Give a package that was imported anew the modules in it that were not."""
        if hasattr(sys.modules[name], "__path__"):
            for other, module in list(sys.modules.items()):
                parent, _, last = other.rpartition(".")
                if parent == name and not hasattr(sys.modules[name], last):
                    setattr(sys.modules[name], last, module)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if error is None:
            return
        point_into_cell(error, self.file, self.path, self.pieces)
        # The traceback is shown after the file is back: let it show the lines that failed, until
        # `forget_lines`.
        lines = self.text.splitlines(keepends=True)
        linecache.cache[self.file] = (len(self.text), None, lines, self.file)
        new = {n: sys.modules[n] for n in set(sys.modules) - self.loaded_before if is_ours(n)}
        for name in new:
            del sys.modules[name]
        sys.modules.update(self.old)
        for name, module in new.items():
            folder, _, last = name.rpartition(".")
            if folder in sys.modules and vars(sys.modules[folder]).get(last) is module:
                delattr(sys.modules[folder], last)
        for name, (parent, value) in self.parents.items():
            last = name.rpartition(".")[2]
            if value is not None:
                setattr(parent, last, value)
            elif hasattr(parent, "__dict__"):
                parent.__dict__.pop(last, None)
        self._put_back()

    def _put_back(self) -> None:
        if self.before is None:
            self.workspace.remove(self.path)
        else:
            self.workspace.write(self.path, self.before)
        for file, text in self.kept.items():
            if text is None:
                file.unlink(missing_ok=True)
            else:
                replace_file(file, text)
        if self.lent:
            self.workspace.remember(lent=sorted({*self.workspace.state["lent"], self.path}))
        importlib.invalidate_caches()


def _users(workspace: Workspace, name: str) -> list[str]:
    """The loaded workspace modules that import `name`, directly or not; itself first."""
    loaded = {
        other: Path(str(module.__file__))
        for other, module in list(sys.modules.items())
        if is_ours(other) and getattr(module, "__file__", None)
    }
    imports = {other: imported(file, other) for other, file in loaded.items() if file.is_file()}
    found, queue = [name], [name]
    while queue:
        wanted = queue.pop()
        for other, names in imports.items():
            if wanted in names and other not in found:
                found.append(other)
                queue.append(other)
    return found


def imported(file: Path, name: str) -> set[str]:
    """Every module that a file imports, anywhere in it; a name imported from one counts as one."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return set()
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*up, base] if base else up)
            found.add(base)
            found.update(f"{base}.{alias.name}" for alias in node.names)
    return found


def point_into_cell(error: BaseException, file: str, path: str, pieces: list[Piece]) -> None:
    """Add a note that says in which cell and line the innermost frame of `file` stands."""
    place = None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == file:
            place = locate(pieces, trace.tb_lineno) or place
        trace = trace.tb_next
    if place is not None:
        note = f"in the cell %%build {path}::{place.symbol}, line {place.line}"
        if note not in getattr(error, "__notes__", []):
            error.add_note(note)


def forget_lines() -> None:
    """Forget the lines of failed cells, which were kept for their tracebacks."""
    for name, entry in list(linecache.cache.items()):
        if len(entry) == 4 and entry[1] is None and Path(name).is_file():
            linecache.cache.pop(name, None)


def annotate(workspace: Workspace, error: BaseException) -> None:
    """Map an error's frames in workspace files to their cells, as notes."""
    seen = set()
    trace = error.__traceback__
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        trace = trace.tb_next
        try:
            path = Path(name).relative_to(workspace.folder).as_posix()
        except ValueError:
            continue
        if path not in seen and workspace.own(path) is not None:
            seen.add(path)
            point_into_cell(error, name, path, workspace.pieces(path))
