"""Every grader: the solution passes, stubs raise with their id, wrong answers are told why."""

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from nanobook import notebook as nb
from nanobook.grading import CheckFailed, Grader, exercise_ids, grade, load_checks

ROOT = Path(__file__).resolve().parents[2]
EXERCISES = ROOT / "exercises"
IDS = exercise_ids(ROOT)
FEWEST_WRONG = 3


@cache
def graders(number: int) -> dict[str, Grader]:
    return load_checks(ROOT, number)


def grader_of(exercise: str) -> Grader:
    return graders(int(exercise[:2]))[exercise]


@cache
def stubs() -> dict[str, str]:
    """Exercise -> the cell that the reader is to fill."""
    found: dict[str, str] = {}
    for path in sorted(EXERCISES.glob("*.ipynb")):
        for cell in nb.read(path).cells:
            if exercise := cell.nanobook.get("exercise"):
                assert exercise not in found, f"{exercise} is there twice"
                found[exercise] = cell.source
    return found


@cache
def wrong_answers() -> dict[str, list[tuple[str, str]]]:
    """Exercise -> (source, what its message must match)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for file in sorted(Path(__file__).parent.glob("wrong_[0-9][0-9].py")):
        spec = importlib.util.spec_from_file_location(file.stem, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.update(module.WRONG)
    return found


def run(source: str) -> dict[str, Any]:
    """The names that an answer's cell defines, beside what every exercise notebook imports."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec("import torch", namespace)
    exec(compile(source, "<answer>", "exec"), namespace)
    return namespace


def test_there_are_exercises_and_each_has_all_its_parts() -> None:
    assert IDS
    assert sorted(stubs()) == sorted(wrong_answers()) == sorted(IDS)
    solutions = [file.stem.replace("_", ".") for file in (EXERCISES / "solutions").glob("*.py")]
    assert sorted(solutions) == sorted(IDS)
    for number in {int(one[:2]) for one in IDS}:
        assert 4 <= sum(int(one[:2]) == number for one in IDS) <= 5


@pytest.mark.parametrize("exercise", IDS)
def test_the_solution_passes(exercise: str) -> None:
    file = EXERCISES / "solutions" / f"{exercise.replace('.', '_')}.py"
    grade(grader_of(exercise), run(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("exercise", IDS)
def test_the_stub_raises_with_its_id(exercise: str) -> None:
    names = run(stubs()[exercise])
    with pytest.raises(CheckFailed) as caught:
        grade(grader_of(exercise), names)
    cause = caught.value.__cause__
    assert isinstance(cause, NotImplementedError) and str(cause).startswith(f"{exercise}: ")
    assert str(caught.value).startswith(f"{exercise} is not written yet")


@pytest.mark.parametrize("exercise", IDS)
def test_there_are_wrong_answers_and_hints(exercise: str) -> None:
    answers = wrong_answers()[exercise]
    assert len({source for source, _ in answers}) == len(answers) >= FEWEST_WRONG
    assert len({message for _, message in answers}) >= FEWEST_WRONG, "they say all the same"
    assert grader_of(exercise).hints


@pytest.mark.parametrize(
    ("exercise", "number"),
    [(one, number) for one in IDS for number in range(len(wrong_answers().get(one, [])))],
)
def test_a_wrong_answer_hears_its_symptom(exercise: str, number: int) -> None:
    source, message = wrong_answers()[exercise][number]
    with pytest.raises(CheckFailed) as caught:
        grade(grader_of(exercise), run(source))
    said = str(caught.value)
    assert said.startswith(f"{exercise} is not right yet: "), said
    assert re.search(message, said), said
