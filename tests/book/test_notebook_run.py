"""The notebooks' test run notices a notebook that does not leave the package's own files behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow

# A stand-in for the real magic, so that what is tested here is the run alone.
MAGIC = """
import os, pathlib
from IPython.core.magic import register_cell_magic

WORKSPACE = pathlib.Path(os.environ["NANOBOOK_WORKSPACE"])
assert not WORKSPACE.exists(), "the workspace is not empty"

@register_cell_magic
def build(line, cell):
    file = WORKSPACE / line.split("::")[0]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(cell)
"""

RIGHT = "%%build nanoserve/{name}.py::header\nx = 1\n"


def write_notebook(path: Path, *sources: str) -> None:
    cells = [
        {
            "cell_type": "code",
            "id": f"c{n}",
            "metadata": {},
            "source": source,
            "outputs": [],
            "execution_count": None,
        }
        for n, source in enumerate(sources)
    ]
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )


def run(root: Path, *arguments: str) -> tuple[dict[str, str], str]:
    """Item -> outcome, and all that was printed, of a run as `make test` does it."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("NANOBOOK")}
    env["PYTHONPATH"] = f"tests/support{os.pathsep}{env.get('PYTHONPATH', '')}"
    report = root / "report.xml"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        + ["-p", "nanofixtures.notebooks", "--nbval-lax", "--nbval-current-env"]
        + ["--nbval-cell-timeout", "120", *arguments, *sorted(map(str, root.glob("chapters/*")))],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    if not report.exists():
        return {}, said
    items = ElementTree.parse(report).iter("testcase")
    return {
        f"{item.get('classname', '').rpartition('chapters.')[2]}: {item.get('name')}": (
            item[0].tag if len(item) else "passed"
        )
        for item in items
    }, said


def test_each_notebook_must_leave_its_files(tmp_path: Path) -> None:
    (tmp_path / "nanoserve").mkdir()
    for name in ("right", "absent", "differs"):
        (tmp_path / f"nanoserve/{name}.py").write_text("x = 1\n")
    chapters = tmp_path / "chapters"
    write_notebook(chapters / "00_right.ipynb", MAGIC, RIGHT.format(name="right"))
    lost = "WORKSPACE.joinpath('nanoserve/absent.py').unlink()"
    write_notebook(chapters / "01_absent.ipynb", MAGIC, RIGHT.format(name="absent"), lost)
    wrong = RIGHT.format(name="differs").replace("1", "2")
    write_notebook(chapters / "02_differs.ipynb", MAGIC, wrong)
    write_notebook(chapters / "03_raises.ipynb", "1 / 0")
    write_notebook(chapters / "04_stray.ipynb", "[object()]", "6 * 7")

    found, said = run(tmp_path, "-n", "2", "--dist", "loadfile")

    last, values = "files equal the package's", "no stray values"
    assert found == {
        "00_right.ipynb: Cell 0": "passed",
        "00_right.ipynb: Cell 1": "passed",
        f"00_right.ipynb: {values}": "passed",
        f"00_right.ipynb: {last}": "passed",
        "01_absent.ipynb: Cell 0": "passed",
        "01_absent.ipynb: Cell 1": "passed",
        "01_absent.ipynb: Cell 2": "passed",
        f"01_absent.ipynb: {values}": "passed",
        f"01_absent.ipynb: {last}": "failure",
        "02_differs.ipynb: Cell 0": "passed",
        "02_differs.ipynb: Cell 1": "passed",
        f"02_differs.ipynb: {values}": "passed",
        f"02_differs.ipynb: {last}": "failure",
        "03_raises.ipynb: Cell 0": "failure",
        f"03_raises.ipynb: {values}": "passed",
        f"03_raises.ipynb: {last}": "passed",
        "04_stray.ipynb: Cell 0": "passed",
        "04_stray.ipynb: Cell 1": "passed",
        f"04_stray.ipynb: {values}": "failure",
        f"04_stray.ipynb: {last}": "passed",
    }, said
    assert "nanoserve/absent.py: no cell of this notebook has written it" in said
    assert "nanoserve/differs.py: what the cells have written differs" in said
    assert "Cell 0 shows '[<object at " in said and "write '_ = [object()]'" in said


def test_a_notebook_has_a_workspace_of_its_own_and_none_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = "print(open(os.environ['SEEN'], 'a').write(str(WORKSPACE) + '\\n'))"
    for number in range(2):
        write_notebook(tmp_path / f"chapters/0{number}_toy.ipynb", MAGIC, tell)
    seen = tmp_path / "seen"
    monkeypatch.setenv("SEEN", str(seen))
    found, said = run(tmp_path)
    assert set(found.values()) == {"passed"}, said
    workspaces = seen.read_text().split()
    assert len(set(workspaces)) == 2
    assert not any(Path(one).parent.exists() for one in workspaces)
