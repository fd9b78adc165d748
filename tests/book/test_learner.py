"""One learner, one workspace, the whole course: every cell built, edited, and built as it was."""

import os
from pathlib import Path

import pytest
from nanobook.imports import dotted
from nanobook.rebuild import Course
from nanofixtures.toy_course import Toy, cells, copy_course

ROOT = Path(__file__).resolve().parents[2]


def edited(source: str) -> str:
    """A build cell with a line more."""
    method = "." in source.partition("\n")[0].partition("::")[2]
    return source.rstrip("\n") + f"\n{'    ' if method else ''}# Mine.\n"


@pytest.mark.slow
def test_every_cell_can_be_edited_with_all_that_uses_it_loaded(tmp_path: Path) -> None:
    """Modules that can be imported once and not again, two names for one thing, a kernel that does
    not follow: any of them would show here.
    """
    course = copy_course(tmp_path / "course", ROOT)
    toy = Toy(course, tmp_path / "workspace")
    shown = Course.read(course)
    for stem in shown.stems:
        if stem in shown.placeholders:
            continue
        sources = [s for s in cells(course, stem) if s.startswith(("%%build", "%provide"))]
        loaded = [*shown.before(stem), *shown.of(stem)]
        modules = {dotted(p) for p in loaded if p.endswith(".py") and "__main__" not in p}
        builds = [source for source in sources if source.startswith("%%build")]
        again = [cell for source in builds for cell in (edited(source), source)]
        imports = "\n".join(f"import {name}" for name in sorted(modules))
        banner, *results = toy.good(f"%chapter {stem}", *sources, imports, *again)
        for source, ran in zip(again, results[-len(again) :] if again else [], strict=True):
            assert ran.out.startswith("built ") and "stale" not in ran.out, f"{source}\n{ran.out}"
            assert len(ran.out.splitlines()) == 1
        assert len(banner.out.splitlines()) <= 5 and os.fspath(tmp_path) not in banner.out
        for path in shown.of(stem):
            assert toy.text(path) == shown.files[path], path
