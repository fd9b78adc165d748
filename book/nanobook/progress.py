"""`nanobook progress`: which exercises were passed, and which code is the learner's own."""

import argparse
import sys

from nanobook.grading import exercise_ids
from nanobook.rebuild import CourseError, chapter_number
from nanobook.workspace import Workspace


def report(workspace: Workspace) -> str:
    """A line a chapter: its exercises, and how much of its code the learner has built."""
    passed = workspace.state["exercises"]
    ids = exercise_ids(workspace.root)
    course = workspace.course
    numbers = sorted(
        {chapter_number(stem) for stem in course.stems if stem not in course.placeholders}
    )
    lines = []
    for number in numbers:
        mine = [one for one in ids if int(one.partition(".")[0]) == number]
        marks = " ".join(f"{one}{'✓' if one in passed else '·'}" for one in mine)
        paths = [path for path in course.order if chapter_number(course.homes[path]) == number]
        own = sum(workspace.own(path) is not None for path in paths)
        fit = ", checked" if str(number) in workspace.state["chapters"] else ""
        line = f"chapter {number:02}: built {own} of {len(paths)} files{fit}"
        lines.append(f"{line}; {marks}" if marks else line)
    done = sum(one in passed for one in ids)
    lines += [str(error) for error in workspace.unreadable.values()]
    return "\n".join([*lines, f"{done} of {len(ids)} exercises passed"])


def main(argv: list[str] | None = None) -> int:
    """The subcommand `nanobook progress`."""
    parser = argparse.ArgumentParser(prog="nanobook progress", description=__doc__)
    parser.parse_args(argv)
    try:
        print(report(Workspace()))
    except CourseError as error:
        print(f"nanobook: {error}", file=sys.stderr)
        return 1
    return 0
