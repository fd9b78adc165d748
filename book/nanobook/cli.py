"""`nanobook`: the course's command line.

    nanobook progress       which exercises have been passed
    nanobook serve ...      serve with the package that your cells have built
    nanobook map            which cell holds which part of which module
    nanobook tangle OUT     rebuild both packages from the notebooks alone

For authors of chapters:

    nanobook check          fail, with a diff, where notebooks and packages differ
    nanobook sync           rewrite the notebooks' cells from the packages; what was edited in cells
                            that carry the packages is lost

It reads arguments and prints; what is done is done elsewhere.
"""

import argparse
import json
import sys
from pathlib import Path

from nanobook.chapters import CourseMap, MapError, load_map
from nanobook.notebook import NotebookError
from nanobook.rebuild import Course, CourseError, chapter_number, find_root, write_files
from nanobook.sync import check, shares, sync, total_shares


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; its exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("progress", "serve"):
        return _hand_over(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(
        prog="nanobook",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="nanobook {progress,serve,map,tangle,check,sync} ...",
    )
    commands = parser.add_subparsers(dest="command", required=True, help=argparse.SUPPRESS)
    for name in ("sync", "check"):
        commands.add_parser(name)
    tangle_parser = commands.add_parser("tangle")
    tangle_parser.add_argument("out", type=Path, metavar="OUT", help="folder to write to")
    tangle_parser.add_argument(
        "--force", action="store_true", help="write into a folder that is not empty"
    )
    map_parser = commands.add_parser("map")
    map_parser.add_argument("--json", action="store_true", help="as JSON")
    args = parser.parse_args(arguments)
    try:
        root = find_root()
        if args.command == "sync":
            return _sync(root, load_map())
        if args.command == "check":
            return _check(root, load_map())
        if args.command == "tangle":
            return _tangle(root, args.out, args.force)
        return _map(root, load_map(), args.json)
    except (MapError, CourseError, NotebookError) as error:
        print(f"nanobook: {error}", file=sys.stderr)
        return 1


def _hand_over(command: str, arguments: list[str]) -> int:
    if command == "progress":
        from nanobook.progress import main as progress

        return progress(arguments)
    from nanobook.serving import main as serve

    return serve(arguments)


def _sync(root: Path, course_map: CourseMap) -> int:
    changed, problems = sync(root, course_map)
    for name in changed:
        print(f"rewrote {name}")
    for problem in problems:
        print(f"nanobook: {problem}", file=sys.stderr)
    if not changed and not problems:
        print("the notebooks carry the packages as they are")
    return 1 if problems else 0


def _check(root: Path, course_map: CourseMap) -> int:
    if problems := check(root, course_map):
        print("\n".join(problems))
        print(f"nanobook check: {len(problems)} problem(s)", file=sys.stderr)
        return 1
    by_chapter = shares(Course.read(root), course_map)
    for chapter in course_map.chapters:
        if by_chapter[chapter.number].total:
            print(f"chapter {chapter.number:>2}: {by_chapter[chapter.number]}")
    print(f"       all: {total_shares(by_chapter)}")
    return 0


def _tangle(root: Path, out: Path, force: bool) -> int:
    if out.is_file():
        raise CourseError(f"{out} is a file")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise CourseError(f"{out} is not empty (--force writes into it all the same)")
    course = Course.read(root)
    write_files(course.files.items(), out)
    lines = sum(len(text.splitlines()) for text in course.files.values())
    print(f"{len(course.files)} files, {lines} lines, from {len(course.stems)} notebooks: {out}")
    return 0


def course_table(root: Path, course_map: CourseMap) -> list[dict[str, object]]:
    """Chapter -> notebook -> file -> its cells' symbols (none: provided), as plain data."""
    course = Course.read(root)
    table: list[dict[str, object]] = []
    for chapter in course_map.chapters:
        stems = [stem for stem in course.stems if chapter_number(stem) == chapter.number]
        parts = [
            {
                "notebook": stem,
                "placeholder": stem in course.placeholders,
                "files": {path: course.symbols.get(path, []) for path in course.of(stem)},
            }
            for stem in stems
        ]
        table.append({"number": chapter.number, "title": chapter.title, "notebooks": parts})
    return table


def _map(root: Path, course_map: CourseMap, as_json: bool) -> int:
    table = course_table(root, course_map)
    if as_json:
        print(json.dumps(table, indent=1))
        return 0
    course = Course.read(root)
    for chapter in course_map.chapters:
        print(f"{chapter.number:>2} {chapter.title}")
        for stem in course.stems:
            if chapter_number(stem) != chapter.number:
                continue
            print(f"     {stem}{' (placeholder)' if stem in course.placeholders else ''}")
            for path in course.of(stem):
                symbols = course.symbols.get(path)
                print(f"       {path}: {' · '.join(symbols) if symbols else 'provided'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
