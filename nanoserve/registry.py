"""Lazy registries: a name, and the place where its implementation will be found when asked for.

Every extension point keeps one `Registry` beside its protocol. An entry is a string such as
"nanoserve.attention.torch_paged:TorchPagedBackend"; nothing is imported until `load`. That is what
lets a chapter name a part that a later chapter brings. Third parties add entries from a hook that
they declare as a Python entry point of the group `nanoserve.plugins`.
"""

import importlib
from importlib import metadata
from typing import Any

from nanoserve import envs


def import_string(path: str) -> Any:
    """The object at "package.module:attribute"."""
    module, _, attribute = path.partition(":")
    if not attribute:
        raise ValueError(f"{path!r} is not of the form 'package.module:attribute'")
    return getattr(importlib.import_module(module), attribute)


class Registry:
    """Names to lazily imported implementations of one extension point.

    Args:
        kind: what is registered, in words, for error messages ("attention backend").
        entries: name -> "module:attribute".
    """

    def __init__(self, kind: str, entries: dict[str, str] | None = None) -> None:
        self.kind = kind
        self._entries: dict[str, Any] = dict(entries or {})

    def register(self, name: str, target: Any) -> None:
        """Add or replace an entry: a "module:attribute" string, or the object itself."""
        self._entries[name] = target

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._entries)

    def load(self, name: str) -> Any:
        """Import and return the implementation. KeyError names the known ones."""
        if name not in self._entries:
            raise KeyError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names())}")
        target = self._entries[name]
        return import_string(target) if isinstance(target, str) else target


_plugins_loaded = False


def load_plugins() -> None:
    """Call every plugin hook once in this process: entry points first, then NANOSERVE_PLUGINS."""
    global _plugins_loaded
    if _plugins_loaded:
        return
    _plugins_loaded = True
    for entry in metadata.entry_points(group="nanoserve.plugins"):
        entry.load()()
    for path in envs.get("NANOSERVE_PLUGINS"):
        import_string(path)()
