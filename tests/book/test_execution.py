"""Notebooks are run anew exactly when something that their outputs depend on has changed."""

import json
from pathlib import Path

import pytest
from nanobook.execution import Executed, ExecutionError, execute, fingerprint


def write_notebook(path: Path, *sources: str, **tags: list[str]) -> Path:
    cells = [
        {
            "cell_type": "code",
            "id": f"c{n}",
            "metadata": {"tags": tags.get(f"c{n}", [])},
            "source": source,
            "outputs": [],
            "execution_count": None,
        }
        for n, source in enumerate(sources)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"cells": cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


def printed(text: str) -> str:
    outputs = (out for cell in json.loads(text)["cells"] for out in cell["outputs"])
    return "".join("".join(out.get("text", "")) for out in outputs)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("nanoserve/a.py", "kernels/nanokernels/k.py", "book/nanobook/b.py"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x = 1\n")
    return tmp_path


@pytest.mark.parametrize(
    "changed",
    [
        "nanoserve/a.py",
        "nanoserve/new/deep.py",
        "kernels/nanokernels/k.py",
        "kernels/nanokernels/csrc/k.cu",
        "book/nanobook/b.py",
        "book/data/gpu.json",
        "exercises/checks/chapter_01.py",
    ],
)
def test_whatever_a_cell_can_call_is_in_the_key(root: Path, changed: str) -> None:
    before = fingerprint(root)
    assert fingerprint(root) == before
    (root / changed).parent.mkdir(parents=True, exist_ok=True)
    (root / changed).write_text("x = 2\n")
    assert fingerprint(root) != before


def test_names_count_and_caches_do_not(root: Path) -> None:
    before = fingerprint(root)
    for name in ("nanoserve/__pycache__/a.pyc", "nanoserve/.ipynb_checkpoints/a.py"):
        (root / name).parent.mkdir()
        (root / name).write_text("x")
    assert fingerprint(root) == before
    (root / "nanoserve/a.py").rename(root / "nanoserve/b.py")
    assert fingerprint(root) != before


@pytest.mark.slow
def test_a_copy_is_found_until_its_notebook_or_a_package_changes(root: Path) -> None:
    notebook = write_notebook(
        root / "chapters/00_toy.ipynb",
        "import runpy\nprint(runpy.run_path('../nanoserve/a.py')['x'], 'in', end=' ')",
        "import os\nprint(os.environ['NANOBOOK_STATIC'], os.path.basename(os.getcwd()))",
    )
    folder = root / "build/executed"
    executed = Executed(root, folder)
    assert executed.find(notebook) is None
    copy = executed.make(notebook)
    assert printed(copy.read_text()) == "1 in 1 chapters\n"
    assert Executed(root, folder).find(notebook) == copy

    (root / "nanoserve/a.py").write_text("x = 2\n")
    later = Executed(root, folder)
    assert later.find(notebook) is None
    assert printed(later.make(notebook).read_text()) == "2 in 1 chapters\n"
    assert len(list(folder.iterdir())) == 1  # the old copy is gone

    notebook.write_text(notebook.read_text().replace("in", "of"))
    assert later.find(notebook) is None


@pytest.mark.slow
def test_a_failing_cell_is_named_and_nothing_is_kept(root: Path) -> None:
    cells = ("raise ValueError('meant')", "x = 1", "1 / 0", "print('never run')")
    notebook = write_notebook(root / "chapters/00_toy.ipynb", *cells, c0=["raises-exception"])
    executed = Executed(root, root / "build")
    with pytest.raises(
        ExecutionError, match=r"(?s)^00_toy.ipynb, cell c2:.*ZeroDivisionError: div"
    ):
        executed.make(notebook)
    assert executed.find(notebook) is None


@pytest.mark.slow
def test_each_run_has_an_empty_workspace(root: Path) -> None:
    notebook = write_notebook(
        root / "chapters/00_toy.ipynb",
        "import os, pathlib\nw = pathlib.Path(os.environ['NANOBOOK_WORKSPACE'])\n"
        "assert not w.exists(); w.mkdir(); print(w)",
    )
    first, second = (printed(execute(notebook, root)).strip() for _ in range(2))
    assert first != second
    assert not Path(first).exists()
