"""The tiny GGUF file in the embedded package's place."""

from pathlib import Path

import pytest
from nanofixtures.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GGUF file."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def tiny_package(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The tiny file in the package's place, and an empty cache; returns the cache folder."""
    from nanoserve.hub import embedded

    monkeypatch.setattr(embedded, "find_gguf", lambda: tiny_gguf)
    monkeypatch.setenv("NANOSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
