"""The course in JupyterLab, opened at its first notebook.

    python -m nanobook.lab [any option of jupyter lab]

Beside the user's own settings come the course's (`jupyter/labconfig`): no question about news, no
look for updates. This module must not know what is in a notebook.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from nanobook.execution import CALM_THREADS
from nanobook.rebuild import CourseError, find_root, notebooks

SETTINGS = Path(__file__).with_name("jupyter")


def command(root: Path, arguments: list[str]) -> list[str]:
    """The command line that opens the course below `root`."""
    first = notebooks(root)[0].relative_to(root).as_posix()
    server = [f"--ServerApp.root_dir={root}", f"--LabApp.default_url=/lab/tree/{first}"]
    return [sys.executable, "-m", "jupyterlab", *server, *arguments]


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """The environment that it runs in."""
    paths = [given["JUPYTER_CONFIG_PATH"]] if given.get("JUPYTER_CONFIG_PATH") else []
    settings = os.pathsep.join([*paths, str(SETTINGS)])
    return {**CALM_THREADS, **given, "JUPYTER_CONFIG_PATH": settings}


def main(argv: list[str] | None = None) -> int:
    """Become JupyterLab; returns only if there is no course."""
    try:
        words = command(find_root(), sys.argv[1:] if argv is None else argv)
    except CourseError as error:
        print(f"nanobook: {error}", file=sys.stderr)
        return 1
    return os.execve(words[0], words, environment(os.environ))


if __name__ == "__main__":
    sys.exit(main())
