"""The second law on the repository: the notebooks' cells are the packages, and they serve."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from nanobook import cli, serving
from nanobook.chapters import load_map, package_files
from nanobook.sync import check

ROOT = Path(__file__).resolve().parents[2]


def test_the_notebooks_are_the_packages():
    assert check(ROOT, load_map()) == []


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A folder with the chapters' notebooks and the tools, and no package."""
    root = tmp_path_factory.mktemp("alone")
    shutil.copytree(ROOT / "chapters", root / "chapters")
    shutil.copytree(
        ROOT / "book" / "nanobook",
        root / "book" / "nanobook",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    return root


@pytest.fixture(scope="module")
def out(alone):
    """Both packages, rebuilt where neither can be imported."""
    target = alone / "out"
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('nanoserve', 'nanokernels'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        f"sys.path.insert(0, {str(alone / 'book')!r})\n"
        "from nanobook import cli\n"
        f"assert cli.__file__.startswith({str(alone)!r}), cli.__file__\n"
        f"sys.exit(cli.main(['tangle', {str(target)!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=alone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return target


def test_the_rebuild_gives_both_packages_byte_for_byte(out):
    rebuilt = package_files(out)
    assert rebuilt == package_files(ROOT)
    assert {path.partition("/")[0] for path in rebuilt} == {"nanoserve", "kernels"}
    for path in rebuilt:
        assert (out / path).read_bytes() == (ROOT / path).read_bytes()


def test_an_occupied_folder_is_not_written_to_unless_forced(alone, out, monkeypatch, capsys):
    monkeypatch.setenv("NANOBOOK_ROOT", str(alone))
    before = package_files(out)
    assert cli.main(["tangle", str(out)]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert cli.main(["tangle", str(out), "--force"]) == 0
    assert package_files(out) == before
    assert cli.main(["tangle", str(out / "nanoserve" / "py.typed")]) == 1
    assert "is a file" in capsys.readouterr().err


def source_hash(folder):
    """The hash that the package at `folder` reports, computed by another process from its files."""
    code = "from nanoserve.version import source_hash; print(source_hash())"
    env = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd="/", env=env, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize("cwd", ["/", str(ROOT)], ids=["from /", "from the root"])
def test_the_rebuilt_packages_serve(out, cwd, monkeypatch):
    monkeypatch.chdir(cwd)
    with serving.Server(where=out) as server:
        version = server.version()
        expected = {"path": str(out.resolve() / "nanoserve"), "hash": source_hash(out)}
        assert version["source"] == version["engine_source"] == expected
        body = {"messages": [{"role": "user", "content": "Say hi."}], "max_tokens": 4}
        request = urllib.request.Request(
            f"{server.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] == 4
