"""The notebook's own commands: `%chapter`, `%%build`, `%provide`, `%check`, `%hint`.

They read what the learner typed, call the part that does the work, and print a line or two. Loaded
by `%load_ext nanobook`.
"""

import importlib
from pathlib import Path
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class

from nanobook import build as building
from nanobook import grading, imports
from nanobook.notebook import NotebookError
from nanobook.rebuild import CourseError
from nanobook.workspace import Workspace

# Frames from here stand between a command and the reader's code.
_BETWEEN = (str(Path(__file__).parent), "<frozen importlib", str(importlib.__file__))


@magics_class
class CourseMagics(Magics):
    """The commands of one notebook's kernel."""

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.shell: Any = shell
        self._workspace: Workspace | None = None
        self._stem = ""
        self._hints: dict[str, int] = {}

    @property
    def workspace(self) -> Workspace:
        """This notebook's workspace. UsageError before `%chapter`, and if it is another's now."""
        if self._workspace is None:
            raise UsageError("no workspace yet: run the cell with %chapter first")
        now = self._workspace.state["stem"]
        if now is None:
            raise UsageError("the workspace is gone: run the cell with %chapter again")
        if now != self._stem:
            raise UsageError(f"the workspace is {now}'s now: run the cell with %chapter again")
        return self._workspace

    @line_magic
    def chapter(self, line: str) -> None:
        """`%chapter 01_1 [--reference] [--reset]`: put the workspace together for a notebook."""
        words = line.split()
        flags = {word for word in words if word.startswith("--")}
        names = [word for word in words if not word.startswith("--")]
        if len(names) != 1 or flags - {"--reference", "--reset"}:
            raise UsageError("%chapter NUMBER [--reference] [--reset]")
        try:
            workspace = Workspace()
            stem = workspace.stem_of(names[0])
            banner = workspace.prepare(stem, "--reference" in flags, "--reset" in flags)
        except (CourseError, NotebookError) as error:
            raise UsageError(str(error)) from None
        except OSError as error:
            raise UsageError(f"the workspace cannot be written: {error}") from None
        workspace.activate()
        self._workspace, self._stem = workspace, stem
        print(banner)

    @cell_magic
    def build(self, line: str, cell: str) -> None:
        """`%%build path.py::Symbol`: write the cell into its file, and import what that changes."""
        path, separator, symbol = line.strip().partition("::")
        if not separator or not symbol or " " in symbol:
            raise UsageError("%%build path.py::Symbol (the file's first cell is ::header)")
        print(building.build(self.workspace, path, symbol, cell, self.shell.user_ns))

    @line_magic
    def provide(self, line: str) -> None:
        """`%provide path.py ...`: copy files of the course that are not worth reading aloud."""
        paths = line.split()
        if not paths:
            raise UsageError("%provide path.py ...")
        try:
            kept = [
                path
                for path in paths
                if not building.provide(self.workspace, path, self.shell.user_ns)
            ]
        except CourseError as error:
            raise UsageError(str(error)) from None
        count = len(paths) - len(kept)
        print(f"provided {count} file{'' if count == 1 else 's'}")
        for path in kept:
            print(f"kept your own {path}")

    @line_magic
    def check(self, line: str) -> None:
        """`%check 01.2`: grade an exercise; `%check 01`: a chapter, and the code it built."""
        grading.check(self._any_workspace(), line.strip(), self.shell.user_ns)

    @line_magic
    def hint(self, line: str) -> None:
        """`%hint 01.2`: the next hint for an exercise."""
        exercise = line.strip()
        shown = self._hints.get(exercise, 0)
        print(grading.hint(self._any_workspace().root, exercise, shown))
        self._hints[exercise] = shown + 1

    def _any_workspace(self) -> Workspace:
        """This notebook's workspace, or the course's: exercises need no `%chapter`."""
        try:
            return self._workspace or Workspace()
        except (CourseError, NotebookError) as error:
            raise UsageError(str(error)) from None


def load(shell: Any) -> None:
    """Add the commands to an IPython shell, and point tracebacks into cells."""
    magics = CourseMagics(shell)
    shell.register_magics(magics)

    def show(shell: Any, kind: Any, error: BaseException, trace: Any, tb_offset: Any = None) -> Any:
        if magics._workspace is not None:
            building.annotate(magics._workspace, error)
        _hide_finder(trace)
        lines = _lines(shell, kind, error, trace, tb_offset)
        shell._showtraceback(kind, error, lines)
        return lines

    shell.set_custom_exc((Exception,), show)
    shell.events.register("post_run_cell", lambda result: building.forget_lines())


def _hide_finder(trace: Any) -> None:
    """End a traceback at the import statement that found nothing."""
    while trace is not None and trace.tb_next is not None:
        if trace.tb_next.tb_frame.f_code.co_filename == imports.__file__:
            trace.tb_next = None
        trace = trace.tb_next


def _lines(shell: Any, kind: Any, error: BaseException, trace: Any, tb_offset: Any) -> list[str]:
    """What to show of an error: of one that came up inside a command, only the learner's part."""
    if isinstance(error, grading.CheckFailed):
        return error._render_traceback_()
    inside, start = False, trace
    while start is not None:
        name = start.tb_frame.f_code.co_filename
        inside = inside or name == __file__
        if inside and not name.startswith(_BETWEEN):
            break
        start = start.tb_next
    if not inside:
        found = shell.InteractiveTB.structured_traceback(kind, error, trace, tb_offset=tb_offset)
    elif isinstance(error, SyntaxError):
        found = shell.SyntaxTB.structured_traceback(kind, error, [])
    elif start is not None:
        found = shell.InteractiveTB.structured_traceback(kind, error, start, tb_offset=0)
    else:
        found = [f"{kind.__name__}: {error}", *getattr(error, "__notes__", [])]
    return [str(line) for line in found]
