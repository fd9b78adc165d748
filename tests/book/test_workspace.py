"""The workspace: whose version of each file a notebook sees, and that nothing of theirs is lost."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from nanobook.imports import python_path
from nanobook.rebuild import Course, CourseError, chapter_number
from nanobook.workspace import LENT, Workspace, digest
from nanofixtures.toy_course import FILES, HELPER, NOTEBOOKS, Toy, copy_course, write_course

ROOT = Path(__file__).resolve().parents[2]
HELPER_PATH = "nanoserve/helper.py"
MINE = HELPER.replace("x * SCALE", "x * 10")
GROW_BY_TEN = "%%build nanoserve/helper.py::grow\ndef grow(x: int) -> Never:\n    return x * 10"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    toy = Toy(write_course(tmp_path / "course"), tmp_path / "workspace")
    monkeypatch.setenv("NANOBOOK_ROOT", str(toy.root))
    monkeypatch.setenv("NANOBOOK_WORKSPACE", str(toy.workspace))
    return toy


def built(stem: str, **changed: str) -> Workspace:
    """The workspace after a notebook whose cells were run, with files changed by the learner."""
    workspace = Workspace()
    workspace.prepare(stem)
    for path in workspace.course.of(stem):
        workspace.write_own(path, changed.get(path, FILES[path]))
    return workspace


def passed(workspace: Workspace, number: int) -> None:
    """What `%check` records."""
    files = {
        path: digest(text)
        for path, stem in workspace.course.homes.items()
        if chapter_number(stem) == number and (text := workspace.own(path)) is not None
    }
    workspace.remember(chapters={str(number): files})


# -- whose version ------------------------------------------------------------------------------


def test_the_first_notebook_starts_empty_and_later_ones_on_the_reference(toy: Toy) -> None:
    assert str(Workspace().prepare("00_1_base")) == "00_1_base: the workspace is ready"
    assert Workspace().view() == []
    banner = Workspace().prepare("01_user")
    assert str(banner) == (
        "01_user: the workspace is ready\n  reference: nanoserve/py.typed, helper, nanokernels.kern"
    )
    assert {path: toy.text(path) for path in Workspace().view()} == {
        path: text for path, text in FILES.items() if Course.read(toy.root).homes[path] < "01_user"
    }


def test_package_folders_come_first(toy: Toy) -> None:
    banner = Workspace().prepare("04_serve")
    assert banner.reference[:2] == ["nanoserve/__init__.py", "kernels/nanokernels/__init__.py"]


def test_a_version_like_the_reference_is_the_learners_own(toy: Toy) -> None:
    built("00_1_base")
    banner = Workspace().prepare("01_user")
    assert HELPER_PATH in banner.own and banner.aside == []


def test_a_changed_version_waits_for_its_check(toy: Toy) -> None:
    workspace = built("00_1_base", **{HELPER_PATH: MINE})
    banner = Workspace().prepare("01_user")
    assert HELPER_PATH in banner.reference and banner.aside == [HELPER_PATH]
    assert "the course's, until %check finds yours fit: helper" in str(banner)
    assert toy.text(HELPER_PATH) == HELPER
    passed(workspace, 0)
    banner = Workspace().prepare("01_user")
    assert HELPER_PATH in banner.own
    assert toy.text(HELPER_PATH) == MINE
    workspace.prepare("00_1_base")
    workspace.write_own(HELPER_PATH, MINE.replace("10", "11"))
    assert HELPER_PATH in Workspace().prepare("01_user").reference


def test_reference_forces_it(toy: Toy) -> None:
    passed(built("00_1_base", **{HELPER_PATH: MINE}), 0)
    banner = Workspace().prepare("01_user", reference=True)
    assert banner.own == [] and toy.text(HELPER_PATH) == HELPER
    assert HELPER_PATH in Workspace().prepare("01_user").own


def test_later_modules_are_absent_and_come_back(toy: Toy) -> None:
    built("00_1_base")
    built("01_user")
    banner = Workspace().prepare("00_1_base")
    assert Workspace().view() == sorted(Course.read(toy.root).of("00_1_base"))
    assert not (toy.workspace / "kernels/nanokernels").exists() or not list(
        (toy.workspace / "kernels/nanokernels").iterdir()
    )
    assert banner.here == Course.read(toy.root).of("00_1_base")
    assert "nanoserve/user.py" in Workspace().prepare("01_user").here


def test_from_chapter_4_on_the_server_is_lent(toy: Toy) -> None:
    path = "nanoserve/server/__init__.py"
    workspace = Workspace()
    # The toy's server belongs to the last chapter; a fifth one begins before it.
    chapter = toy.root / "chapters" / "04_serve.ipynb"
    shutil.copy(chapter, chapter.with_name("05_late.ipynb"))
    text = chapter.read_text().replace(path, "nanoserve/four.py")
    chapter.write_text(text)
    assert path not in [*Workspace().prepare("01_user").lent, *workspace.view()]
    assert Workspace().prepare("04_serve").lent == [path]
    assert toy.has(path)
    assert Workspace().prepare("05_late").lent == []


# -- nothing is lost ----------------------------------------------------------------------------


def test_a_hand_edit_of_an_earlier_file_is_kept_before_it_is_replaced(toy: Toy) -> None:
    built("00_1_base", **{HELPER_PATH: MINE})
    Workspace().prepare("01_user")
    edited = HELPER + "# by hand\n"
    (toy.workspace / HELPER_PATH).write_text(edited)
    banner = Workspace().prepare("01_user")
    assert banner.saved == [HELPER_PATH]
    assert "kept your edits of: helper" in str(banner)
    assert toy.text(HELPER_PATH) == HELPER
    assert Workspace().own(HELPER_PATH) == edited
    backup = toy.workspace / ".nanobook/backups/001"
    assert (backup / "view" / HELPER_PATH).read_text() == edited
    assert (backup / "own" / HELPER_PATH).read_text() == MINE
    assert Workspace().prepare("01_user").saved == []


def test_a_hand_edit_in_this_notebook_stays_and_is_backed_up_by_a_build(toy: Toy) -> None:
    toy.good(*toy.cells("00_1_base"))
    edited = HELPER.replace("self.x = x", "self.x = x + 0").replace("x * SCALE", "x * 3")
    (toy.workspace / HELPER_PATH).write_text(edited)
    _, value, *_ = toy.good(
        "%chapter 00_1", "from nanoserve.helper import grow; print(grow(1))", GROW_BY_TEN
    )
    assert value.out == "3\n"
    assert toy.text(HELPER_PATH) == edited.replace("x * 3", "x * 10")
    (toy.workspace / HELPER_PATH).write_text(edited)
    toy.good("%load_ext nanobook", "%chapter 00_1", "%provide nanoserve/helper.py")
    assert toy.text(HELPER_PATH) == edited
    backups = toy.workspace / ".nanobook/backups"
    texts = [file.read_text() for file in backups.rglob("helper.py")]
    assert edited in texts and edited.replace("x * 3", "x * 10") in texts


def test_an_edit_made_by_hand_while_the_notebook_runs_is_backed_up(toy: Toy) -> None:
    edited = HELPER.replace("x * SCALE", "x * 3")
    toy.good(
        *toy.cells("00_1_base"),
        f"open({str(toy.workspace / HELPER_PATH)!r}, 'w').write({edited!r})",
        GROW_BY_TEN,
    )
    assert toy.text(HELPER_PATH) == MINE
    backup = toy.workspace / ".nanobook/backups"
    assert edited in [file.read_text() for file in backup.rglob("helper.py")]


def test_a_file_broken_by_hand_can_be_built_again(toy: Toy) -> None:
    toy.good(*toy.cells("00_1_base"))
    (toy.workspace / HELPER_PATH).write_text("def (")
    toy.good(*toy.cells("00_1_base"))
    assert toy.text(HELPER_PATH) == HELPER


def test_reset_makes_a_backup(toy: Toy) -> None:
    built("00_1_base", **{HELPER_PATH: MINE})
    built("00_2_kernels")
    banner = Workspace().prepare("00_1_base", reset=True)
    assert str(banner).endswith("what was built here before: .nanobook/backups/001")
    assert Workspace().view() == [] and Workspace().own(HELPER_PATH) is None
    assert (toy.workspace / ".nanobook/backups/001/own" / HELPER_PATH).read_text() == MINE
    assert Workspace().own("kernels/nanokernels/kern.py") is not None
    assert Workspace().prepare("00_1_base", reset=True).backup == ""


def test_files_that_the_course_does_not_know_stay(toy: Toy) -> None:
    built("00_1_base")
    (toy.workspace / "nanoserve/mine.py").write_text("X = 1\n")
    (toy.workspace / "nanoserve/data.bin").write_bytes(b"\xff\x00")
    (toy.workspace / "nanoserve/.helper.py.swp").write_bytes(b"\xff")
    for stem in ("01_user", "00_1_base"):
        banner = Workspace().prepare(stem)
        assert banner.extra == ["nanoserve/data.bin", "nanoserve/mine.py"]
    assert toy.text("nanoserve/mine.py") == "X = 1\n"
    assert (toy.workspace / "nanoserve/data.bin").read_bytes() == b"\xff\x00"


def test_lost_bookkeeping_loses_no_file(toy: Toy) -> None:
    built("00_1_base", **{HELPER_PATH: MINE})
    (toy.workspace / ".nanobook/state.json").write_text("{")
    Workspace().prepare("01_user")
    assert Workspace().own(HELPER_PATH) == MINE


def test_a_provided_file_follows_the_course_unless_the_learner_changed_it(toy: Toy) -> None:
    path = "nanoserve/table.py"
    toy.good("%chapter 01", f"%provide {path}")
    new = FILES[path].replace("3", "4")
    (toy.root / path).write_text(new)
    toy.good("%chapter 01", f"%provide {path}")
    assert toy.text(path) == new
    (toy.workspace / path).write_text(mine := new.replace("4", "5"))
    *_, ran = toy.good("%chapter 01", f"%provide {path}")
    assert ran.out == f"provided 0 files\nkept your own {path}\n"
    assert toy.text(path) == mine


def test_what_is_lent_for_serving_does_not_mix_with_what_is_built(toy: Toy) -> None:
    workspace = built("00_1_base")
    workspace.prepare("01_user")
    lent = Workspace().fill()
    assert "nanoserve/user.py" in lent and "nanoserve/server/__init__.py" in lent
    assert HELPER_PATH not in lent
    sources = ["%chapter 01", "from nanobook.workspace import Workspace\n_ = Workspace().fill()"]
    *_, built_alone = toy.good(*sources, toy.cells("01_user")[1])
    assert built_alone.out.startswith("built nanoserve/user.py::header")
    assert "def twice" not in toy.text("nanoserve/user.py")
    Workspace().prepare("01_user")
    assert not toy.has("nanoserve/server/__init__.py")


# -- where it is --------------------------------------------------------------------------------


def test_it_lies_in_the_course_unless_named(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Workspace().folder == toy.workspace.resolve()
    monkeypatch.delenv("NANOBOOK_WORKSPACE")
    for folder in (toy.root / "chapters", Path("/")):
        monkeypatch.chdir(folder)
        assert Workspace().folder == toy.root / "workspace"
    monkeypatch.delenv("NANOBOOK_ROOT")
    assert Workspace().folder == ROOT / "workspace"  # from `/`: where the tools lie
    monkeypatch.chdir(toy.root / "nanoserve")
    assert Workspace().folder == toy.root / "workspace"


def test_the_repositorys_workspace_is_ignored_by_git() -> None:
    done = subprocess.run(["git", "check-ignore", "-q", "workspace/x"], cwd=ROOT)
    if done.returncode == 128:
        assert "workspace" in (ROOT / ".gitignore").read_text()
    else:
        assert done.returncode == 0


@pytest.mark.parametrize("cwd", ["chapters", "/"])
def test_cells_run_from_any_folder(toy: Toy, cwd: str) -> None:
    *_, ran = toy.good(
        *toy.cells("00_1_base"), "import os; os.chdir('/')", GROW_BY_TEN, cwd=toy.root / cwd
    )
    assert ran.out.startswith("built") and toy.text(HELPER_PATH) == MINE


def test_a_relative_workspace_stays_where_it_is(toy: Toy, tmp_path: Path) -> None:
    toy.environment["NANOBOOK_WORKSPACE"] = "here"
    code = "import os; os.chdir('/')\nfrom nanobook.workspace import Workspace"
    *_, ran = toy.good("%chapter 00_1", code, "print(Workspace().folder)", cwd=tmp_path)
    assert ran.out == f"{tmp_path / 'here'}\n"


def test_without_the_packages_the_notebooks_make_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOBOOK_ROOT", str(write_course(tmp_path / "course", with_packages=False)))
    monkeypatch.setenv("NANOBOOK_WORKSPACE", str(tmp_path / "workspace"))
    workspace = Workspace()
    workspace.prepare("04_serve")
    assert workspace.fill() == ["nanoserve/server/__init__.py"]
    assert {path: workspace.text(path) for path in workspace.view()} == FILES
    with pytest.raises(CourseError, match=r"nanoserve/nowhere\.py is in no package"):
        workspace.reference("nanoserve/nowhere.py")


@pytest.mark.parametrize(
    ("name", "stem"),
    [
        ("0", "00_1_base"),
        ("00", "00_1_base"),
        ("00_2", "00_2_kernels"),
        ("0_2", "00_2_kernels"),
        ("01_user", "01_user"),
        ("01_user.ipynb", "01_user"),
        ("1", "01_user"),
    ],
)
def test_how_a_notebook_is_named(toy: Toy, name: str, stem: str) -> None:
    assert Workspace().stem_of(name) == stem


def test_an_unknown_notebook_is_told(toy: Toy) -> None:
    with pytest.raises(CourseError, match=r"there is no chapter '7'; the notebooks are 00_1_base,"):
        Workspace().stem_of("7")
    assert list(NOTEBOOKS) == list(Workspace().course.stems)


# -- the real course ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_course(tmp_path_factory.mktemp("real") / "course", ROOT)


def real(course: Path, workspace: Path, stem: str, code: str) -> tuple[str, str]:
    """What code prints, and its last words, where `%chapter` of the real course has prepared."""
    script = f"""
        from nanobook.workspace import Workspace
        workspace = Workspace()
        workspace.prepare(workspace.stem_of({stem!r}))
        workspace.activate()
    """
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"NANOBOOK_ROOT": str(course), "NANOBOOK_WORKSPACE": str(workspace)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", dedent(script) + code],
        env=env,
        cwd="/",
        capture_output=True,
        text=True,
    )
    return done.stdout.strip(), (done.stderr.strip().splitlines() or [""])[-1]


@pytest.mark.parametrize("module", ["server", "cli", "scheduler", "engine.core"])
def test_later_modules_cannot_be_imported_in_chapter_3(
    course: Path, tmp_path: Path, module: str
) -> None:
    _, error = real(course, tmp_path, "03", f"import nanoserve.config\nimport nanoserve.{module}")
    assert error.startswith("ModuleNotFoundError: nanoserve.") and "not in the workspace" in error


def test_within_a_chapter_an_edit_goes_on_and_later_chapters_wait_for_the_check(
    course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOBOOK_WORKSPACE", str(tmp_path))
    path = "nanoserve/sampling_params.py"
    workspace = Workspace(course)
    workspace.prepare("00_2_request")
    workspace.write_own(path, workspace.reference(path).replace("MAX_N = 128", "MAX_N = 7"))
    assert path in workspace.prepare("00_3_weights").own
    assert "MAX_N = 7" in (workspace.text(path) or "")
    assert path in workspace.prepare("01_1_model").reference
    assert "MAX_N = 128" in (workspace.text(path) or "")
    assert "MAX_N = 7" in (workspace.own(path) or "")


def test_in_chapter_4_the_server_is_lent(course: Path, tmp_path: Path) -> None:
    code = "import nanoserve.server, nanoserve.cli\nprint(nanoserve.server.__file__)"
    said, error = real(course, tmp_path, "04", code)
    assert (said, error) == (str(tmp_path / "nanoserve/server/__init__.py"), "")
    assert "ModuleNotFoundError" in real(course, tmp_path, "04", "import nanoserve.scheduler")[1]


@pytest.mark.slow
def test_earlier_modules_need_no_later_one(course: Path, tmp_path: Path) -> None:
    """At the beginning of every notebook, all that was built before can be imported."""
    code = """
import importlib
from nanobook.imports import dotted
for path in workspace.course.before(workspace.state["stem"]):
    if path.endswith(".py") and not path.endswith("__main__.py"):
        importlib.import_module(dotted(path))
print(len(workspace.view()))
"""
    shown = Course.read(course)
    for stem in shown.stems:
        if stem.endswith("_z_rest"):  # stands where a chapter is just being written
            continue
        said, error = real(course, tmp_path, stem, code)
        assert not error, f"{stem}: {error}"
        lent = [p for p in shown.order if p.startswith(LENT)] if int(stem[:2]) >= 4 else []
        assert int(said) == len({*shown.before(stem), *lent} - {*shown.of(stem)}), stem


def test_the_path_for_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/a", str(tmp_path), ""]))
    expected = [str(tmp_path), str(tmp_path / "kernels"), "/a", "/tools"]
    assert python_path(tmp_path, ["/tools"]).split(os.pathsep) == expected


def test_the_bookkeeping_is_readable(toy: Toy) -> None:
    built("00_1_base")
    state = json.loads((toy.workspace / ".nanobook/state.json").read_text())
    assert state["stem"] == "00_1_base" and set(state["written"]) == set(Workspace().view())
    assert not list(toy.workspace.rglob("*.tmp"))
