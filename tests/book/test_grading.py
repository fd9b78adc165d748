"""Graders and the chapter's own check: what passes, what is said, and what is remembered."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from nanobook import grading
from nanobook.grading import CheckFailed, Wrong, check, check_chapter, exercise_ids, hint
from nanobook.progress import main as progress_main
from nanobook.progress import report
from nanobook.workspace import Workspace
from nanofixtures.toy_course import FILES, HELPER, Toy, write_course

CHECKS = """
from nanobook.grading import Wrong, chapter_check, grader

@grader("00.1", answer="double", hints=["Twice."])
def double(double):
    if double(3) != 6:
        raise Wrong("three does not become six")

@grader("00.2", answer=("a", "b"))
def both(a, b):
    if a > b:
        raise Wrong("a is larger")

@chapter_check(0)
def code():
    from nanoserve.helper import Box
    if Box(1).grown() not in (2, 10):
        raise Wrong(f"a box of 1 grows to {Box(1).grown()}")
"""
HELPER_PATH = "nanoserve/helper.py"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toy:
    toy = Toy(write_course(tmp_path / "course"), tmp_path / "workspace")
    write_checks(toy, CHECKS)
    monkeypatch.setenv("NANOBOOK_ROOT", str(toy.root))
    monkeypatch.setenv("NANOBOOK_WORKSPACE", str(toy.workspace))
    return toy


def write_checks(toy: Toy, text: str, number: int = 0) -> None:
    folder = toy.root / "exercises" / "checks"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"chapter_{number:02}.py").write_text(text)


def build_all(*numbers: int, **changed: str) -> Workspace:
    """A workspace in which chapters were built; with the learner's changes."""
    workspace = Workspace()
    for stem in workspace.course.stems:
        if int(stem[:2]) in numbers:
            workspace.prepare(stem)
            for path in workspace.course.of(stem):
                workspace.write_own(path, changed.get(path, FILES[path]))
    return workspace


# -- one exercise -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", r"00\.1: there is no double yet"),
        ("double = abs", r"00\.1 is not right yet: three does not become six"),
        ("def double(x): raise NotImplementedError('00.1: d')", r"not written yet \(00\.1: d\)"),
        ("def double(x): return x[0]", r"00\.1: your code raised TypeError: 'int' object is not"),
        ("def double(x): assert x > 5, 'small'", r"00\.1: your code raised AssertionError: small"),
    ],
)
def test_what_is_wrong_is_said(toy: Toy, source: str, message: str) -> None:
    namespace: dict[str, object] = {}
    exec(source, namespace)
    with pytest.raises(CheckFailed, match=message):
        check(Workspace(), "00.1", namespace)
    assert Workspace().state["exercises"] == {}


def test_a_right_answer_is_remembered(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    check(Workspace(), "0.1", {"double": lambda x: 2 * x})
    check(Workspace(), "00.2", {"b": 2, "a": 1})
    assert capsys.readouterr().out == "00.1 passed\n00.2 passed\n"
    assert Workspace().state["exercises"] == {"00.1": "passed", "00.2": "passed"}
    with pytest.raises(CheckFailed, match="a is larger"):
        check(Workspace(), "00.2", {"a": 2, "b": 1})
    assert Workspace().state["exercises"]["00.2"] == "passed"


def test_checks_are_read_anew(toy: Toy) -> None:
    with pytest.raises(CheckFailed):
        check(Workspace(), "00.1", {"double": abs})
    write_checks(toy, CHECKS.replace("!= 6", "!= 3"))
    check(Workspace(), "00.1", {"double": abs})


def test_exercises_of_several_chapters(toy: Toy) -> None:
    write_checks(toy, CHECKS.replace("00.", "01.").replace("(0)", "(1)"), 1)
    assert exercise_ids(toy.root) == ["00.1", "00.2", "01.1", "01.2"]
    assert hint(toy.root, "1.1", 0) == "hint 1 of 1: Twice."
    assert hint(toy.root, "01.2", 0).endswith("exercises/solutions/01_2.py")


def test_wrong_is_shown_as_its_message() -> None:
    assert CheckFailed("a\nb")._render_traceback_() == ["a\nb"]
    assert issubclass(Wrong, AssertionError)


# -- a chapter ----------------------------------------------------------------------------------


def test_a_chapter_that_passes_is_built_upon(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    mine = HELPER.replace("x * SCALE", "x * 10")
    workspace = build_all(0, **{HELPER_PATH: mine})
    assert HELPER_PATH in workspace.prepare("01_user").reference
    check(workspace, "00", {"double": lambda x: 2 * x})
    assert capsys.readouterr().out == (
        "00.1 passed\nnot graded, for their cells have not been run here: 00.2\n"
        "the code of chapter 0 passed: later chapters will build on yours\n"
    )
    assert HELPER_PATH in workspace.prepare("01_user").own
    assert toy.text(HELPER_PATH) == mine


def test_a_chapter_that_does_not_pass_is_not(toy: Toy) -> None:
    workspace = build_all(0, **{HELPER_PATH: HELPER.replace("x * SCALE", "x * 7")})
    message = (
        r"00\.1 is not right yet: three does not become six\n"
        r"the code of chapter 0 is not right yet: a box of 1 grows to 7$"
    )
    with pytest.raises(CheckFailed, match=message):
        check(workspace, "0", {"double": abs})
    assert HELPER_PATH in workspace.prepare("01_user").reference


def test_a_chapter_whose_code_raises_shows_the_end_of_it(toy: Toy) -> None:
    workspace = build_all(0, **{HELPER_PATH: "raise RuntimeError('no')\n"})
    with pytest.raises(CheckFailed, match=r"is not right yet: (?s:.)*RuntimeError: no$"):
        check_chapter(workspace, 0)


def test_a_chapter_must_be_built_whole(toy: Toy) -> None:
    workspace = Workspace()
    workspace.prepare("00_1_base")
    workspace.write_own("nanoserve/__init__.py", "")
    with pytest.raises(CheckFailed, match=r"4 of 5 files are missing, nanoserve/py\.typed first"):
        check_chapter(workspace, 0)


def test_a_check_that_hangs_ends(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "CHECK_SECONDS", 1)
    workspace = build_all(0, **{HELPER_PATH: "while True: pass\n"})
    with pytest.raises(CheckFailed, match="still running after 1 s"):
        check_chapter(workspace, 0)


def test_the_check_sees_edits_made_by_hand_and_files_beside_the_courses(toy: Toy) -> None:
    workspace = build_all(0)
    workspace.prepare("00_1_base")
    (toy.workspace / "nanoserve/mine.py").write_text("TEN = 10\n")
    edited = HELPER.replace("SCALE = 2", "from nanoserve.mine import TEN as SCALE")
    (toy.workspace / HELPER_PATH).write_text(edited)
    check_chapter(workspace, 0)
    assert HELPER_PATH in workspace.prepare("01_user").own
    assert toy.has("nanoserve/mine.py")


def test_the_check_runs_the_learners_code_on_earlier_chapters(toy: Toy) -> None:
    """Whatever this process has imported, and wherever the reference lies."""
    toy.environment["PYTHONPATH"] = str(toy.root)
    write_checks(
        toy,
        dedent("""
        from nanobook.grading import Wrong, chapter_check

        @chapter_check(1)
        def code():
            import nanoserve.user, nanoserve.helper
            raise Wrong(f"{nanoserve.user.twice(1).x} {nanoserve.helper.__file__}")
        """),
        1,
    )
    mine = FILES["nanoserve/user.py"].replace("grow(x)", "grow(x) + 100")
    workspace = build_all(0, 1, **{"nanoserve/user.py": mine})
    with pytest.raises(CheckFailed, match="102 ") as caught:
        check_chapter(workspace, 1)
    assert str(toy.root) not in str(caught.value)
    assert str(toy.workspace) not in str(caught.value)


# -- progress -----------------------------------------------------------------------------------


def test_progress(
    toy: Toy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checks(toy, CHECKS.replace("00.", "01.").replace("(0)", "(1)"), 1)
    workspace = build_all(0)
    check(workspace, "0", {"double": lambda x: 2 * x})
    capsys.readouterr()
    assert progress_main([]) == 0
    assert capsys.readouterr().out == (
        "chapter 00: built 5 of 5 files, checked; 00.1✓ 00.2·\n"
        "chapter 01: built 0 of 3 files; 01.1· 01.2·\n"
        "1 of 4 exercises passed\n"
    )
    assert report(Workspace()).endswith("1 of 4 exercises passed")
    monkeypatch.setenv("NANOBOOK_ROOT", "/nowhere")
    assert progress_main([]) == 1
    assert "NANOBOOK_ROOT=/nowhere holds no chapters/" in capsys.readouterr().err


def test_progress_of_a_course_without_exercises(toy: Toy) -> None:
    (toy.root / "exercises/checks/chapter_00.py").unlink()
    assert report(Workspace()) == (
        "chapter 00: built 0 of 5 files\nchapter 01: built 0 of 3 files\n0 of 0 exercises passed"
    )


def test_it_is_a_subcommand(toy: Toy) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nanobook", "progress"],
        capture_output=True,
        text=True,
        cwd="/",
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    assert done.returncode == 0 and "0 of 2 exercises passed" in done.stdout, done.stderr
