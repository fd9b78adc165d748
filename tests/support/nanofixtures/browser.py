"""A headless Chromium for tests that look at pages, kept from talking to anything but this machine.

The browser is the one that playwright or the system has installed; else the system's package, where
the tests run as root; else the test is skipped, and says so.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# As root it cannot have its sandbox; the rest keeps it from calling home.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
FLAGS += ["--no-first-run", "--disable-component-update", "--disable-sync"]
NONE = "needs a browser: Chromium on PATH, or `playwright install chromium`"


@contextmanager
def chromium() -> "Iterator[Browser]":
    """A running browser; skips the test where there is none and none can be installed."""
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        if (path := _bundled(playwright) or _on_path() or _installed()) is None:
            pytest.skip(NONE)
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


def _bundled(playwright: "Playwright") -> str | None:
    path = playwright.chromium.executable_path
    return path if Path(path).is_file() else None


def _on_path() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@cache
def _installed() -> str | None:
    """Where the tests may do that: the system's package, installed."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return None
    import fcntl

    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    with Path(tempfile.gettempdir(), "nanoserve-browser.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be at it
        for words in ("update", "install -y --no-install-recommends chromium fonts-dejavu-core"):
            if _on_path() is None:
                command = ["apt-get", *words.split()]
                subprocess.run(command, env=environment, check=False, **quiet)
    return _on_path()


@contextmanager
def page_context(
    browser: "Browser", **options: object
) -> "Iterator[tuple[BrowserContext, list[str]]]":
    """A fresh context, and the list of addresses beyond this machine that its pages have asked for.

    None of them is reached.
    """
    context = browser.new_context(**options)
    outside: list[str] = []

    def decide(route):  # type: ignore[no-untyped-def]
        parts = urlsplit(route.request.url)
        if parts.scheme in ("data", "blob", "file") or parts.hostname in ("127.0.0.1", "localhost"):
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    context.route("**/*", decide)
    yield context, outside
    context.close()
