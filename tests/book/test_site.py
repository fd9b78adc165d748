"""A small course becomes a book: complete, quiet, readable anywhere, and asking for nothing."""

import functools
import http.server
import json
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nanobook import site
from nanobook.chapters import Chapter, CourseMap
from nanobook.notebook import Cell, Notebook, dumps
from nanobook.pages import contents, course_map_page, dressed, parts
from nanofixtures.browser import chromium, page_context

# The theme and MyST still use what a later Sphinx will drop.
pytestmark = pytest.mark.filterwarnings("ignore:.*Check CHANGES for Sphinx API modifications")

ROOT = Path(__file__).resolve().parents[2]

MAP = CourseMap(
    (
        Chapter(0, "toy", "A toy", "Toys are small.", True, ("nanoserve.a",), ()),
        Chapter(1, "later", "Later", "Not now.", False, ("nanoserve.b",), ()),
    )
)

MAGIC = """
from IPython.core.magic import register_cell_magic
from nanobook import style, widgets

@register_cell_magic
def build(line, cell):
    print("written: a thousand " "lines about the workspace")
style.use()
"""

FIGURE = """
def draw(batch):
    fig, ax = style.figure(height=3)
    ax.plot([1, batch], [1, 2], **next(style.line_styles()))
    style.note(fig, "a note")

widgets.explore(draw, batch=[3, 5])
fig, ax = style.figure(height=2)
_ = ax.bar([1, 2], [3, 4], **next(style.bar_styles()))
"""

TEXT = """# A toy page

A formula, $\\frac{q k^\\top}{\\sqrt{d}}$, and another:

$$ \\mathrm{softmax}(x)_i = \\frac{e^{x_i}}{\\sum_j e^{x_j}} $$

The word zyzzyva stands here alone. The [exercises](../exercises/00_toy.ipynb) are elsewhere.
"""


def make_course(root: Path) -> Path:
    """A course of one written chapter, one exercise notebook and one placeholder."""
    for name in ("chapters", "exercises", "nanoserve"):
        (root / name).mkdir(parents=True)
    (root / "nanoserve/a.py").write_text("x = 1\n")
    shutil.copytree(ROOT / "book", root / "book", ignore=shutil.ignore_patterns("nanobook", "data"))
    chapter = [
        Cell("code", MAGIC),
        Cell("markdown", TEXT),
        Cell(
            "code", "%%build nanoserve/a.py::header\nimport os\n\n\ndef f(x):\n    return [x, 'y']"
        ),
        Cell("code", FIGURE),
        Cell("code", "print('y' * 300)"),
    ]
    exercise = [
        Cell("markdown", "# Exercises of the toy"),
        Cell("code", 'raise NotImplementedError("00.1")', nanobook={"exercise": "00.1"}),
        Cell("code", "%check 00.1"),
    ]
    later = Notebook([Cell("code", "%provide nanoserve/b.py")], {"placeholder": True})
    later.nanobook["provided"] = {"nanoserve/b.py": ["x = 2\n"]}
    (root / "chapters/00_toy.ipynb").write_text(dumps(Notebook(chapter)))
    (root / "chapters/01_later.ipynb").write_text(dumps(later))
    (root / "exercises/00_toy.ipynb").write_text(dumps(Notebook(exercise)))
    return root


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_course(tmp_path_factory.mktemp("course"))
    out = root / "build/book"
    site.build(root, MAP, out)
    return out


@pytest.fixture(scope="module")
def served(book: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(book))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_dressed_notebook_has_anchors_and_no_workspace_talk() -> None:
    out = [{"output_type": "stream", "name": "stdout", "text": "own: 3 modules"}]
    cells = [Cell("code", "%load_ext nanobook\n%chapter 0"), Cell("code", "%%build a.py::f\nx")]
    data = json.loads(dumps(Notebook([*cells, Cell("code", "print(1)")], {"provided": {}})))
    for cell in data["cells"]:
        cell["outputs"] = out
    done = json.loads(dressed(json.dumps(data)))
    assert "nanobook" not in done["metadata"]
    kinds = [(cell["cell_type"], len(cell.get("outputs", []))) for cell in done["cells"]]
    assert kinds == [("code", 0), ("markdown", 0), ("code", 0), ("code", 1)]
    assert 'id="build-a-f"' in done["cells"][1]["source"]


def test_a_dressed_cell_is_free_of_remarks_to_linters_and_wraps_prose() -> None:
    long = Cell("code", "import os  # noqa: F401\nprint('word ' * 30)")
    build = Cell("code", "%%build a.py::f\nimport os  # noqa: F401")
    data = json.loads(dumps(Notebook([long, build])))
    data["cells"][0]["outputs"] = [{"output_type": "stream", "text": ["word " * 30 + "\n"]}]
    first, _, second = json.loads(dressed(json.dumps(data)))["cells"]
    assert first["source"] == "import os\nprint('word ' * 30)"
    assert first["metadata"]["tags"] == ["long-lines"]
    assert "noqa" in "".join(second["source"])  # these are the package's bytes
    assert "tags" not in second["metadata"]


def test_what_is_generated_names_every_chapter_and_file(tmp_path: Path) -> None:
    root = make_course(tmp_path / "course")
    text = contents(parts(root, MAP))
    assert "chapters/00_toy\nexercises/00_toy" in text
    assert "chapters/01_later" not in text and "not written yet" in text
    page = course_map_page(root, MAP)
    assert '<a href="chapters/00_toy.html#build-a-header">header, f</a>' in page
    assert "provided: `nanoserve/b.py`" in page


@pytest.mark.slow
def test_pages_carry_outputs_but_no_talk_of_the_workspace(book: Path) -> None:
    page = (book / "chapters/00_toy.html").read_text()
    assert "yyyyyyyyyy" in page
    assert page.count('.svg"') >= 2 + 1  # two figures and the icon
    assert 'alt="Figure: A toy page"' in page
    assert "batch = 3" in page and "In the notebook you can drag" in page
    assert "a thousand lines" not in page
    assert 'class="err"' not in page
    assert '<span class="k">def</span>' in page  # a build cell is coloured as Python
    assert 'id="build-a-header"' in page
    exercise = (book / "exercises/00_toy.html").read_text()
    assert "NotImplementedError" in exercise and "Traceback" not in exercise
    assert not (book / "chapters/01_later.html").exists()


@pytest.mark.slow
def test_pages_name_no_outside_source(book: Path) -> None:
    sources = [
        (file.name, match)
        for file in book.rglob("*.html")
        for match in re.findall(
            r"<(?:script|link|img|iframe)\b[^>]*https?://[^>]*>", file.read_text()
        )
        if 'rel="canonical"' not in match
    ]
    assert sources == []
    imports = [
        file.name
        for file in book.rglob("*.css")
        if re.search(r"(@import|url\()\s*[\"']?https?://", file.read_text(errors="replace"))
    ]
    assert imports == []


@pytest.mark.slow
def test_read_in_a_browser(book: Path, served: str, tmp_path: Path) -> None:
    with chromium() as browser:
        with page_context(browser) as (context, outside):
            page = context.new_page()
            errors: list[str] = []
            page.on("pageerror", lambda error: errors.append(str(error)))
            for file in sorted(book.rglob("*.html")):
                page.goto(f"{served}/{file.relative_to(book)}")
                page.wait_for_load_state("networkidle")
            page.goto(f"{served}/chapters/00_toy.html")
            page.wait_for_selector("mjx-container svg")
            assert page.locator("mjx-container").count() == 2

            page.goto(f"{served}/search.html?q=zyzzyva")
            hit = page.wait_for_selector("#search-results a")
            assert "A toy page" in hit.inner_text()

            page.goto(f"{served}/chapters/00_toy.html")
            seen = {}
            for mode in ("light", "dark"):
                page.locator("button.theme-switch-button:visible").first.click()
                page.locator(f".theme-change-button[data-mode={mode}]:visible").first.click()
                page.wait_for_timeout(500)  # the colours fade over
                seen[mode] = page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert seen["light"] != seen["dark"]
            assert outside == [] and errors == []
        with page_context(browser, color_scheme="dark") as (context, outside):
            page = context.new_page()
            page.goto(f"{served}/chapters/00_toy.html")
            figure = page.locator(".cell_output img").first
            assert figure.evaluate("e => getComputedStyle(e).backgroundColor") == (
                "rgb(255, 255, 255)"
            )
            page.goto((book / "chapters/00_toy.html").as_uri())  # no server at all
            page.wait_for_selector("mjx-container svg")
            assert outside == []
        with page_context(browser, viewport={"width": 360, "height": 740}) as (context, _):
            page = context.new_page()
            for file in sorted(book.rglob("*.html")):
                page.goto(f"{served}/{file.relative_to(book)}")
                wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert page.evaluate(wide) == 0, f"{file.name} is wider than a phone"


@pytest.mark.slow
def test_a_warning_fails_the_book_and_a_folder_that_is_no_book_is_left_alone(
    tmp_path: Path,
) -> None:
    root = make_course(tmp_path / "course")
    (root / "book/about.md").write_text("# About\n\n[nowhere](nowhere.md)\n")
    with pytest.raises(site.SiteError, match="warned"):
        site.build(root, MAP, tmp_path / "out")
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter").write_text("dear all")
    with pytest.raises(site.SiteError, match="left alone"):
        site.build(root, MAP, home)
    assert (home / "letter").exists()
