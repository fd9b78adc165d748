"""Chapter order is import order: the import-linter contracts, generated from the map and checked.

`python -m nanobook.layers` first compares the map with the files, then writes the contracts to a
temporary file and runs import-linter on it. Nothing generated is kept, so nothing can be stale.
Imports for types only (`if TYPE_CHECKING:`) are excepted; imports inside functions are not. This
module must not import what it checks: import-linter reads the source without running it.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from nanobook.chapters import (
    MAP_FILE,
    PACKAGE_FOLDERS,
    CourseMap,
    MapError,
    differences,
    load_map,
)

_HEADER = """\
[importlinter]
root_packages =
    nanoserve
    nanokernels
    nanobook
exclude_type_checking_imports = True

[importlinter:contract:chapters]
name = Chapter order is import order
type = layers
layers =
"""

# Tensors in, tensors out; and neither package may lean on the tools that print it.
_FOOTER = """
[importlinter:contract:kernels]
name = The kernels know nothing of the engine
type = forbidden
source_modules = nanokernels
forbidden_modules = nanoserve

[importlinter:contract:tools]
name = The course's tools import neither the engine nor the kernels
type = forbidden
source_modules = nanobook
forbidden_modules =
    nanoserve
    nanokernels

[importlinter:contract:course]
name = The engine and the kernels know nothing of the course
type = forbidden
source_modules =
    nanoserve
    nanokernels
forbidden_modules = nanobook
"""


def contracts(course: CourseMap) -> str:
    """The import-linter configuration for a map, in its INI form.

    The layers are leaf modules, since a layer cannot contain another and a package holds modules of
    several chapters. The modules of one chapter are siblings that may import each other (`a : b`).
    """
    layers = [
        "    " + " : ".join(chapter.modules)
        for chapter in reversed(course.chapters)
        if chapter.modules
    ]
    return _HEADER + "\n".join(layers) + "\n" + _FOOTER


def check(map_file: Path, root: Path) -> int:
    """Check the packages below `root` against a map: 0 if all is well, else 1 and the reasons."""
    from importlinter.cli import lint_imports

    try:
        course = load_map(map_file)
    except MapError as error:
        print(f"{map_file}: {error}")
        return 1
    if found := differences(course, root):
        print("\n".join(found))
        return 1
    for folder in PACKAGE_FOLDERS.values():
        sys.path.insert(0, str((root / folder).parent.resolve()))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "importlinter.ini"
        config.write_text(contracts(course), encoding="utf-8")
        return lint_imports(str(config), no_cache=True, no_logo=True)


def main(argv: list[str] | None = None) -> int:
    """The command line: `python -m nanobook.layers [--map FILE] [--root FOLDER] [--print]`."""
    parser = argparse.ArgumentParser(prog="nanobook.layers", description=check.__doc__)
    parser.add_argument("--map", type=Path, default=MAP_FILE, help="the map of the course")
    parser.add_argument(
        "--root", type=Path, default=Path.cwd(), help="folder that holds nanoserve/ and kernels/"
    )
    parser.add_argument("--print", action="store_true", help="print the contracts, check nothing")
    args = parser.parse_args(argv)
    if args.print:
        print(contracts(load_map(args.map)), end="")
        return 0
    return check(args.map, args.root)


if __name__ == "__main__":
    sys.exit(main())
