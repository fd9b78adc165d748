"""The map of the course knows every module, once, and says clearly when it does not."""

from pathlib import Path

import pytest
from nanobook.chapters import MapError, differences, load_map

ROOT = Path(__file__).resolve().parents[2]

CHAPTER = """
[[chapter]]
number = {number}
name = "{name}"
title = "A title"
idea = "An idea."
built = {built}
provided = []
"""


def write_map(folder: Path, *chapters: tuple[int, str, list[str]]) -> Path:
    file = folder / "chapters.toml"
    file.write_text(
        "".join(CHAPTER.format(number=n, name=name, built=built) for n, name, built in chapters)
    )
    return file


def test_every_module_is_in_the_map_and_every_entry_has_its_file() -> None:
    assert differences(load_map(), ROOT) == []


def test_chapter_lookup() -> None:
    owners = load_map().modules
    assert owners["nanoserve.envs"].number == 0
    assert owners["nanoserve.scheduler"].name == "continuous_batching"


def test_a_file_without_entry_and_an_entry_without_file_are_both_named(tmp_path: Path) -> None:
    (tmp_path / "nanoserve" / "kvcache").mkdir(parents=True)
    for file in ("__init__.py", "listed.py", "kvcache/__init__.py", "kvcache/forgotten.py"):
        (tmp_path / "nanoserve" / file).touch()
    course = load_map(write_map(tmp_path, (3, "memory", ["nanoserve.listed", "nanoserve.absent"])))
    unknown, missing = differences(course, tmp_path)
    assert unknown.startswith("nanoserve.kvcache.forgotten is not in chapters.toml")
    assert missing.startswith("nanoserve.absent is listed in chapter 3 (memory)")


@pytest.mark.parametrize(
    ("chapters", "complaint"),
    [
        ([(1, "a", []), (0, "b", [])], "must rise"),
        ([(1, "a", []), (1, "b", [])], "must rise"),
        ([(0, "a", []), (1, "a", [])], "same name"),
        ([(0, "a", ["nanoserve.x"]), (2, "b", ["nanoserve.x"])], "twice: chapters 0 and 2"),
        ([(0, "a", ["nanoserve.x", "nanoserve.x.y"])], "nanoserve.x is a package"),
        ([(0, "a", ["nanoserv.x"])], "not a module of ours"),
        ([(0, "a", ["nanoserve"])], "not a module of ours"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(
    chapters: list[tuple[int, str, list[str]]], complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(MapError, match=complaint):
        load_map(write_map(tmp_path, *chapters))


def test_a_misspelt_key_is_refused(tmp_path: Path) -> None:
    file = write_map(tmp_path, (0, "a", []))
    file.write_text(file.read_text().replace("built", "build"))
    with pytest.raises(MapError, match="build, built"):
        load_map(file)
