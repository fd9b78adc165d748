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


def test_what_is_said_stays_short(toy: Toy) -> None:
    users = [
        f"%%build nanoserve/u{n}.py::header\nfrom nanoserve.helper import Box" for n in range(9)
    ]
    made = "; ".join(f"b{n} = Box({n})" for n in range(12))
    *_, edit = toy.good(*toy.cells("00_1_base"), *users, made, GROW_BY_TEN)
    assert edit.out.splitlines() == [
        "built nanoserve/helper.py::grow · 2 lines · imported anew: "
        "nanoserve.u0, nanoserve.u1, nanoserve.u2 and 6 more",
        "stale, make them again: " + ", ".join(f"b{n} (Box)" for n in range(8)) + " and 4 more",
    ]


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
