"""A module's text in pieces, one a cell, and back again without losing a byte.

A piece begins where its symbol begins (decorators and the comment lines right above belong to it)
and ends where the next cell's symbol begins, so that bytes between two symbols belong to the
earlier cell and every byte has exactly one home. This module works on text alone: it must not know
notebooks, and it never imports what it cuts.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

HEADER = "header"
"""The symbol of a file's first piece: its docstring, imports, and all up to the first cut."""

Piece = tuple[str, str]
"""(symbol, text without blank lines at its end)."""


class CutError(ValueError):
    """A file cannot be cut as asked; the message is one line that says why."""


@dataclass(frozen=True)
class Place:
    """A line of a file, as a reader of its cells sees it.

    Attributes:
        symbol: the piece that holds the line.
        line: its number in the cell. The magic that opens the cell is line 1.
    """

    symbol: str
    line: int


def split(text: str, symbols: Sequence[str]) -> list[str]:
    """Cut a file into one piece a symbol, each without blank lines at its end.

    Args:
        text: the whole file.
        symbols: `header` first, then top-level names or `Class.method`, in file order.

    Raises:
        CutError: a symbol is missing or out of order, or the blank lines around a cut are not those
            that `join` would put there.
    """
    if not symbols or symbols[0] != HEADER:
        raise CutError(f"the first cell of a file is ::{HEADER}")
    found = dict(_starts(text))
    lines = text.splitlines(keepends=True)
    cuts = [0]
    for symbol in symbols[1:]:
        if symbol not in found:
            raise CutError(f"there is no {symbol!r} in it (names: {', '.join(found) or 'none'})")
        if found[symbol] <= cuts[-1]:
            raise CutError(f"{symbol!r} stands before the cell that comes before it")
        cuts.append(found[symbol])
    ends = [*cuts[1:], len(lines)]
    pieces = ["".join(lines[start:end]).rstrip("\n") for start, end in zip(cuts, ends, strict=True)]
    pairs = list(zip(symbols, pieces, strict=True))
    if join(pairs) != text:
        raise CutError(_misfit(text, pairs))
    return pieces


def join(pieces: Sequence[Piece]) -> str:
    """The file that the pieces make: two blank lines between them, one before a method."""
    if not pieces:
        return ""
    text = pieces[0][1].rstrip("\n")
    for symbol, piece in pieces[1:]:
        text += _gap(symbol) + piece.rstrip("\n")
    return text + "\n" if text else ""


def locate(pieces: Sequence[Piece], line: int) -> Place | None:
    """The cell and the line in it of line `line` (from 1) of the joined file; None if outside."""
    last = None
    for symbol, start, end in _spans(pieces):
        if line < start:
            break
        # A blank line of a gap belongs to the cell before it.
        last = Place(symbol, min(line, end) - start + 2)
    return last


def bound_names(pieces: Sequence[Piece], symbol: str) -> list[str]:
    """The module-level names that one piece binds, in order; its imports too. For a method, its
    class.
    """
    span = next(((start, end) for name, start, end in _spans(pieces) if name == symbol), None)
    if span is None:
        return []
    names: dict[str, None] = {}
    if "." in symbol:
        names[symbol.partition(".")[0]] = None
    for node in _flat(ast.parse(join(pieces)).body):
        if span[0] <= _first_line(node) <= span[1]:
            names.update(dict.fromkeys(_bound(node)))
    return list(names)


def symbols_of(text: str) -> list[str]:
    """Every name at which the text can be cut, in file order."""
    return [name for name, _ in _starts(text)]


def _gap(symbol: str) -> str:
    return "\n\n" if "." in symbol else "\n\n\n"


def _spans(pieces: Sequence[Piece]) -> Iterator[tuple[str, int, int]]:
    """(symbol, first line, last line) of each piece in the joined file, from 1."""
    line = 1
    for index, (symbol, text) in enumerate(pieces):
        if index:
            line += _gap(symbol).count("\n") - 1
        end = line + text.rstrip("\n").count("\n")
        yield symbol, line, end
        line = end + 1


def _starts(text: str) -> Iterator[tuple[str, int]]:
    """(name, index of its first line) of what a file can be cut at; a name's first use counts."""
    lines = text.splitlines()
    seen: set[str] = set()
    for node in ast.parse(text).body:
        inner: list[tuple[str, ast.stmt]] = [(name, node) for name in _cut_names(node)]
        if isinstance(node, ast.ClassDef):
            inner += [
                (f"{node.name}.{child.name}", child)
                for child in node.body
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            ]
        for name, place in inner:
            if name not in seen:
                seen.add(name)
                yield name, _with_comments(lines, _first_line(place) - 1)


def _cut_names(node: ast.stmt) -> list[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return [node.name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _first_line(node: ast.stmt) -> int:
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _with_comments(lines: Sequence[str], index: int) -> int:
    """`index`, moved up over the comment lines right above it that stand at the same indent."""
    indent = len(lines[index]) - len(lines[index].lstrip())
    while index > 0:
        above = lines[index - 1]
        if not above.lstrip().startswith("#") or len(above) - len(above.lstrip()) != indent:
            break
        index -= 1
    return index


def _flat(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run at module level, those inside `if`, `try` and `with` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for block in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(node, block, []))
            for handler in getattr(node, "handlers", []):
                yield from _flat(handler.body)


def _bound(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.ImportFrom(module="__future__"):
            return
        case ast.Import(names=aliases):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in aliases)
        case ast.ImportFrom(names=aliases):
            yield from (alias.asname or alias.name for alias in aliases if alias.name != "*")
        case ast.Assign(targets=targets):
            for target in targets:
                yield from _names_in(target)
        case ast.AnnAssign(target=target, value=value) if value is not None:
            yield from _names_in(target)


def _names_in(target: ast.expr) -> Iterator[str]:
    for node in ast.walk(target):
        if isinstance(node, ast.Name):
            yield node.id


def _misfit(text: str, pieces: Sequence[Piece]) -> str:
    """Which cut does not have the blank lines that `join` would put there."""
    for count in range(1, len(pieces)):
        if not text.startswith(join(pieces[: count + 1]).rstrip("\n")):
            symbol = pieces[count][0]
            blanks = _gap(symbol).count("\n") - 1
            return f"before {symbol!r} there must be {blanks} blank line(s): cut elsewhere"
    return "it must end with one newline"
