"""What `%chapter` prints: whose version of which modules a notebook stands on.

This module must not know how a version is chosen.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from nanobook.chapters import module_name


@dataclass
class Banner:
    """What a workspace was put together from: paths by where they came from.

    Attributes:
        own: the learner's, from earlier notebooks.
        reference: the course's.
        aside: those of them of which the learner has a version that no check has passed.
        lent: the course's, of later notebooks.
        here: what this notebook has built before.
        extra: the learner's files that the course does not know.
        saved: edited by hand since the workspace was last written.
        backup: the name of the backup of what a reset has cleared.
    """

    stem: str
    own: list[str] = field(default_factory=list)
    reference: list[str] = field(default_factory=list)
    aside: list[str] = field(default_factory=list)
    lent: list[str] = field(default_factory=list)
    here: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    backup: str = ""

    def __str__(self) -> str:
        lines = [f"{self.stem}: the workspace is ready"]
        for label, paths in (
            ("your own", self.own),
            ("reference", self.reference),
            ("the course's, until %check finds yours fit", self.aside),
            ("lent", self.lent),
            ("built here before", self.here),
            ("yours beside the course's", self.extra),
            ("kept your edits of", self.saved),
        ):
            if paths:
                lines.append(f"  {label}: {summary(paths)}")
        if self.backup:
            lines.append(f"  what was built here before: .nanobook/backups/{self.backup}")
        return "\n".join(lines)


def summary(paths: Iterable[str]) -> str:
    """Module names, or a count where there are many."""
    modules = [path for path in paths if not path.endswith("__init__.py")]
    names = [module_name(path) or path for path in modules]
    names = [name.removeprefix("nanoserve.") for name in names]
    if len(names) <= 4:
        return ", ".join(names) or "package folders"
    return f"{len(names)} modules ({', '.join(names[:3])}, …)"
