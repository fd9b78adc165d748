"""Exercises and their graders: `@grader` in `exercises/checks/`, `%check` and `%hint` in notebooks.

A grader gets the learner's objects and raises `Wrong` with the symptom that a user of the wrong
code would see. A chapter's own check runs the code that the learner's cells have built, in a
process of its own; where it passes, later chapters stand on that code. This module must not know
any exercise.
"""

import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from nanobook.imports import python_path
from nanobook.rebuild import chapter_number, write_files
from nanobook.workspace import Workspace, digest

CHECK_SECONDS = 300


ANSWER_SECONDS = 60
"""How long an answer may take. Right ones take one or two."""


class Wrong(AssertionError):
    """An answer is wrong; the message says what a user would see go wrong."""


class CheckFailed(Exception):
    """A check did not pass. Shown in the notebook as its message alone."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


@dataclass(frozen=True)
class Grader:
    """One exercise's grader.

    Attributes:
        exercise: its id, "01.2".
        answers: the names that the learner defines.
        hints: shown one after another.
        run: takes the answers; raises Wrong.
    """

    exercise: str
    answers: tuple[str, ...]
    hints: tuple[str, ...]
    run: Callable[..., None]


_graders: dict[str, Grader] = {}
_chapter_checks: dict[int, Callable[[], None]] = {}


def grader(
    exercise: str, answer: str | tuple[str, ...], hints: list[str] | tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a function as the grader of an exercise.

    Args:
        exercise: the id, "01.2".
        answer: the name, or names, of what the learner defines; handed over in that order.
        hints: from the gentlest to the plainest.
    """

    def mark(function: Callable[..., None]) -> Callable[..., None]:
        names = (answer,) if isinstance(answer, str) else tuple(answer)
        _graders[exercise] = Grader(exercise, names, tuple(hints), function)
        return function

    return mark


def chapter_check(number: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Mark a function as a chapter's own check; it imports the packages and raises if unfit."""

    def mark(function: Callable[[], None]) -> Callable[[], None]:
        _chapter_checks[number] = function
        return function

    return mark


def load_checks(root: Path, number: int) -> dict[str, Grader]:
    """A chapter's graders, by exercise id, read anew from `exercises/checks/`.

    Raises:
        CheckFailed: the chapter has none.
    """
    file = root / "exercises" / "checks" / f"chapter_{number:02}.py"
    if not file.is_file():
        raise CheckFailed(f"chapter {number} has no exercises")
    _graders.clear()
    _chapter_checks.pop(number, None)
    spec = importlib.util.spec_from_file_location(f"nanobook_checks_{number:02}", file)
    assert spec is not None and spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(_graders)


def exercise_ids(root: Path) -> list[str]:
    """Every exercise of the course, in order."""
    ids: list[str] = []
    for file in sorted((root / "exercises" / "checks").glob("chapter_[0-9][0-9].py")):
        ids += sorted(load_checks(root, int(file.stem[-2:])))
    return ids


def grade(one: Grader, answers: Mapping[str, Any]) -> None:
    """Run a grader on the objects in `answers`.

    Raises:
        CheckFailed: they are missing, not written yet, wrong, or raise; the message says which.
    """
    missing = [name for name in one.answers if name not in answers]
    if missing:
        raise CheckFailed(
            f"{one.exercise}: there is no {', '.join(missing)} yet: run the cell of the exercise"
        )
    try:
        with _time_limit(ANSWER_SECONDS):
            one.run(*(answers[name] for name in one.answers))
    except _StillRunningError:
        raise CheckFailed(
            f"{one.exercise}: your code was still running after {ANSWER_SECONDS} s: does a loop "
            "in it never end?"
        ) from None
    except Wrong as error:
        raise CheckFailed(f"{one.exercise} is not right yet: {error}") from error
    except NotImplementedError as error:
        raise CheckFailed(f"{one.exercise} is not written yet ({error})") from error
    except Exception as error:
        raise CheckFailed(
            f"{one.exercise}: your code raised {type(error).__name__}: {error}{_where(error)}"
        ) from error


class _StillRunningError(BaseException):
    """The time is up. No Exception, so that an answer's own `except` does not catch it."""


@contextlib.contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    """Interrupt what runs inside after so many seconds, where this process can be interrupted."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or not hasattr(signal, "SIGALRM"):
        yield
        return

    def stop(*_: object) -> None:
        raise _StillRunningError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _where(error: BaseException) -> str:
    """Where in the learner's cell an error was raised, if it was there."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if "ipykernel" in frame.filename or frame.filename.startswith("<ipython"):
            return f"\n  line {frame.lineno} of {frame.name}: {frame.line or ''}".rstrip(": ")
    return ""


def check(workspace: Workspace, what: str, namespace: Mapping[str, Any]) -> None:
    """`%check`: one exercise ("01.2"), or a chapter ("01"): its exercises, and the code it built.

    Raises:
        CheckFailed: something did not pass.
    """
    what, number = _named(what)
    graders = load_checks(workspace.root, number)
    if "." in what:
        if what not in graders:
            raise CheckFailed(f"there is no exercise {what}; there are {', '.join(graders)}")
        grade(graders[what], namespace)
        _record(workspace, what)
        print(f"{what} passed")
        return
    failures, absent = [], []
    for one in graders.values():
        if not any(name in namespace for name in one.answers):
            absent.append(one.exercise)
            continue
        try:
            grade(one, namespace)
        except CheckFailed as error:
            failures.append(str(error))
            continue
        _record(workspace, one.exercise)
        print(f"{one.exercise} passed")
    if absent:
        print(f"not graded, for their cells have not been run here: {', '.join(absent)}")
    try:
        check_chapter(workspace, number)
        print(f"the code of chapter {number} passed: later chapters will build on yours")
    except CheckFailed as error:
        failures.append(str(error))
    if failures:
        raise CheckFailed("\n".join(failures))


def _named(what: str) -> tuple[str, int]:
    """An exercise's or a chapter's name as the course writes it, and the chapter's number."""
    if not (match := re.fullmatch(r"(\d+)(\.\d+)?", what)):
        raise CheckFailed(f"01.2 names an exercise, 01 a chapter; {what!r} does not")
    number = int(match[1])
    return f"{number:02}{match[2] or ''}", number


def _record(workspace: Workspace, exercise: str) -> None:
    workspace.remember(exercises={**workspace.state["exercises"], exercise: "passed"})


def check_chapter(workspace: Workspace, number: int) -> None:
    """Run a chapter's own check on the files that the learner's cells have built.

    Raises:
        CheckFailed: files are missing, or the check did not pass.
    """
    workspace.absorb()
    course = workspace.course
    paths = [path for path in course.order if chapter_number(course.homes[path]) == number]
    mine = {path: workspace.own(path) for path in paths}
    if missing := [path for path, text in mine.items() if text is None]:
        raise CheckFailed(
            f"chapter {number} is not built whole: {len(missing)} of {len(paths)} files are "
            f"missing, {missing[0]} first"
        )
    earlier = [path for path in course.order if chapter_number(course.homes[path]) < number]
    with tempfile.TemporaryDirectory() as folder:
        files = {path: workspace.chosen(path) for path in earlier}
        files.update({path: text for path, text in mine.items() if text is not None})
        files.update({path: workspace.own(path) or "" for path in workspace.extras()})
        write_files(files.items(), Path(folder))
        command = [sys.executable, "-P", "-m", "nanobook.grading"]
        try:
            done = subprocess.run(
                [*command, str(workspace.root), str(number)],
                env=environment(folder),
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=CHECK_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise CheckFailed(
                f"the code of chapter {number} was still running after {CHECK_SECONDS} s"
            ) from None
    if done.returncode:
        lines = (done.stdout + done.stderr).strip().splitlines() or ["it ended without a word"]
        shown = lines if done.returncode == 3 else lines[-3:]
        raise CheckFailed(f"the code of chapter {number} is not right yet: " + "\n".join(shown))
    passed = {path: digest(text) for path, text in mine.items() if text is not None}
    workspace.remember(chapters={**workspace.state["chapters"], str(number): passed})


def environment(folder: str | Path) -> dict[str, str]:
    """This process's environment, with the packages below `folder` before all others."""
    tools = str(Path(__file__).resolve().parents[1])
    return {**os.environ, "PYTHONPATH": python_path(folder, [tools])}


def hint(root: Path, exercise: str, shown: int) -> str:
    """The hint after the first `shown` ones; at the end, where the solution is.

    Raises:
        CheckFailed: there is no such exercise.
    """
    exercise, number = _named(exercise)
    graders = load_checks(root, number)
    if exercise not in graders:
        raise CheckFailed(f"there is no exercise {exercise}; there are {', '.join(graders)}")
    hints = graders[exercise].hints
    if shown < len(hints):
        return f"hint {shown + 1} of {len(hints)}: {hints[shown]}"
    name = exercise.replace(".", "_")
    return f"no more hints; the solution is in exercises/solutions/{name}.py"


def _run_chapter_check(root: str, number: str) -> int:
    """In a process of its own: 0, or 3 and the symptom, or a traceback."""
    from nanobook import grading  # the module that the checks import, not this __main__

    grading.load_checks(Path(root), int(number))
    function = grading._chapter_checks.get(int(number))
    if function is None:
        return 0
    try:
        function()
    except grading.Wrong as error:
        print(error)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(_run_chapter_check(*sys.argv[1:3]))
