"""A TINY folder for the commands to load."""

import pytest
from nanofixtures.tiny import make_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny"))
