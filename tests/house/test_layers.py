"""Chapter order is import order: in the real packages, and as a rule that can be broken."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nanobook.chapters import load_map, source_files

ROOT = Path(__file__).resolve().parents[2]

# A house of three chapters; `nanoserve.loop.core` is the module that the cases rewrite.
TOY_MAP = """
[[chapter]]
number = 0
name = "tour"
title = "t"
idea = "i"
built = ["nanoserve.params"]
provided = []

[[chapter]]
number = 2
name = "kernels"
title = "t"
idea = "i"
built = ["nanokernels.attend"]
provided = []

[[chapter]]
number = 4
name = "loop"
title = "t"
idea = "i"
built = ["nanoserve.loop.core", "nanoserve.loop.plan"]
provided = []

[[chapter]]
number = 6
name = "speed"
title = "t"
idea = "i"
built = ["nanoserve.loop.fast"]
provided = []
"""
TOY_FILES = {
    "nanoserve/__init__.py": "",
    "nanoserve/params.py": "x = 1\n",
    "nanoserve/loop/__init__.py": "",
    "nanoserve/loop/core.py": "import nanoserve.params\nimport nanokernels.attend\n",
    "nanoserve/loop/plan.py": "from nanoserve.loop.core import nanoserve\n",
    "nanoserve/loop/fast.py": "from nanoserve.loop import core\n",
    "kernels/nanokernels/__init__.py": "",
    "kernels/nanokernels/attend.py": "import os\n",
}


def lint(folder: Path, changes: dict[str, str]) -> tuple[int, str]:
    """The exit status and the report of the check, run on the toy house with some files changed."""
    for name, text in {**TOY_FILES, **changes}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (folder / "map.toml").write_text(TOY_MAP)
    env = {**os.environ, "PYTHONPATH": str(ROOT / "book")}
    command = [sys.executable, "-m", "nanobook.layers", "--map", "map.toml", "--root", "."]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


GUARDED = """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from nanoserve.loop.fast import core
"""
INSIDE_A_FUNCTION = """
def step():
    from nanoserve.loop.fast import core
    return core
"""


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="as it is"),
        pytest.param({"nanoserve/loop/core.py": GUARDED}, id="for types only"),
        pytest.param({"nanoserve/loop/core.py": "import nanoserve.loop.plan\n"}, id="same chapter"),
    ],
)
def test_lawful_imports_pass(changes: dict[str, str], tmp_path: Path) -> None:
    status, report = lint(tmp_path, changes)
    assert status == 0, report


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        pytest.param(
            {"nanoserve/loop/core.py": "import nanoserve.loop.fast\n"},
            ["nanoserve.loop.core -> nanoserve.loop.fast", "Chapter order is import order BROKEN"],
            id="later chapter",
        ),
        pytest.param(
            {"nanoserve/loop/core.py": INSIDE_A_FUNCTION},
            ["nanoserve.loop.core -> nanoserve.loop.fast"],
            id="inside a function",
        ),
        pytest.param(
            {"nanoserve/loop/__init__.py": "from nanoserve.loop import fast\n",
             "nanoserve/params.py": "import nanoserve.loop\n"},
            ["nanoserve.params -> nanoserve.loop", "nanoserve.loop -> nanoserve.loop.fast"],
            id="through a package",
        ),
        pytest.param(
            {"kernels/nanokernels/attend.py": "import nanoserve.params\n"},
            ["The kernels know nothing of the engine BROKEN"],
            id="kernels import the engine",
        ),
        pytest.param(
            {"nanoserve/params.py": "import nanobook.chapters\n"},
            ["The engine and the kernels know nothing of the course BROKEN"],
            id="engine imports the course",
        ),
        pytest.param(
            {"nanoserve/loop/stray.py": ""}, ["nanoserve.loop.stray is not in"], id="unknown module"
        ),
    ],
)  # fmt: skip
def test_unlawful_imports_fail(changes: dict[str, str], named: list[str], tmp_path: Path) -> None:
    status, report = lint(tmp_path, changes)
    assert status == 1, report
    for words in named:
        assert words in " ".join(report.split())


def test_the_packages_keep_the_order() -> None:
    command = [sys.executable, "-m", "nanobook.layers", "--root", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def imports_at_module_level(file: Path, package: str) -> set[str]:
    """Names of our modules that `file` imports when it is itself imported."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.startswith(package + ".")}


def test_server_and_cli_start_with_the_engine_of_chapter_4() -> None:
    """Chapters from 4 on borrow the finished server: it may need later ones only when asked to."""
    owners = load_map().modules
    too_late = []
    for name, file in source_files(ROOT):
        if not name.startswith(("nanoserve.server", "nanoserve.cli")):
            continue
        for imported in imports_at_module_level(file, "nanoserve") & owners.keys():
            lent = imported.startswith(("nanoserve.server", "nanoserve.cli"))
            if owners[imported].number > 4 and not lent:
                too_late.append(f"{name} imports {imported}")
    assert too_late == []
