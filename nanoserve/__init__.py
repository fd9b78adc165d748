"""nanoserve: a small, complete LLM serving engine, built chapter by chapter in its course.

The names below are loaded when they are first used, so that `import nanoserve` costs nothing and
pulls in neither torch nor the server's dependencies. This package must not know the course.
"""

import importlib
from typing import Any

_EXPORTS = {
    "LLM": "nanoserve.llm",
    "AsyncLLM": "nanoserve.async_llm",
    "SamplingParams": "nanoserve.sampling_params",
    "EngineArgs": "nanoserve.config.args",
    "RequestOutput": "nanoserve.outputs",
    "CompletionOutput": "nanoserve.outputs",
    "__version__": "nanoserve.version",
}
__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'nanoserve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
