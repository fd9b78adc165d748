"""Exercise notebooks from first to last cell: as shipped, and with the solutions in the stubs."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nanobook.execution import _kernel_manager
from nanobook.workspace import Workspace
from nanofixtures.toy_course import copy_course
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "exercises").glob("[0-9][0-9]_*.ipynb"))
CHECK = re.compile(r"%check (\d\d)(\.\d+)?")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_course(tmp_path_factory.mktemp("exercises") / "course", ROOT)


@dataclass
class Result:
    """A cell after its run: its source, what it printed, and its error's name and text."""

    source: str
    out: str
    error: str


def run(notebook: nbformat.NotebookNode, course: Path, workspace: Path) -> list[Result]:
    """Run all code cells, whatever fails."""
    environment = {
        **{k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        "NANOBOOK_ROOT": str(course),
        "NANOBOOK_WORKSPACE": str(workspace),
        "IPYTHONDIR": str(workspace.parent / "ipython"),
    }
    client = NotebookClient(
        notebook,
        km=_kernel_manager(),
        allow_errors=True,
        timeout=300,
        resources={"metadata": {"path": str(ROOT / "exercises")}},
    )
    client.execute(env=environment, cleanup_kc=True)
    results = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            out = "".join(o.text for o in cell.outputs if o.output_type == "stream")
            errors = [o for o in cell.outputs if o.output_type == "error"]
            error = f"{errors[0].ename}: {errors[0].evalue}" if errors else ""
            results.append(Result(cell.source, out, error))
    return results


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_as_shipped_each_check_fails_with_its_id_and_all_else_runs(
    path: Path, course: Path, tmp_path: Path
) -> None:
    results = run(nbformat.read(path, as_version=4), course, tmp_path / "workspace")
    checks = 0
    for result in results:
        match = CHECK.match(result.source)
        if match is None:
            assert not result.error, f"{result.source}\n{result.error}"
        elif match[2]:
            checks += 1
            exercise = f"{match[1]}{match[2]}"
            assert result.error.startswith(f"CheckFailed: {exercise} is not written yet"), result
        else:
            assert result.error.startswith(f"CheckFailed: {match[1]}.1 is not written yet"), result
    assert checks == sum("exercise" in c.metadata.get("nanobook", {}) for c in cells(path)) > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_solved_all_pass(
    path: Path, course: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NANOBOOK_ROOT", str(course))
    monkeypatch.setenv("NANOBOOK_WORKSPACE", str(tmp_path / "workspace"))
    workspace = Workspace()
    number = path.stem[:2]
    for stem in workspace.course.stems:
        if stem.startswith(number):  # what the chapter's cells would have left
            workspace.prepare(stem)
            for file in workspace.course.of(stem):
                workspace.write_own(file, workspace.reference(file))
    notebook = nbformat.read(path, as_version=4)
    solved = []
    for cell in notebook.cells:
        if exercise := cell.metadata.get("nanobook", {}).get("exercise"):
            file = ROOT / "exercises/solutions" / f"{exercise.replace('.', '_')}.py"
            cell.source = file.read_text(encoding="utf-8")
            solved.append(exercise)
    for result in run(notebook, course, tmp_path / "workspace"):
        assert not result.error, f"{result.source}\n{result.error}"
        if match := CHECK.match(result.source):
            assert f"{match[1]}{match[2] or '.1'} passed\n" in result.out
            assert match[2] or "later chapters will build on yours" in result.out
    assert sorted(workspace.state["exercises"]) == sorted(solved)
    assert str(int(number)) in workspace.state["chapters"]


def cells(path: Path) -> list[nbformat.NotebookNode]:
    return list(nbformat.read(path, as_version=4).cells)
