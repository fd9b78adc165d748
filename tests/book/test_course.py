"""The course as a learner meets it: JupyterLab in a browser, a figure to drag, an exercise."""

import os
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from nanobook.lab import SETTINGS, command, environment, main
from nanobook.notebook import Cell, Notebook, dumps, read
from nanofixtures.browser import chromium, page_context
from nanofixtures.lab import NotebookPage, course_server

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

ROOT = Path(__file__).resolve().parents[2]

FIGURE = """from nanobook import style, widgets

style.use()

def draw(batch):
    fig, ax = style.figure(height=2)
    ax.plot([0, batch], [0, 1])
    ax.set_title(f"batch {batch}")

widgets.explore(draw, batch=widgets.slider(1, 64, start=1))"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A copy, so that what a learner does here stays here, with a short notebook in front."""
    root = tmp_path / "course"
    for name in ("chapters", "exercises"):
        shutil.copytree(ROOT / name, root / name)
    cells = [
        Cell("markdown", "# A figure"),
        Cell("code", "%load_ext nanobook\n%chapter 00_0"),
        Cell("code", FIGURE),
        Cell("code", "import nanobook\nprint(6 * 7)"),
    ]
    (root / "chapters/00_0_figure.ipynb").write_text(dumps(Notebook(cells)))
    return root


def test_the_course_opens_at_its_first_notebook_with_its_own_settings(course: Path) -> None:
    words = command(course, ["--no-browser"])
    assert words[:3] == [sys.executable, "-m", "jupyterlab"]
    assert "--LabApp.default_url=/lab/tree/chapters/00_0_figure.ipynb" in words
    assert words[-1] == "--no-browser"
    given = {"A": "b", "OMP_WAIT_POLICY": "ACTIVE"}
    made = environment(given)
    assert made.items() >= {**given, "JUPYTER_CONFIG_PATH": str(SETTINGS)}.items()
    assert environment({})["OMP_WAIT_POLICY"] == "PASSIVE"
    own = environment({"JUPYTER_CONFIG_PATH": "/mine"})["JUPYTER_CONFIG_PATH"]
    assert own.split(os.pathsep) == ["/mine", str(SETTINGS)]


def test_where_there_is_no_course_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NANOBOOK_ROOT", str(tmp_path))
    assert main([]) == 1
    assert "holds no chapters/" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_learner_runs_drags_fails_and_passes(course: Path, tmp_path: Path) -> None:
    with (
        chromium() as browser,
        course_server(course, tmp_path) as address,
        page_context(browser, viewport={"width": 1300, "height": 900}) as (context, outside),
    ):
        page = context.new_page()
        page.goto(address, wait_until="domcontentloaded")
        first = NotebookPage(page, course / "chapters/00_0_figure.ipynb")
        cells = first.run_all(90)
        assert cells[3]["outputs"][0]["text"] == ["42\n"]
        picture = first.cell(2).locator("img.widget-image")
        before = svg(picture)
        drag(page, first.cell(2).locator(".noUi-handle").first, by=120)
        page.wait_for_function(
            "([image, old]) => fetch(image.src).then(r => r.text()).then(t => t != old)",
            arg=[picture.element_handle(), before],
        )
        assert page.locator(".Toastify__toast").count() == 0  # nobody asks about news

        file, stub, check = first_exercise(course)
        exercise_id = read(file).cells[stub].nanobook["exercise"]
        page.goto(f"{address}/lab/tree/exercises/{file.name}", wait_until="domcontentloaded")
        exercises = NotebookPage(page, file)
        for index in range(check):
            if read(file).cells[index].kind == "code":
                exercises.run_cell(index)
        failed = exercises.run_cell(check)
        assert re.search(rf"{re.escape(exercise_id)}.*not written yet", failed), failed
        solution = ROOT / "exercises/solutions" / f"{exercise_id.replace('.', '_')}.py"
        exercises.write_cell(stub, solution.read_text())
        exercises.run_cell(stub)
        passed = exercises.run_cell(check)
        assert f"{exercise_id} passed" in passed
        assert outside == []


def first_exercise(course: Path) -> tuple[Path, int, int]:
    """The first exercise of the course: its notebook, its stub's cell and its check's."""
    file = min((course / "exercises").glob("*.ipynb"))
    cells = read(file).cells
    stub = next(n for n, cell in enumerate(cells) if "exercise" in cell.nanobook)
    check = next(n for n in range(stub, len(cells)) if cells[n].source.startswith("%check"))
    return file, stub, check


def svg(picture: "Locator") -> str:
    return picture.evaluate("image => fetch(image.src).then(answer => answer.text())")


def drag(page: "Page", handle: "Locator", by: float) -> None:
    handle.scroll_into_view_if_needed()
    box = handle.bounding_box()
    assert box is not None
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(x, y)
    page.mouse.down()
    for step in range(1, 7):
        page.mouse.move(x + by * step / 6, y)
    page.mouse.up()
