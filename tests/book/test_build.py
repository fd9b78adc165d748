"""Build cells in real shells: toy modules and Triton kernels through build, edit and restart."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from nanobook import notebook as nb
from nanofixtures.toy_course import FILES, HELPER, Toy, cells, write_course

HELPER_PATH = "nanoserve/helper.py"
GROW_BY_TEN = "%%build nanoserve/helper.py::grow\ndef grow(x: int) -> Never:\n    return x * 10"
BROKEN = "%%build nanoserve/helper.py::grow\ndef grow(x):\n    return (x"
FAILING = "%%build nanoserve/helper.py::header\nSCALE = 2\nraise RuntimeError('no')"
LONGER_SCALED = """\
%%build kernels/nanokernels/kern.py::scaled
# A piece
# that has
# grown.
@triton.jit
def scaled(x):
    return x * 7
"""


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(write_course(tmp_path / "course"), tmp_path / "workspace")


@pytest.fixture
def kernels(toy: Toy) -> Toy:
    pytest.importorskip("triton")
    return toy


def same_length_later(text: str) -> str:
    """A cell that builds `grow` with another factor of one digit."""
    return f"%%build nanoserve/helper.py::grow\ndef grow(x: int) -> Never:\n    return x * {text}"


# -- built, and built again ---------------------------------------------------------------------


def test_the_cells_make_the_packages_files(toy: Toy) -> None:
    toy.good(*toy.cells("00_1_base"))
    for path in (HELPER_PATH, "nanoserve/__init__.py", "nanoserve/py.typed"):
        assert toy.text(path) == FILES[path]


def test_what_a_cell_binds_and_prints(toy: Toy) -> None:
    start = [*toy.cells("00_1_base")]
    *built, value, annotations, name = toy.good(
        *start, "Box(3).grown()", "sorted(grow.__annotations__.items())", "Box.__module__"
    )
    assert [ran.out for ran in built[2:]] == [
        "built nanoserve/helper.py::header · 5 lines\n",
        "built nanoserve/helper.py::grow · 2 lines\n",
        "built nanoserve/helper.py::Box · 5 lines\n",
        "built nanoserve/helper.py::Box.grown · 2 lines\n",
    ]
    assert value.out.endswith("6\n")
    # `Never` exists nowhere: the header's `from __future__ import annotations` reached the cell.
    assert "[('return', 'Never'), ('x', 'int')]" in annotations.out
    assert "'nanoserve.helper'" in name.out


def test_an_edit_reaches_modules_that_use_it_and_the_notebooks_names(toy: Toy) -> None:
    toy.good(*toy.cells("00_1_base"))
    user = toy.cells("01_user")
    *_, edit, values = toy.good(
        *user[:3],
        "import nanoserve.helper as h\nfrom nanoserve.helper import grow as g, grow as _g, SCALE",
        "from nanoserve.user import grow as by_way\nold = h",
        GROW_BY_TEN,
        "print(twice(1).x, g(1), _g(1), by_way(1), h.grow(1), old is h)",
    )
    assert "imported anew: nanoserve.user" in edit.out
    assert values.out == "10 10 10 10 10 True\n"


def test_a_constant_is_bound_anew_and_the_readers_own_names_are_not(toy: Toy) -> None:
    header = "%%build nanoserve/helper.py::header\n"
    header += HELPER.partition("\n\n\n")[0].replace("SCALE = 2", "import math\nSCALE = 5")
    back = "%%build nanoserve/helper.py::header\n" + HELPER.partition("\n\n\n")[0]
    *_, values, again, last = toy.good(
        *toy.cells("00_1_base"),
        "from nanoserve.helper import SCALE\ntwo = 2\nmine = [SCALE]",
        header,
        "print(SCALE, two, mine, math.pi > 3)",
        back,
        "print(SCALE, math.pi > 3)",
    )
    assert values.out == "5 2 [2] True\n"
    assert "stale" not in again.out
    assert last.out == "2 True\n"


def test_old_instances_are_named_and_new_ones_pickle(toy: Toy) -> None:
    *_, edit, old, new = toy.good(
        *toy.cells("00_1_base"),
        "import functools, pickle\nbox = Box(1)\nmany = {'a': [box]}\nmethod = box.grown\n"
        "class Mine(Box): ...\npart = functools.partial(box.grown)\nnumber = 3",
        "box",
        GROW_BY_TEN,
        "try:\n    pickle.dumps(box)\nexcept pickle.PicklingError as error:\n    print('stale')",
        "print(pickle.loads(pickle.dumps(Box(2))).grown())",
    )
    line = edit.out.splitlines()[-1]
    assert line == (
        "stale, make them again: box (Box), many (Box), method (Box), Mine (Box), part (Box)"
    )
    assert old.out == "stale\n"
    assert new.out == "20\n"


def test_source_is_right_after_a_symbol_above_has_grown(toy: Toy) -> None:
    longer = "%%build nanoserve/helper.py::grow\ndef grow(x):\n    x = x + 0\n    x = x + 0\n"
    *_, ran = toy.good(
        *toy.cells("00_1_base"),
        longer + "    return x",
        "import inspect\nprint(inspect.getsource(Box.grown), inspect.getsource(grow))",
    )
    assert "return grow(self.x)" in ran.out and "x = x + 0" in ran.out
    assert "class Box" not in ran.out


def test_edits_of_the_same_length_within_a_second_are_all_seen(toy: Toy) -> None:
    edits = [same_length_later(str(n)) for n in range(3, 9)]
    sources = [line for edit in edits for line in (edit, "print(grow(1))")]
    results = toy.good(*toy.cells("00_1_base"), *sources)[-len(sources) :]
    assert [ran.out for ran in results[1::2]] == [f"{n}\n" for n in range(3, 9)]
    assert toy.good("%chapter 00_1", "import nanoserve.helper as h\nprint(h.grow(1))")[1].out == (
        "8\n"
    )


def test_running_a_cell_again_changes_nothing(toy: Toy) -> None:
    sources = toy.cells("00_1_base")
    *_, again, same = toy.good(*sources, "box = Box(1)", sources[3], "print(type(box) is Box)")
    assert "stale" not in again.out
    assert same.out == "True\n"


def test_a_header_with_its_cells_below_it_keeps_them(toy: Toy) -> None:
    sources = toy.cells("00_1_base")
    header = sources[2].replace("SCALE = 2", "SCALE = 3")
    *_, value = toy.good(*sources, header, "print(Box(1).grown())")
    assert value.out == "3\n"
    assert toy.text(HELPER_PATH) == HELPER.replace("SCALE = 2", "SCALE = 3")


def test_an_extra_method_goes_to_its_class_and_an_extra_function_to_the_end(toy: Toy) -> None:
    extra = "%%build nanoserve/helper.py::Box.more\n    def more(self):\n        return 7"
    function = "%%build nanoserve/helper.py::last\ndef last():\n    return 8"
    *_, value = toy.good(*toy.cells("00_1_base"), function, extra, "print(Box(1).more(), last())")
    assert value.out == "7 8\n"
    text = toy.text(HELPER_PATH)
    assert text.index("def grown") < text.index("def more") < text.index("def last")


def test_a_package_folder_built_again_keeps_its_modules(toy: Toy) -> None:
    change = "%%build nanoserve/__init__.py::header\n'''Toy.'''\n\nNAME = 'mine'"
    *_, value = toy.good(
        *toy.cells("00_1_base"),
        "import nanoserve\nimport nanoserve.helper",
        change,
        "print(nanoserve.NAME, nanoserve.helper.grow(1))",
    )
    assert value.out == "mine 2\n"


# -- failures -----------------------------------------------------------------------------------


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
        assert "nanoserve is not in the workspace yet: it comes in 00_1_base" in ran.error
    assert rest[3].out == f"{toy.workspace / 'nanoserve/__init__.py'} 2\n"
    assert rest[4].error.startswith("ImportError: cannot import name 'user'")
    assert rest[5].error == (
        "ModuleNotFoundError: nanoserve.user is not in the workspace yet: it comes in 01_user"
    )
    assert rest[5].shown.splitlines()[-3].startswith("----> 1 import nanoserve.user")
    assert rest[7].error.startswith("ElsewhereError: nanoserve.helper was imported from")


# -- Triton -------------------------------------------------------------------------------------


def test_a_helper_grows_and_a_kernel_below_it_is_launched(kernels: Toy) -> None:
    *_, ran = kernels.good(*kernels.cells("00_2_kernels"), LONGER_SCALED, "print(launch())")
    assert ran.out == "[7.0, 7.0, 7.0, 7.0]\n"


def test_a_redefined_jit_helper_reaches_its_callers(kernels: Toy) -> None:
    results = kernels.good(
        *kernels.cells("00_2_kernels"),
        *kernels.cells("01_user")[4:],
        "k, o = kernel, outer",
        "print(launch(), call())",
        LONGER_SCALED,
        "print(launch(), call())",
        "import torch\nx, y = torch.ones(4), torch.ones(4)\n"
        "kernel[(1,)](x, 4)\nouter[(1,)](y, 4)\nprint(x.tolist(), y.tolist())",
        "import nanokernels.kern as m, nanokernels.caller as c\n"
        "print(kernel is m.kernel is k, outer is c.outer is o, c.scaled is m.scaled is scaled)",
    )
    *_, before, edit, after, direct, same = results
    assert before.out == f"{[2.0] * 4} {[3.0] * 4}\n"
    assert "imported anew: nanokernels.caller" in edit.out
    assert after.out == direct.out == f"{[7.0] * 4} {[8.0] * 4}\n"
    assert same.out == "True True True\n"


# -- processes and restarts ---------------------------------------------------------------------


def test_a_spawned_process_runs_the_workspaces_code(toy: Toy, tmp_path: Path) -> None:
    source = """
        import multiprocessing
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            print(pool.map(grow, [1, 2]))
        import subprocess, sys
        code = "import nanoserve.helper as h; print(h.__file__, h.grow(1))"
        print(subprocess.check_output([sys.executable, "-P", "-c", code], text=True, cwd="/"))
    """
    *_, ran = toy.good(*toy.cells("00_1_base"), GROW_BY_TEN, dedent(source))
    assert ran.out.splitlines()[:2] == ["[10, 20]", f"{toy.workspace / HELPER_PATH} 10"]


def test_a_restart_in_the_middle_loses_nothing(toy: Toy) -> None:
    sources = toy.cells("00_1_base")
    toy.good(*sources, GROW_BY_TEN)
    banner, value, *rest = toy.good(
        "%chapter 00_1",
        "from nanoserve.helper import Box\nprint(Box(1).grown())",
        sources[4],
        "print(Box(2).grown())",
    )
    assert "built here before: nanoserve/py.typed, helper" in banner.out
    assert value.out == "10\n" and rest[-1].out == "20\n"


@pytest.mark.slow
def test_nbval_runs_it_from_another_folder(kernels: Toy, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    workspace = tmp_path / "workspace"
    course = kernels.root
    for stem, last in (("00_1_base", "assert grow(2) == 4"), ("00_2_kernels", "launch()")):
        path = course / "chapters" / f"{stem}.ipynb"
        notebook = nb.read(path)
        notebook.cells.append(nb.Cell("code", last))
        nb.write(path, notebook)
        env = {k: v for k, v in kernels.env().items() if k != "NANOBOOK_ROOT"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax"]
            + ["--nbval-current-env", str(path)],
            cwd=elsewhere,
            env=env,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{len(cells(course, stem))} passed" in re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    for path, text in FILES.items():
        if not path.endswith(("user.py", "table.py", "caller.py", "server/__init__.py")):
            assert (workspace / path).read_text() == text
    assert os.listdir(elsewhere) == []
