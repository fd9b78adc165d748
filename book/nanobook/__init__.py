"""nanobook: the tools that keep the course and the packages one thing.

`chapters` reads the map of the course, `layers` holds the packages to its order. This package works
on source text and file names alone: it must not import nanoserve or nanokernels, because it has to
run where they are absent, half built, or wrong.
"""

from typing import Any


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext nanobook`: add the course's commands to a notebook."""
    from nanobook.magics import load

    load(shell)
