"""JupyterLab as `make course` starts it, driven as a person would: by mouse and keyboard.

What a cell has put out is read from the notebook that the page saves, so that it does not matter
what the page happens to show.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

OPTIONS = ("--no-browser", "--allow-root", "--ip=127.0.0.1", "--ServerApp.port=0")


@contextmanager
def course_server(root: Path, scratch: Path) -> Iterator[str]:
    """`python -m nanobook.lab` for the course below `root`; its address, and the end of it."""
    runtime = scratch / "runtime"
    environment = {
        **os.environ,
        "NANOBOOK_ROOT": str(root),
        "NANOBOOK_WORKSPACE": str(scratch / "workspace"),
        "JUPYTER_CONFIG_DIR": str(scratch / "config"),
        "JUPYTER_DATA_DIR": str(scratch / "data"),
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "IPYTHONDIR": str(scratch / "ipython"),
    }
    command = [sys.executable, "-m", "nanobook.lab", *OPTIONS, "--IdentityProvider.token="]
    log = scratch / "lab.log"
    with log.open("w") as out:
        server = subprocess.Popen(command, cwd=root, env=environment, stdout=out, stderr=out)
    try:
        file = wait_for(lambda: next(runtime.glob("jpserver-*.json"), None), 60, log.read_text)
        yield json.loads(file.read_text())["url"].rstrip("/")
    finally:
        server.terminate()  # its kernels go with it
        server.wait(30)


def wait_for(look: Callable[[], Any], seconds: float, said: Callable[[], str] = str) -> Any:
    """What `look` gives once it gives something; if it never does, fails with `said()`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.3)
    raise AssertionError(f"not within {seconds} s: {said()[-2000:]}")


class NotebookPage:
    """One notebook, open in JupyterLab.

    Args:
        page: the browser's page.
        file: the notebook's file, which the page saves to.
    """

    def __init__(self, page: "Page", file: Path) -> None:
        self.page = page
        self.file = file
        page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=60_000)
        ready = '.jp-Notebook-ExecutionIndicator[data-status="idle"]'
        page.wait_for_selector(ready, state="attached", timeout=60_000)
        page.wait_for_timeout(2000)  # a command given as soon as it says so is lost

    def cell(self, index: int) -> "Locator":
        """A cell, by its place in the file."""
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden) .jp-Cell").nth(index)

    def saved(self) -> list[dict[str, Any]]:
        """The cells, as the page has them now."""
        before = self.file.stat().st_mtime_ns
        self.page.keyboard.press("Control+s")
        for _ in range(10):
            self.page.wait_for_timeout(200)
            if self.file.stat().st_mtime_ns != before:
                break
        return json.loads(self.file.read_text())["cells"]

    def run_all(self, seconds: float) -> list[dict[str, Any]]:
        """Run > Run All Cells; the cells once all have run."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text="Run").first.click()
        self.page.locator('.lm-Menu-item[data-command="runmenu:run-all"]').click()

        def done() -> list[dict[str, Any]] | None:
            cells = self.saved()
            code = [cell for cell in cells if cell["cell_type"] == "code"]
            return cells if all(cell["execution_count"] for cell in code) else None

        return wait_for(done, seconds, lambda: text_of(self.saved()))

    def run_cell(self, index: int, seconds: float = 60) -> str:
        """Run one cell by Shift+Enter; all text that it has put out."""
        before = self.saved()[index]["execution_count"] or 0
        self._enter(index)
        self.page.keyboard.press("Shift+Enter")

        def done() -> list[dict[str, Any]] | None:
            cell = self.saved()[index]
            return [cell] if (cell["execution_count"] or 0) > before else None

        return text_of(wait_for(done, seconds, lambda: text_of(self.saved())))

    def write_cell(self, index: int, source: str) -> None:
        """Put `source` in place of what stands in a cell, as pasting does."""
        self._enter(index)
        self.page.keyboard.press("Control+a")
        self.page.keyboard.press("Delete")
        self.page.keyboard.insert_text(source)
        wait_for(lambda: "".join(self.saved()[index]["source"]).strip() == source.strip(), 20)

    def _enter(self, index: int) -> None:
        editor = self.cell(index).locator(".cm-content")
        editor.scroll_into_view_if_needed()
        editor.click()


def text_of(cells: list[dict[str, Any]]) -> str:
    """What cells have printed, and the errors that they raised."""
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    parts = []
    for output in outputs:
        parts += output.get("text", []), output.get("traceback", []), [output.get("evalue", "")]
        parts.append(output.get("data", {}).get("text/plain", []))
    return "".join("".join(part) for part in parts)
