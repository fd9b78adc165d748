"""The one table of environment variables. Each is read when it is asked for, never at import.

`envs.get("NANOSERVE_CACHE")` returns a typed value; a name that is not in the table is a bug here.
`unknown()` lists NANOSERVE_ variables that nothing reads, which are most often misspelt ones.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class EnvVar:
    """One variable: how to read it, its value when unset, and what it does."""

    parse: Callable[[str], Any]
    default: Callable[[], Any]
    help: str


TABLE: dict[str, EnvVar] = {
    "NANOSERVE_CACHE": EnvVar(
        lambda text: Path(text).expanduser(),
        lambda: Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "nanoserve",
        "folder that keeps the converted embedded model",
    ),
    "NANOSERVE_LOG_LEVEL": EnvVar(
        str.upper, lambda: "INFO", "logging level of the server and engine"
    ),
    "NANOSERVE_API_KEY": EnvVar(str, lambda: None, "key that clients of `serve` must send"),
    "NANOSERVE_CPU_THREADS": EnvVar(
        int, lambda: None, "threads of the CPU engine; unset: every core this process may use"
    ),
    "NANOSERVE_SERVER_DEV_MODE": EnvVar(
        lambda text: text.lower() in ("1", "true", "on"),
        lambda: False,
        "serve POST /reset_prefix_cache too, which any client may then call",
    ),
    "NANOSERVE_PLUGINS": EnvVar(
        lambda text: [part.strip() for part in text.split(",") if part.strip()],
        list,
        "comma-separated `module:function` hooks, called once a process before a model loads",
    ),
}


def get(name: str) -> Any:
    """The value of a variable of the table. Raises KeyError for a name that is not in it."""
    var = TABLE[name]
    text = os.environ.get(name)
    if text is None or text == "":
        return var.default()
    try:
        return var.parse(text)
    except ValueError as error:
        raise ValueError(f"environment variable {name}={text!r}: {error}") from error


def unknown() -> list[str]:
    """NANOSERVE_ variables that are set but that the table does not know."""
    return sorted(k for k in os.environ if k.startswith("NANOSERVE_") and k not in TABLE)
