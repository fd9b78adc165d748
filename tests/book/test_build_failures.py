"""Build cells that fail: the last good file and modules stay, the error points into the cell."""

from pathlib import Path

import pytest
from nanofixtures.toy_course import HELPER, Toy, write_course

HELPER_PATH = "nanoserve/helper.py"
GROW_BY_TEN = "%%build nanoserve/helper.py::grow\ndef grow(x: int) -> Never:\n    return x * 10"
BROKEN = "%%build nanoserve/helper.py::grow\ndef grow(x):\n    return (x"
FAILING = "%%build nanoserve/helper.py::header\nSCALE = 2\nraise RuntimeError('no')"
LEND = "from nanobook.workspace import Workspace\n_ = Workspace().fill()"


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(write_course(tmp_path / "course"), tmp_path / "workspace")


@pytest.mark.parametrize("cell", [BROKEN, FAILING])
def test_a_failing_cell_leaves_the_last_good_file_and_module(toy: Toy, cell: str) -> None:
    results = toy.run(
        *toy.cells("00_1_base"),
        "import inspect, nanoserve.helper as h, sys\nbox, before = Box(1), h",
        cell,
        "print(h is before is sys.modules['nanoserve.helper'], grow(1), type(box) is Box)",
        "import nanoserve; print(nanoserve.helper is h)",
        "print(inspect.getsource(Box.grown))",
        GROW_BY_TEN,
        "print(grow(1))",
    )
    *_, failed, same, parent, source, mended, value = results
    assert failed.error
    assert same.out == "True 2 True\n" and parent.out == "True\n"
    assert "return grow(self.x)" in source.out
    assert not mended.error and value.out == "10\n"


def test_a_failing_first_cell_leaves_no_file(toy: Toy) -> None:
    start = toy.cells("00_1_base")[:2]
    *_, failed, gone = toy.run(*start, FAILING, "import nanoserve.helper")
    assert failed.error.startswith("RuntimeError: no")
    assert gone.error.startswith("ModuleNotFoundError")
    assert not toy.has(HELPER_PATH)


def test_a_user_that_breaks_brings_everything_back(toy: Toy) -> None:
    toy.good(*toy.cells("00_1_base"))
    renamed = "%%build nanoserve/helper.py::grow\ndef grow(x):\n    return 0\n\n\ndel grow"
    *_, failed, value = toy.run(
        *toy.cells("01_user")[:3],
        "import nanoserve.user as u",
        renamed,
        "print(twice(1).x, u.grow(1))",
    )
    assert failed.error.startswith("ImportError")
    assert value.out == "2 2\n"
    assert toy.text(HELPER_PATH) == HELPER


def test_a_syntax_error_names_cell_and_line(toy: Toy) -> None:
    *_, failed = toy.run(*toy.cells("00_1_base"), BROKEN)
    assert failed.error == "SyntaxError: '(' was never closed (helper.py::grow, line 3)"
    assert "return (x" in failed.shown and "%%build nanoserve/helper.py::grow" in failed.shown
    assert "nanobook" not in failed.shown


def test_lines_count_from_the_magic_whatever_stands_first(toy: Toy) -> None:
    spaced = "%%build nanoserve/helper.py::grow\n\n\n# why\ndef grow(x):\n    return (x"
    *_, failed = toy.run(*toy.cells("00_1_base"), spaced)
    assert "::grow, line 6)" in failed.error


def test_an_error_while_importing_points_into_the_cell(toy: Toy) -> None:
    *_, failed = toy.run(*toy.cells("00_1_base"), FAILING)
    assert failed.error == (
        "RuntimeError: no\nin the cell %%build nanoserve/helper.py::header, line 3"
    )
    assert "raise RuntimeError('no')" in failed.shown
    assert "nanobook" not in failed.shown and "importlib" not in failed.shown


def test_an_error_at_run_time_points_into_the_cells(toy: Toy) -> None:
    *_, failed = toy.run(*toy.cells("00_1_base"), "Box(None).grown()")
    assert failed.error.splitlines()[1:] == [
        "in the cell %%build nanoserve/helper.py::grow, line 3"
    ]
    assert "in the cell %%build nanoserve/helper.py::grow, line 3" in failed.shown
    assert "x * SCALE" in failed.shown


def test_a_name_that_the_cell_does_not_define_is_told(toy: Toy) -> None:
    typo = "%%build nanoserve/helper.py::grow\ndef gorw(x):\n    return x"
    *_, failed, value = toy.run(*toy.cells("00_1_base"), typo, "print(grow(1))")
    assert failed.error == "BuildError: the cell builds grow, but does not define it"
    assert value.out == "2\n"


@pytest.mark.parametrize(
    ("first", "message"),
    [
        ("%%build other/x.py::header", "only files in nanoserve/ or kernels/nanokernels/"),
        ("%%build nanoserve/x.txt::header", "is no module's file"),
        ("%%build nanoserve/../x.py::header", "is no module's file"),
        ("%%build nanoserve/helper.py::grow", "run the cell nanoserve/helper.py::header first"),
    ],
)
def test_what_cannot_be_built_is_told(toy: Toy, first: str, message: str) -> None:
    *_, failed = toy.run("%chapter 00_1", f"{first}\nx = 1")
    assert failed.error.startswith("BuildError") and message in failed.error
    assert not [path for path in toy.workspace.rglob("*") if path.suffix in (".py", ".txt")]


def test_packages_from_elsewhere_are_noticed(toy: Toy) -> None:
    """With the reference beside the course, on Python's path."""
    toy.environment["PYTHONPATH"] = str(toy.root)
    sources = toy.cells("00_1_base")
    before, _, package, module, built, *rest = toy.run(
        "import nanoserve.helper",
        "%chapter 00_1",
        "import nanoserve",
        "from nanoserve.user import twice",
        sources[2],
        *sources[1:4],
        "import nanoserve\nprint(nanoserve.__file__, grow(1))",
        "from nanoserve import user",
        "import nanoserve.user",
        "import sys; sys.path.insert(0, '/'); sys.modules.pop('nanoserve.helper')\n"
        f"sys.modules['nanoserve'].__path__ = [{str(toy.root / 'nanoserve')!r}]",
        GROW_BY_TEN,
    )
    assert not before.error
    for ran in (package, module, built):
        assert "nanoserve is not in the workspace yet: its cells are in this notebook" in ran.error
    assert rest[3].out == f"{toy.workspace / 'nanoserve/__init__.py'} 2\n"
    assert (
        rest[4].error
        == rest[5].error
        == ("ModuleNotFoundError: nanoserve.user is not in the workspace yet: it comes in 01_user")
    )
    assert rest[5].shown.splitlines()[-3].startswith("----> 1 import nanoserve.user")
    assert rest[7].error.startswith("ElsewhereError: nanoserve.helper was imported from")


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("grow\ndef grow(x):", "after function definition on line 2 (helper.py::grow, line 2)"),
        ("grow\ndef grow(x):\n    # later\n", "on line 2 (helper.py::grow, line 3)"),
        ("grow\n@grow", "BuildError: the cell builds grow, but does not define it"),
        ("grow\nx = 1\ndef grow(x):\n    '''x", "detected at line 4) (helper.py::grow, line 4)"),
        ("Box.grown\n    def grown(self):", "on line 2 (helper.py::Box.grown, line 2)"),
        (
            "Box.grown\ndef grown(self):\n    return",
            "a method stands indented, as in its class",
        ),
        ("Box\nclass Box:\n    def __init__(self, x):", "on line 3 (helper.py::Box, line 3)"),
        (
            "Box\nclass Box:\n    x = 1\n\nprint(1)",
            "of Box.grown (helper.py::Box, line 5)",
        ),
    ],
)
def test_the_cell_at_fault_is_blamed_and_not_the_one_below(
    toy: Toy, cell: str, message: str
) -> None:
    """Whatever is left open in one cell shows in the file only where the next one begins."""
    *_, failed, value = toy.run(
        *toy.cells("00_1_base"), f"%%build nanoserve/helper.py::{cell}", "print(Box(1).grown())"
    )
    assert message in failed.error and value.out == "2\n"


def test_a_remark_of_the_compiler_is_shown_once(toy: Toy) -> None:
    source = "import warnings\nwarnings.simplefilter('always')"
    odd = "%%build nanoserve/helper.py::grow\ndef grow(x):\n    return x is 3"
    *_, built = toy.good(*toy.cells("00_1_base"), source, odd)
    assert built.out.count("SyntaxWarning") == 1


def test_a_failing_first_cell_of_a_lent_file_mixes_nothing(toy: Toy) -> None:
    header = toy.cells("01_user")[1]
    toy.good(*toy.cells("00_1_base"))
    *_, failed, lent, built, value = toy.run(
        "%chapter 01",
        LEND,
        f"{header}\nraise RuntimeError('no')",
        "import nanoserve.user",
        header,
        "import nanoserve.user as u\nprint(hasattr(u, 'twice'), u.Box)",
    )
    assert failed.error.startswith("RuntimeError: no")
    assert "nanoserve.user is not in the workspace yet" in lent.error
    assert not built.error and value.out.startswith("False <class 'nanoserve.helper.Box'>")
    assert "def twice" not in toy.text("nanoserve/user.py")


def test_what_a_failing_import_has_loaded_leaves_no_trace(toy: Toy) -> None:
    extra = "%%build nanoserve/extra.py::header\nfrom nanoserve.helper import SCALE"
    failing = (
        "%%build nanoserve/helper.py::Box\nclass Box: ...\n\n\nfrom nanoserve import extra\n1 / 0"
    )
    *_, built, failed, left = toy.run(
        *toy.cells("00_1_base")[:3],
        extra,
        "import sys, nanoserve\ndel sys.modules['nanoserve.extra'], nanoserve.extra",
        *toy.cells("00_1_base")[3:4],
        failing,
        "print(hasattr(nanoserve, 'extra'), 'nanoserve.extra' in sys.modules)",
    )
    assert not built.error and failed.error.startswith("ZeroDivisionError")
    assert left.out == "False False\n"


def test_a_line_that_ends_a_class_too_early_is_blamed(toy: Toy) -> None:
    more = "%%build nanoserve/helper.py::Box.more\n    def more(self):\n        return 7"
    stray = (
        "%%build nanoserve/helper.py::Box.grown\n    def grown(self):\n        return 7\nprint(1)"
    )
    *_, failed = toy.run(*toy.cells("00_1_base"), more, stray)
    assert failed.error == (
        "SyntaxError: this line ends the class, which goes on in the cell of Box.more "
        "(helper.py::Box.grown, line 4)"
    )
    assert "print(1)" in failed.shown
