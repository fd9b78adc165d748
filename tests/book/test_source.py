"""Cutting files into cells and joining them again: no byte may be lost, whatever the cuts."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nanobook.chapters import package_files
from nanobook.source import CutError, bound_names, join, locate, split, symbols_of

ROOT = Path(__file__).resolve().parents[2]
MODULES = {path: text for path, text in package_files(ROOT).items() if path.endswith(".py")}

TOY = '''\
"""A module."""

from __future__ import annotations

import math as m
from os import path, sep

LIMIT = 3


# Why this is here.
# (two lines)
@staticmethod
def first(x):
    return x


def second():
    return first(LIMIT)  # a comment


class Box:
    """Holds."""

    size = 1

    def __init__(self):
        self.x = 1

    # How it grows.
    @property
    def grown(self):
        return self.x + 1


TABLE, OTHER = {}, 2
if LIMIT:
    LATE = 1
'''


def test_a_piece_begins_with_its_comments_and_decorators():
    pieces = split(TOY, ["header", "first", "Box", "Box.grown"])
    assert pieces[0].endswith("LIMIT = 3")
    assert pieces[1].startswith("# Why this is here.\n# (two lines)\n@staticmethod\ndef first")
    assert pieces[3].startswith("    # How it grows.\n    @property")


def test_bytes_between_two_symbols_belong_to_the_earlier_cell():
    pieces = split(TOY, ["header", "first", "Box"])
    assert "def second" in pieces[1]
    assert pieces[2].endswith("LATE = 1")


def too_close(text, cuts):
    """The first cut before which the file has other than the usual blank lines, by plain search."""
    lines = text.splitlines()
    for name in cuts[1:]:
        last = name.rpartition(".")[2]
        index = next(
            i
            for i, line in enumerate(lines)
            if re.match(rf"\s*(async def|def|class) {last}\b", line)
            or (re.match(rf"{last}\b\s*(:|=)", line) and "." not in name)
        )
        while lines[index - 1].lstrip().startswith(("#", "@")):
            index -= 1
        blanks = 0
        while index - blanks > 0 and not lines[index - 1 - blanks]:
            blanks += 1
        if blanks != (1 if "." in name else 2):
            return name
    return None


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_cut_of_any_module_joins_to_the_same_bytes(data):
    text = MODULES[data.draw(st.sampled_from(sorted(MODULES)))]
    names = symbols_of(text)
    chosen = data.draw(st.sets(st.sampled_from(names)) if names else st.just(set()))
    cuts = ["header", *(name for name in names if name in chosen)]
    if close := too_close(text, cuts):
        # Constants may stand closer than a cut allows: refused by name, never cut wrongly.
        with pytest.raises(CutError, match=f"before '{close}' there must be"):
            split(text, cuts)
        return
    pieces = split(text, cuts)
    assert join(list(zip(cuts, pieces, strict=True))) == text
    assert not any(piece.endswith("\n") for piece in pieces)


def test_every_def_and_class_of_the_packages_is_a_possible_cut():
    for path, text in MODULES.items():
        cuts = ["header"]
        for name in symbols_of(text):
            last = name.rpartition(".")[2]
            if f"def {last}(" in text or f"class {last}" in text:
                cuts.append(name)
        assert join(list(zip(cuts, split(text, cuts), strict=True))) == text, path


@pytest.mark.parametrize(
    ("symbols", "message"),
    [
        ([], "the first cell of a file is ::header"),
        (["first"], "the first cell of a file is ::header"),
        (["header", "absent"], "there is no 'absent' in it"),
        (["header", "Box", "first"], "'first' stands before"),
        (["header", "first", "first"], "'first' stands before"),
        (["header", "LIMIT"], "before 'LIMIT' there must be 2 blank line"),
    ],
)
def test_a_wrong_cut_is_refused_by_name(symbols, message):
    with pytest.raises(CutError, match=message):
        split(TOY, symbols)


def test_a_file_without_a_last_newline_is_refused():
    with pytest.raises(CutError, match="must end with one newline"):
        split(TOY.rstrip("\n"), ["header", "first"])


def test_a_line_is_found_in_its_cell():
    symbols = ["header", "first", "second", "Box", "Box.grown"]
    pieces = list(zip(symbols, split(TOY, symbols), strict=True))
    cells = {symbol: ["%%build", *text.splitlines()] for symbol, text in pieces}
    for number, line in enumerate(TOY.splitlines(), 1):
        place = locate(pieces, number)
        assert place is not None
        if line:
            assert cells[place.symbol][place.line - 1] == line
    assert locate(pieces, 0) is None


def test_the_names_that_a_piece_binds():
    symbols = ["header", "first", "second", "Box", "Box.grown"]
    pieces = list(zip(symbols, split(TOY, symbols), strict=True))
    assert bound_names(pieces, "header") == ["m", "path", "sep", "LIMIT"]
    assert bound_names(pieces, "first") == ["first"]
    assert bound_names(pieces, "Box.grown") == ["Box", "TABLE", "OTHER", "LATE"]
    assert bound_names(pieces, "absent") == []


def test_an_empty_file_is_one_piece():
    assert split("", ["header"]) == [""]
    assert join([("header", "")]) == ""
