"""Engines shared by the tests of this folder."""

import pytest
from nanofixtures import script
from nanofixtures.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of TINY."""
    return str(make_tiny(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def script_plugin(monkeypatch):
    """SCRIPT, known in this process and in every engine process it starts."""
    script.register()
    monkeypatch.setenv("NANOSERVE_PLUGINS", script.PLUGIN)
