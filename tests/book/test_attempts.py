"""What learners do to notebooks and files: the course goes on, and nothing of theirs is lost."""

import shutil
from pathlib import Path

import pytest
from nanobook import notebook as nb
from nanobook.attempts import cut, read_course
from nanobook.notebook import NotebookError
from nanobook.progress import report
from nanobook.rebuild import Course, CourseError
from nanobook.workspace import Workspace, digest
from nanofixtures.toy_course import FILES, HELPER, Toy, write_course

ROOT = Path(__file__).resolve().parents[2]
HELPER_PATH = "nanoserve/helper.py"
MINE = HELPER.replace("x * SCALE", "x * 10")
GROW_BY_TEN = "%%build nanoserve/helper.py::grow\ndef grow(x: int) -> Never:\n    return x * 10"
TRIAL = "def grow(x):\n    return 1"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    toy = Toy(write_course(tmp_path / "course"), tmp_path / "workspace")
    monkeypatch.setenv("NANOBOOK_ROOT", str(toy.root))
    monkeypatch.setenv("NANOBOOK_WORKSPACE", str(toy.workspace))
    return toy


def add_cell(toy: Toy, stem: str, source: str) -> None:
    """What a learner adds at the end of a notebook, and saves."""
    path = toy.root / "chapters" / f"{stem}.ipynb"
    notebook = nb.read(path)
    notebook.cells.append(nb.Cell("code", source))
    nb.write(path, notebook)


# -- notebooks ----------------------------------------------------------------------------------


def test_where_nobody_has_tried_anything_it_is_the_course() -> None:
    assert read_course(ROOT) == (Course.read(ROOT), {})


@pytest.mark.parametrize("with_packages", [True, False])
def test_the_toy_course_too(tmp_path: Path, with_packages: bool) -> None:
    root = write_course(tmp_path / "course", with_packages)
    assert read_course(root) == (Course.read(root), {})


@pytest.mark.parametrize("name", ["{}-Copy1", "{} copy", "{} (1)", "{}_backup (copy)"])
@pytest.mark.parametrize("stem", ["00_1_base", "01_user"])
def test_a_copy_of_a_notebook_is_no_chapter(toy: Toy, stem: str, name: str) -> None:
    before = read_course(toy.root)
    original = toy.root / "chapters" / f"{stem}.ipynb"
    shutil.copy(original, original.with_name(f"{name.format(stem)}.ipynb"))
    assert read_course(toy.root) == before
    assert Workspace().stem_of(stem[:2]) == stem


@pytest.mark.parametrize("stem", ["00_1_base", "00_2_kernels", "01_user"])
@pytest.mark.parametrize(
    "source",
    [
        f"%%build nanoserve/helper.py::grow\n{TRIAL}",
        f"%%build nanoserve/helper.py::header\n{TRIAL}",
        f"%%build nanoserve/helper.py\n{TRIAL}",
        "%%build",
        "%%build nanoserve/mine.py::first\nfirst = 1",
        "%%build other/mine.py::header\nfirst = 1",
        "%%build nanoserve/table.py::more\nmore = 1",
        "%provide nanoserve/helper.py",
        "%provide nanoserve/nowhere.py",
        "%provide kernels/nanokernels/caller.py",
    ],
)
def test_a_trial_cell_changes_nothing_of_the_course(toy: Toy, stem: str, source: str) -> None:
    before, _ = read_course(toy.root)
    add_cell(toy, stem, source)
    after, _ = read_course(toy.root)
    assert after.files == before.files
    if "caller" not in source:  # provided before its home: the first place counts
        assert after.homes == before.homes and after.order == before.order
    (banner,) = toy.good("%chapter 00_1")
    assert banner.out.startswith("00_1_base: the workspace is ready")


def test_a_file_of_the_learners_own_can_be_built_in_a_notebook(toy: Toy) -> None:
    mine = ["%%build nanoserve/mine.py::header\nONE = 1", "%%build nanoserve/mine.py::f\nf = ONE"]
    for source in mine:
        add_cell(toy, "00_1_base", source)
    toy.good(*toy.cells("00_1_base"))
    _, value = toy.good("%chapter 01", "from nanoserve.mine import f; print(f)")
    assert value.out == "1\n"


def test_cells_go_on_where_a_notebook_holds_trials(toy: Toy) -> None:
    for source in (f"%%build nanoserve/helper.py::grow\n{TRIAL}", "%%build"):
        add_cell(toy, "00_1_base", source)
    *others, malformed = toy.run(*toy.cells("00_1_base"))
    assert not any(ran.error for ran in others)
    assert malformed.error.startswith("UsageError: %%build")
    assert "return 1" in toy.text(HELPER_PATH)
    Workspace().prepare("01_user")
    assert toy.text(HELPER_PATH) == HELPER


def test_a_notebook_that_cannot_be_read_stops_only_those_that_stand_on_it(toy: Toy) -> None:
    (toy.root / "chapters/01_user.ipynb").write_text("<<<<<<< mine")
    *_, built = toy.good(*toy.cells("00_1_base"))
    assert built.out.startswith("built")
    for stem in ("01", "04"):
        with pytest.raises(NotebookError, match=r"01_user\.ipynb is not a notebook"):
            Workspace().prepare(Workspace().stem_of(stem))
        (ran,) = toy.run(f"%chapter {stem}")
        assert ran.error.startswith("UsageError: 01_user.ipynb is not a notebook")
    assert "01_user.ipynb is not a notebook" in report(Workspace())


# -- files --------------------------------------------------------------------------------------


def test_an_edit_of_a_file_that_was_never_built_survives_its_cells(toy: Toy) -> None:
    Workspace().prepare("01_user")
    (toy.workspace / HELPER_PATH).write_text(MINE)
    assert Workspace().prepare("01_user").saved == [HELPER_PATH]
    toy.good(*toy.cells("00_1_base"))
    assert toy.text(HELPER_PATH) == HELPER
    backups = toy.workspace / ".nanobook/backups"
    assert MINE in [file.read_text() for file in backups.rglob("helper.py")]


def test_a_checked_version_survives_its_notebooks_cells(toy: Toy) -> None:
    workspace = Workspace()
    workspace.prepare("00_1_base")
    workspace.write_own(HELPER_PATH, MINE)
    workspace.remember(chapters={"0": {HELPER_PATH: digest(MINE)}})
    toy.good(*toy.cells("00_1_base"))  # as shipped, in a fresh copy of the notebook perhaps
    assert toy.text(HELPER_PATH) == HELPER
    assert (toy.workspace / ".nanobook/backups/001/own" / HELPER_PATH).read_text() == MINE
    assert not (toy.workspace / ".nanobook/backups/002").exists()


def test_an_edit_is_there_in_the_next_notebook_of_the_chapter(toy: Toy) -> None:
    """Which cannot have been checked yet: half of it is not built."""
    toy.good(*toy.cells("00_1_base"), GROW_BY_TEN)
    banner, value = toy.good("%chapter 00_2", "import nanoserve.helper as h; print(h.grow(1))")
    assert "your own: nanoserve/py.typed, helper" in banner.out and value.out == "10\n"
    *_, value = toy.good(
        "%chapter 00_2 --reference", "import nanoserve.helper as h; print(h.grow(1))"
    )
    assert value.out == "2\n"
    assert HELPER_PATH in Workspace().prepare("01_user").aside


def test_a_half_built_file_is_not_taken_to_the_next_notebook(toy: Toy) -> None:
    toy.good(*toy.cells("00_1_base")[:4])
    banner, value = toy.good("%chapter 00_2", "import nanoserve.helper as h; print(h.Box(1).x)")
    assert "the course's, until %check finds yours fit: helper" in banner.out
    assert value.out == "1\n"


def test_a_kernel_that_dies_in_a_cell_leaves_what_stands_around_it(toy: Toy) -> None:
    """Nothing is put back then; an extra piece is still one of its own."""
    extra = "%%build nanoserve/helper.py::last\ndef last():\n    return 8"
    die = "%%build nanoserve/helper.py::grow\nimport os\nos._exit(1)\n\n\ndef grow(x): ..."
    cells = toy.cells("00_1_base")
    with pytest.raises(AssertionError):
        toy.run(*cells, extra, die)
    assert "os._exit" in toy.text(HELPER_PATH)
    *_, value = toy.good("%chapter 00_1", cells[3], *cells[4:], "print(grow(1))")
    assert value.out == "2\n"
    assert toy.text(HELPER_PATH) == f"{HELPER}\n\ndef last():\n    return 8\n"


def test_a_file_spaced_by_hand_is_still_cut_where_it_can_be(toy: Toy) -> None:
    toy.good(*toy.cells("00_1_base"))
    spaced = HELPER.replace("\n\n\nclass Box", "\n\nclass Box")
    (toy.workspace / HELPER_PATH).write_text(spaced)
    *_, value = toy.good(
        "%chapter 00_1",
        "%%build nanoserve/helper.py::Box.grown\n    def grown(self):\n        return 7",
        "print(Box(1).grown())",
    )
    assert value.out == "7\n"
    assert toy.text(HELPER_PATH) == spaced.replace("return grow(self.x)", "return 7")
    assert [name for name, _ in cut(spaced, ["grow", "Box", "nowhere"])] == ["header", "grow"]
    assert [name for name, _ in cut("def (", ["grow"])] == ["header"]
    assert cut(HELPER, Course.read(toy.root).symbols[HELPER_PATH]) == (
        Course.read(toy.root).pieces(HELPER_PATH)
    )


def test_what_is_lent_to_a_server_stays_hidden_from_the_notebook(toy: Toy) -> None:
    lend = "from nanobook.workspace import Workspace\n_ = Workspace().fill()"
    other = """
import subprocess, sys
code = "import nanoserve.server as s; print(s.__doc__)"
print(subprocess.check_output([sys.executable, "-P", "-c", code], text=True))
"""
    *_, lent, hidden, provided, shown = toy.run(
        *toy.cells("00_1_base"),
        lend,
        other,
        "import nanoserve.server",
        "%provide nanoserve/server/__init__.py",
        "import nanoserve.server",
    )
    assert lent.out == "Serves.\n\n"
    assert hidden.error.startswith("ModuleNotFoundError: nanoserve.server is not in the workspace")
    assert not provided.error and not shown.error


def test_a_workspace_may_be_in_the_home_folder(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NANOBOOK_WORKSPACE", "~/mine")
    assert Workspace().folder == tmp_path / "home" / "mine"


def test_the_course_itself_is_no_workspace(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """`%chapter` clears away what is not there yet: the packages of a repository, even."""
    monkeypatch.setenv("NANOBOOK_WORKSPACE", str(toy.root))
    with pytest.raises(CourseError, match="is a course's own folder: name one that is empty"):
        Workspace()
    toy.environment["NANOBOOK_WORKSPACE"] = "."
    (ran,) = toy.run("%chapter 01")
    assert ran.error.startswith("UsageError: NANOBOOK_WORKSPACE=. is a course's own folder")
    assert {path: (toy.root / path).read_text() for path in FILES} == FILES


def test_a_workspace_that_cannot_be_written_is_told_in_a_line(toy: Toy) -> None:
    toy.workspace.write_text("a file")
    (ran,) = toy.run("%chapter 01")
    assert ran.error.startswith("UsageError: the workspace cannot be written: ")
    assert len(ran.shown.splitlines()) == 1


def test_a_workspace_that_was_deleted_is_told_in_a_line(toy: Toy) -> None:
    cells = toy.cells("00_1_base")
    delete = f"import shutil; shutil.rmtree({str(toy.workspace)!r})"
    *_, gone, again, provided, built = toy.run(*cells[:3], delete, cells[2], *cells[:3])
    assert gone.error == "UsageError: the workspace is gone: run the cell with %chapter again"
    assert not again.error and not provided.error and not built.error
