"""Which nanoserve a process imports: the workspace's, and none else.

The installed packages lie on Python's path as well; without care a module that the learner has not
built yet would quietly come from there. This module must not know what a workspace holds, beyond
where its files would lie.
"""

import importlib
import importlib.abc
import os
import sys
from collections.abc import Callable, Mapping, Sequence, Set
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from nanobook.chapters import PACKAGE_FOLDERS


def dotted(path: str) -> str:
    """The name under which a file is imported."""
    name = path.removeprefix("kernels/").removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def is_ours(name: str) -> bool:
    """Whether a module belongs to one of the course's packages."""
    return name.partition(".")[0] in PACKAGE_FOLDERS


def forget_packages() -> None:
    """Drop both packages from this process, so that they are imported anew."""
    for name in list(sys.modules):
        if is_ours(name):
            del sys.modules[name]
    importlib.invalidate_caches()


def parents() -> list[str]:
    """The folders, from the root, in which the packages lie."""
    return [str(Path(folder).parent) for folder in PACKAGE_FOLDERS.values()]


def python_path(folder: str | Path, rest: Sequence[str] = ()) -> str:
    """A PYTHONPATH that finds the packages below `folder` before all that it named already."""
    ours = [str(Path(folder) / parent) for parent in parents()]
    before = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    return os.pathsep.join([*ours, *(e for e in before if e not in ours), *rest])


class WorkspaceFinder(importlib.abc.MetaPathFinder):
    """Says what is missing, where Python would look for it elsewhere or just say no.

    Args:
        folder: the workspace.
        homes: path of a file -> the notebook that brings it.
        hidden: gives the files that lie there for other processes only.
        open_stem: the notebook that is open.
    """

    def __init__(
        self,
        folder: Path,
        homes: Mapping[str, str],
        hidden: Callable[[], Set[str]] = frozenset,
        open_stem: str | None = None,
    ) -> None:
        self.folder, self.hidden, self.open_stem = folder, hidden, open_stem
        self.homes = {dotted(path): (path, stem) for path, stem in homes.items()}

    def find_spec(
        self, name: str, search: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None if the search may go on; it finds the workspace's file first.

        Raises:
            ModuleNotFoundError: the workspace does not hold the module yet.
        """
        if not is_ours(name):
            return None
        if name not in self.homes:
            return None  # the learner's own, or nobody's
        path, stem = self.homes[name]
        if (self.folder / path).is_file() and path not in self.hidden():
            return None
        where = (
            "its cells are in this notebook, run them"
            if stem == self.open_stem
            else f"it comes in {stem}"
        )
        # Without its name: `from package import module` would swallow an error that has it.
        raise ModuleNotFoundError(f"{name} is not in the workspace yet: {where}")


def activate(
    folder: Path,
    homes: Mapping[str, str],
    hidden: Callable[[], Set[str]] = frozenset,
    open_stem: str | None = None,
) -> None:
    """Make this process, and those that it starts, import the packages from a workspace.

    Args:
        folder, homes, hidden, open_stem: as in WorkspaceFinder.
    """
    ours = [str(folder / parent) for parent in parents()]
    sys.path[:] = [*ours, *(entry for entry in sys.path if entry not in ours)]
    os.environ["PYTHONPATH"] = python_path(folder)
    # By name: `%reload_ext` may have made the class anew.
    others = [one for one in sys.meta_path if type(one).__name__ != WorkspaceFinder.__name__]
    sys.meta_path[:] = [WorkspaceFinder(folder, homes, hidden, open_stem), *others]
    forget_packages()
