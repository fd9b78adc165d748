"""The book: every chapter run and rendered as HTML that needs no network to be read.

    python -m nanobook.site [--out build/book]

Three steps: each written chapter is run (or its kept copy found), the pages are laid out in one
folder, and Sphinx renders that folder without running anything. A warning is an error. This module
must not know what a page says.
"""

import argparse
import importlib.util
import shutil
import sys
import time
from pathlib import Path

from nanobook.chapters import CourseMap, MapError, load_map
from nanobook.execution import Executed, ExecutionError
from nanobook.notebook import NotebookError
from nanobook.pages import contents, course_map_page, dressed, parts
from nanobook.rebuild import CourseError, find_root

# MathJax in one file that fetches nothing: everything that TeX needs, drawn as SVG.
MATHJAX = "static/mathjax/tex-svg-full.js"

# Where generated text goes in the pages of book/.
_PLACES = {"<!-- contents -->": "contents", "<!-- map -->": "map"}


class SiteError(RuntimeError):
    """The book cannot be built; the message says why."""


def main(argv: list[str] | None = None) -> int:
    """Build the book; its exit status."""
    parser = argparse.ArgumentParser(prog="python -m nanobook.site", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder to write to (default: build/book)")
    args = parser.parse_args(argv)
    try:
        root = find_root()
        out = (args.out or root / "build" / "book").resolve()
        build(root, load_map(), out)
    except (CourseError, ExecutionError, MapError, NotebookError, SiteError) as error:
        print(f"nanobook: {error}", file=sys.stderr)
        return 1
    print(f"the book is ready: {out / 'index.html'}")
    return 0


def build(root: Path, course_map: CourseMap, out: Path) -> None:
    """Run the chapters of `root`, and render them to `out`.

    Intermediate files stay in `build/` below `root`, where the next build finds them.

    Raises:
        ExecutionError: a chapter's cell has failed.
        SiteError: Sphinx has warned about something, or is not installed.
    """
    work = root / "build" / "book-work"
    pages = _pages(root, course_map, Executed(root, work / "executed"))
    _lay_out(work / "source", pages)
    _render(work / "source", out, work / "doctrees")


def _pages(root: Path, course_map: CourseMap, executed: Executed) -> dict[str, bytes]:
    """Path below the source folder -> contents."""
    pages = {}
    course_parts = parts(root, course_map)
    for part in course_parts:
        for stem in part.written:
            copy = _run(root / "chapters" / f"{stem}.ipynb", executed)
            pages[f"chapters/{stem}.ipynb"] = dressed(copy.read_text("utf-8")).encode()
        for stem in part.exercises:
            text = (root / "exercises" / f"{stem}.ipynb").read_text("utf-8")
            pages[f"exercises/{stem}.ipynb"] = dressed(text).encode()
    generated = {"contents": contents(course_parts), "map": course_map_page(root, course_map)}
    book = root / "book"
    for file in [book / "conf.py", *book.glob("*.md"), *book.glob("_static/**/*")]:
        if file.is_file():
            pages[file.relative_to(book).as_posix()] = _filled(file, generated)
    pages["_static/vendor/mathjax.js"] = _mathjax()
    return pages


def _run(notebook: Path, executed: Executed) -> Path:
    if copy := executed.find(notebook):
        return copy
    print(f"running {notebook.stem}", end=" ", flush=True)
    start = time.monotonic()
    copy = executed.make(notebook)
    print(f"({time.monotonic() - start:.0f} s)", flush=True)
    return copy


def _filled(file: Path, generated: dict[str, str]) -> bytes:
    if file.suffix != ".md":
        return file.read_bytes()
    text = file.read_text("utf-8")
    for place, name in _PLACES.items():
        text = text.replace(place, generated[name])
    return text.encode()


def _mathjax() -> bytes:
    spec = importlib.util.find_spec("sphinx-mathjax-offline")
    if spec is None or spec.origin is None:
        raise SiteError("sphinx-mathjax-offline is not installed: pip install -e '.[book]'")
    return (Path(spec.origin).parent / MATHJAX).read_bytes()


def _lay_out(folder: Path, pages: dict[str, bytes]) -> None:
    """Make `folder` hold just these pages; one that has not changed is not touched, so that Sphinx
    reads again only what has.
    """
    if folder.is_dir():
        for file in folder.rglob("*"):
            if file.is_file() and file.relative_to(folder).as_posix() not in pages:
                file.unlink()
    for name, content in pages.items():
        file = folder / name
        if not (file.is_file() and file.read_bytes() == content):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)


def _render(source: Path, out: Path, doctrees: Path) -> None:
    try:
        from sphinx.cmd.build import build_main
    except ModuleNotFoundError as error:
        raise SiteError("Sphinx is not installed: pip install -e '.[book]'") from error
    if out.is_dir() and any(out.iterdir()) and not (out / ".buildinfo").is_file():
        raise SiteError(f"{out} is not empty, and holds no book: it is left alone")
    print("rendering", flush=True)
    options = ["--fail-on-warning", "--keep-going", "--quiet", "--builder", "html"]
    shutil.rmtree(out, ignore_errors=True)
    if build_main([*options, "--doctree-dir", str(doctrees), str(source), str(out)]):
        raise SiteError("Sphinx has warned about the pages (above)")


if __name__ == "__main__":
    sys.exit(main())
