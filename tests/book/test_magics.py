"""The notebook's commands in a real shell: what they print, and what they refuse."""

import re
from pathlib import Path

import pytest
from nanofixtures.toy_course import FILES, Ran, Toy, write_course

CHECKS = """
from nanobook.grading import Wrong, chapter_check, grader

@grader("00.1", answer="double", hints=["Twice.", "x * 2"])
def double(double):
    if double(3) != 6:
        raise Wrong(f"double(3) is {double(3)}")

@grader("00.2", answer=("a", "b"), hints=[])
def both(a, b):
    if a != b:
        raise Wrong("a and b differ")

@chapter_check(0)
def code():
    from nanoserve.helper import Box
    if Box(1).grown() != 2:
        raise Wrong(f"a box of 1 grows to {Box(1).grown()}")
"""


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    root = write_course(tmp_path / "course")
    (root / "exercises/checks").mkdir(parents=True)
    (root / "exercises/checks/chapter_00.py").write_text(CHECKS)
    return Toy(root, tmp_path / "workspace")


def said(ran: Ran) -> str:
    """All that a reader sees of a cell."""
    return ran.out + ran.shown


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%chapter", "%chapter NUMBER [--reference] [--reset]"),
        ("%chapter 00 01", "%chapter NUMBER [--reference] [--reset]"),
        ("%chapter 00 --all", "%chapter NUMBER [--reference] [--reset]"),
        ("%chapter 9", "there is no chapter '9'; the notebooks are 00_1_base, 00_2_kernels,"),
        ("%%build nanoserve/helper.py\nx = 1", "%%build path.py::Symbol"),
        ("%%build nanoserve/helper.py::\nx = 1", "%%build path.py::Symbol"),
        ("%%build nanoserve/helper.py::a b\nx = 1", "%%build path.py::Symbol"),
        ("%%build nanoserve/helper.py::header\nx = 1", "run the cell with %chapter first"),
        ("%provide", "%provide path.py ..."),
        ("%provide nanoserve/table.py", "run the cell with %chapter first"),
    ],
)
def test_usage(toy: Toy, cell: str, message: str) -> None:
    (ran,) = toy.run(cell)
    assert ran.error.startswith("UsageError") and message in ran.error
    assert ran.shown.startswith("UsageError: ") and len(ran.shown.splitlines()) == 1


def test_what_the_commands_print_is_short_and_the_same_every_time(toy: Toy) -> None:
    sources = [
        *toy.cells("00_1_base"),
        *toy.cells("00_2_kernels")[:2],
        "%provide nanoserve/table.py",
        "%chapter 00_1 --reset",
        "%chapter 00_1 --reference",
        "def double(x): return 2 * x",
        "%check 00.1",
        "%hint 00.1",
    ]
    first = toy.run(*sources)
    second = Toy(toy.root, toy.workspace.with_name("second")).run(*sources)
    for source, one, two in zip(sources, first, second, strict=True):
        assert one == two, source
        assert len(one.out.splitlines()) <= 4, one.out
        assert str(toy.root.parent) not in said(one)
        assert not re.search(r"\d:\d\d|0x[0-9a-f]{4}", said(one))


def test_chapter_and_provide(toy: Toy) -> None:
    first, provided, again, banner, unknown, kept = toy.run(
        "%chapter 00_1",
        "%provide nanoserve/__init__.py nanoserve/py.typed",
        "%provide nanoserve/table.py",
        "%chapter 4",
        "%provide nanoserve/nowhere.py",
        "import nanoserve.server as s; print(s.__doc__)",
    )
    assert first.out == "00_1_base: the workspace is ready\n"
    assert provided.out == "provided 2 files\n" and again.out == "provided 1 file\n"
    assert toy.text("nanoserve/py.typed") == ""
    assert banner.out.splitlines()[0] == "04_serve: the workspace is ready"
    assert unknown.error == "UsageError: nanoserve/nowhere.py is in no package and in no notebook"
    # A placeholder's own files come with its cells, like any other notebook's.
    assert kept.error.startswith("ModuleNotFoundError: nanoserve.server is not in the workspace")
    toy.good(*toy.cells("04_serve"), "import nanoserve.server")
    assert toy.text("nanoserve/server/__init__.py") == FILES["nanoserve/server/__init__.py"]


def test_a_provided_package_folder_replaces_a_loaded_one(toy: Toy) -> None:
    *_, ran = toy.good(
        *toy.cells("00_1_base"),
        "%%build nanoserve/__init__.py::header\nNAME = 1",
        "import nanoserve.helper\nprint(nanoserve.NAME)",
        "%chapter 00_1 --reset",
        *toy.cells("00_1_base")[1:],
        "import nanoserve\nprint(hasattr(nanoserve, 'NAME'), nanoserve.helper.grow(1))",
    )
    assert ran.out == "False 2\n"


def test_another_notebook_takes_the_workspace(toy: Toy) -> None:
    other = "from nanobook.workspace import Workspace; _ = Workspace().prepare('01_user')"
    *_, build, provide, again, built = toy.run(
        *toy.cells("00_1_base"),
        other,
        toy.cells("00_1_base")[2],
        "%provide nanoserve/table.py",
        "%chapter 00_1",
        toy.cells("00_1_base")[2],
    )
    message = "UsageError: the workspace is 01_user's now: run the cell with %chapter again"
    assert build.error == provide.error == message
    assert not again.error and not built.error


def test_exercises_need_no_chapter(toy: Toy) -> None:
    source = "def double(x):\n    raise NotImplementedError('00.1: double')"
    missing, _, stub, _, wrong, _, raising, right = toy.run(
        "%check 00.1",
        source,
        "%check 00.1",
        "double = lambda x: x",
        "%check 00.1",
        "def double(x):\n    return x / 0",
        "%check 00.1",
        "double = lambda x: 2 * x\n%check 0.1",
    )
    assert said(missing) == "00.1: there is no double yet: run the cell of the exercise"
    assert said(stub) == "00.1 is not written yet (00.1: double)"
    assert said(wrong) == "00.1 is not right yet: double(3) is 3"
    assert said(raising) == (
        "00.1: your code raised ZeroDivisionError: division by zero\n"
        "  line 2 of double: return x / 0"
    )
    for ran in (missing, stub, wrong, raising):
        assert ran.error.startswith("CheckFailed: 00.1")
    assert right.out == "00.1 passed\n" and not right.error


@pytest.mark.parametrize("command", ["%check", "%hint"])
@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("", "01.2 names an exercise, 01 a chapter; '' does not"),
        ("one", "01.2 names an exercise, 01 a chapter; 'one' does not"),
        ("00.9", "there is no exercise 00.9; there are 00.1, 00.2"),
        ("07.1", "chapter 7 has no exercises"),
    ],
)
def test_an_unknown_exercise(toy: Toy, command: str, what: str, message: str) -> None:
    (ran,) = toy.run(f"{command} {what}")
    assert said(ran) == message


def test_hints_come_one_after_another(toy: Toy) -> None:
    results = toy.good(*["%hint 00.1"] * 4, "%hint 00.2")
    end = "no more hints; the solution is in exercises/solutions/00_1.py\n"
    assert [ran.out for ran in results] == [
        "hint 1 of 2: Twice.\n",
        "hint 2 of 2: x * 2\n",
        end,
        end,
        end.replace("00_1", "00_2"),
    ]


def test_a_readers_own_error_is_shown_whole(toy: Toy) -> None:
    (ran,) = toy.run("def f():\n    return 1 / 0\nf()")
    assert "return 1 / 0" in ran.shown and "ZeroDivisionError" in ran.shown


def test_loading_twice_does_no_harm(toy: Toy) -> None:
    *_, ran, again = toy.good(
        "%reload_ext nanobook", *toy.cells("00_1_base"), "%reload_ext nanobook", "%chapter 00_1"
    )
    assert not ran.error and "built here before" in again.out
