"""Notebooks follow the packages: sync writes, check tells every way in which they can differ."""

import re
from pathlib import Path

import pytest
from nanobook import notebook as nb
from nanobook.chapters import load_map, package_files
from nanobook.rebuild import Course
from nanobook.sync import check, shares, sync

NORM = """\
'''Norms.'''

import math


def rms(x):
    return x


def other():
    return 1
"""
PLAN = '"""Plans."""\n\n\ndef plan():\n    return 2\n'
MAP = """
uncounted = ["nanoserve.table"]
[[chapter]]
number = 0
name = "first"
title = "First"
idea = "One idea."
written = true
built = ["nanoserve.layers.norm"]
provided = ["nanoserve.table"]
[[chapter]]
number = 1
name = "second"
title = "Second"
idea = "Another."
built = ["nanokernels.plan"]
provided = []
"""


@pytest.fixture
def toy(tmp_path):
    """A course of two chapters, the second unwritten, and its packages."""
    files = {
        "nanoserve/__init__.py": '"""Toy."""\n',
        "nanoserve/py.typed": "",
        "nanoserve/layers/__init__.py": '"""Layers."""\n',
        "nanoserve/layers/norm.py": NORM,
        "nanoserve/table.py": '"""A table."""\n\nX = "é"\n',
        "kernels/nanokernels/__init__.py": '"""Kernels."""\n',
        "kernels/nanokernels/plan.py": PLAN,
    }
    for path, text in files.items():
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    (tmp_path / "chapters").mkdir()
    lines = [
        "%provide nanoserve/__init__.py nanoserve/py.typed nanoserve/table.py",
        "%%build nanoserve/layers/__init__.py::header",
        "%%build nanoserve/layers/norm.py::header",
        "%%build nanoserve/layers/norm.py::rms",
    ]
    write(tmp_path, "00_first", lines)
    (tmp_path / "map.toml").write_text(MAP)
    return tmp_path


def write(root, stem, lines, **nanobook):
    cells = [nb.Cell("code", line) for line in lines]
    nb.write(root / "chapters" / f"{stem}.ipynb", nb.Notebook(cells, nanobook))


def course_map(root, **changes):
    text = (root / "map.toml").read_text()
    for old, new in changes.items():
        text = text.replace(old, new)
    (root / "map.toml").write_text(text)
    return load_map(root / "map.toml")


def edit(root, path, old, new):
    text = (root / path).read_text(encoding="utf-8")
    assert old in text
    (root / path).write_text(text.replace(old, new), encoding="utf-8")


def test_sync_fills_the_cells_and_makes_the_placeholder(toy):
    changed, problems = sync(toy, course_map(toy))
    assert problems == []
    assert changed == ["chapters/01_second.ipynb", "chapters/00_first.ipynb"]
    assert check(toy, course_map(toy)) == []
    course = Course.read(toy)
    assert course.files == package_files(toy)
    assert course.symbols["nanoserve/layers/norm.py"] == ["header", "rms"]
    assert course.pieces("nanoserve/layers/norm.py")[1][1].endswith("return 1")
    assert course.placeholders == {"01_second"}
    assert course.before("01_second") == course.of("00_first")
    assert sync(toy, course_map(toy)) == ([], [])
    assert (toy / "chapters/00_first.ipynb").read_text(encoding="utf-8").count("é") == 1


def test_shares_count_lines_without_the_tables(toy):
    sync(toy, course_map(toy))
    first, second = shares(Course.read(toy), course_map(toy)).values()
    assert (first.built, first.provided, first.placeholder) == (12, 1, 0)
    assert (second.built, second.provided, second.placeholder) == (0, 0, 6)
    assert str(first) == (
        "built  92% (12 lines), provided   8% (1 lines), placeholder   0% (0 lines)"
    )


def test_an_edit_of_the_package_is_drift_until_sync(toy):
    sync(toy, course_map(toy))
    edit(toy, "nanoserve/layers/norm.py", "return x", "return 2 * x")
    (problem,) = check(toy, course_map(toy))
    assert "nanoserve/layers/norm.py and its cells differ" in problem
    assert "-    return x\n+    return 2 * x" in problem
    sync(toy, course_map(toy))
    assert check(toy, course_map(toy)) == []


def test_an_edit_of_a_provided_file_is_drift_too(toy):
    sync(toy, course_map(toy))
    edit(toy, "nanoserve/table.py", "é", "è")
    (problem,) = check(toy, course_map(toy))
    assert "nanoserve/table.py and its cells differ" in problem


def test_an_edit_of_a_cell_is_drift(toy):
    sync(toy, course_map(toy))
    edit(toy, "chapters/00_first.ipynb", "return 1", "return 3")
    (problem,) = check(toy, course_map(toy))
    assert "-    return 3\n+    return 1" in problem


def change_home(toy):
    write(toy, "01_second", ["%provide kernels/nanokernels/__init__.py nanoserve/table.py"])


def second_home(toy):
    write(toy, "00_second_part", ["%provide nanoserve/table.py"])


def twice(toy):
    lines = ["%%build nanoserve/table.py::header", "%%build nanoserve/table.py::header"]
    write(toy, "00_second_part", lines)


def twice_in_one(toy):
    lines = ["%%build nanoserve/other.py::header", "%%build nanoserve/other.py::header"]
    write(toy, "00_second_part", lines)


def header_missing(toy):
    write(toy, "00_0_part", ["%%build nanoserve/layers/norm.py::rms"])


def new_file(toy):
    (toy / "nanoserve/fresh.py").write_text('"""New."""\n')


def new_init(toy):
    (toy / "nanoserve/layers/inner.txt").write_text("data")


def gone(toy):
    (toy / "nanoserve/layers/norm.py").unlink()


def untidy(toy):
    path = toy / "chapters/00_first.ipynb"
    path.write_text(path.read_text().replace('"id"', ' "id"', 1))


def written_but_placeholder(toy):
    course_map(toy, **{'idea = "Another."': 'idea = "Another."\nwritten = true'})


def not_written_but_there(toy):
    course_map(toy, **{"written = true": "written = false"})


def provided_though_built(toy):
    lines = [
        "%provide nanoserve/__init__.py nanoserve/py.typed nanoserve/table.py",
        "%provide nanoserve/layers/__init__.py nanoserve/layers/norm.py",
    ]
    write(toy, "00_first", lines)
    sync(toy, course_map(toy))


def long_cell(toy):
    body = "".join(f"    x = {i}\n" for i in range(80))
    edit(toy, "nanoserve/layers/norm.py", "    return x\n", body)
    sync(toy, course_map(toy))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (second_home, "nanoserve/table.py has two homes: 00_first and 00_second_part"),
        (twice, "nanoserve/table.py has two homes"),
        (twice_in_one, "00_second_part: nanoserve/other.py::header comes twice"),
        (header_missing, "the first cell of nanoserve/layers/norm.py must be ::header"),
        (change_home, "two homes"),
        (new_file, "nanoserve/fresh.py has no cell|belongs to"),
        (new_init, "nanoserve/layers/inner.txt has no cell: .* must provide it"),
        (gone, "00_first holds nanoserve/layers/norm.py, but the packages do not"),
        (untidy, "00_first.ipynb is not in its normal form"),
        (written_but_placeholder, "chapter 1 is written, yet 01_second is a placeholder"),
        (not_written_but_there, "chapter 0 has notebooks, but is not marked written"),
        (provided_though_built, "is provided in 00_first, but listed as built"),
        (provided_though_built, "chapter 0 builds 0% of its lines"),
        (long_cell, r"norm.py::rms has \d+ lines, more than a cell should"),
    ],
)
def test_check_names_each_fault(toy, fault, message):
    sync(toy, course_map(toy))
    assert check(toy, course_map(toy)) == []
    fault(toy)
    problems = "\n".join(check(toy, course_map(toy)))
    assert re.search(message, problems), problems


def test_sync_names_what_it_cannot_fill_and_goes_on(toy):
    lines = [
        "%provide nanoserve/absent.py",
        "%%build nanoserve/layers/norm.py::header",
        "%%build nanoserve/layers/norm.py::nowhere",
        "%provide nanoserve/table.py",
    ]
    write(toy, "00_first", lines)
    _, problems = sync(toy, course_map(toy))
    assert problems == [
        "00_first.ipynb: nanoserve/absent.py: there is no such file in the packages",
        "00_first.ipynb: nanoserve/layers/norm.py: there is no 'nowhere' in it (names: rms, other)",
    ]
    assert Course.read(toy).files["nanoserve/table.py"].endswith('X = "é"\n')


def test_the_placeholder_goes_when_its_chapter_is_written(toy):
    sync(toy, course_map(toy))
    written_but_placeholder(toy)
    changed, _ = sync(toy, course_map(toy))
    assert changed == ["chapters/01_second.ipynb"]
    assert not (toy / "chapters/01_second.ipynb").exists()


def test_a_file_of_a_folder_belongs_to_the_first_chapter_in_it(toy):
    course = course_map(toy)
    for path, number in [
        ("nanoserve/__init__.py", 0),
        ("nanoserve/py.typed", 0),
        ("kernels/nanokernels/__init__.py", 1),
        ("nanoserve/layers/__init__.py", 0),
    ]:
        owner = course.owner(path)
        assert owner is not None and owner.number == number, path
    assert course.owner("nanoserve/nowhere/x.py") is None


def test_names_that_only_begin_alike_are_counted(toy):
    course = course_map(toy)
    assert course.counted("nanoserve/tables.py")
    assert not course.counted("nanoserve/table.py")


def test_the_toy_lies_where_it_should(toy):
    # The faults above would prove nothing on the repository's own files.
    assert Path(__file__).resolve().parents[2] not in toy.resolve().parents
