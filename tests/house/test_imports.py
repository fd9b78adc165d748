"""What importing costs: which packages load, in fresh processes."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import nanoserve
from nanoserve import version

ROOT = Path(__file__).resolve().parents[2]

# Everything that only the server, the course or the tests may need.
NOT_FOR_LLM = [
    "fastapi", "gguf", "httpx", "msgspec", "openai", "prometheus_client", "pydantic", "starlette",
    "uvicorn", "xxhash", "zmq",
]  # fmt: skip

BLOCK = f"""
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {NOT_FOR_LLM}:
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Block())
"""


def python(code: str) -> list[str]:
    """The words that `code` prints, run in a fresh process."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_importing_the_package_loads_nothing_else() -> None:
    code = (
        "import sys; before = set(sys.modules); import nanoserve; print(*set(sys.modules) - before)"
    )
    ours = [name for name in python(code) if name.partition(".")[0] in ("nanoserve", "torch")]
    assert ours == ["nanoserve"]


def test_every_export_is_listed_and_found() -> None:
    assert set(nanoserve.__all__) <= set(dir(nanoserve))
    for name in nanoserve.__all__:
        assert getattr(nanoserve, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = nanoserve.LMM


def test_the_offline_llm_needs_only_the_base_dependencies() -> None:
    code = f"{BLOCK}\nfrom nanoserve import LLM, SamplingParams\nprint(LLM.__module__)"
    assert python(code) == ["nanoserve.llm"]


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["serve", "--help"], ["srve"]])
def test_A84_the_command_line_answers_without_torch(arguments: list[str]) -> None:
    code = f"""
import sys
sys.argv = ["nanoserve", *{arguments!r}]
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from nanoserve.cli.main import main
said = StringIO()
with redirect_stdout(said), redirect_stderr(said):
    try:
        status = main()
    except SystemExit as end:
        status = end.code
assert said.getvalue().strip()
print(status or 0, *[name for name in ("torch", "transformers", "fastapi") if name in sys.modules])
"""
    assert python(code) == ["2" if arguments == ["srve"] else "0"]


def test_version_names_the_source_that_runs() -> None:
    assert version.source_path() == str(ROOT / "nanoserve")
    digest = version.source_hash()
    assert len(digest) == 12
    assert int(digest, 16) >= 0
    assert digest == version.source_hash()


def test_version_hash_changes_with_any_byte_and_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "nanoserve"
    package.mkdir()
    monkeypatch.setattr(version, "__file__", str(package / "version.py"))
    seen = {version.source_hash()}
    assert seen == {hashlib.sha256().hexdigest()[:12]}
    (package / "a.py").write_text("x = 1\n")
    seen.add(version.source_hash())
    (package / "a.py").write_text("x = 2\n")
    seen.add(version.source_hash())
    (package / "a.py").rename(package / "b.py")
    seen.add(version.source_hash())
    assert len(seen) == 4
    (package / "notes.txt").write_text("not source")
    assert version.source_hash() in seen
