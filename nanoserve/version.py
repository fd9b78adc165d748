"""What is running: the package's version, where its source lies, and a hash of that source.

A learner's workspace, a rebuilt copy and an installed package all answer to the name `nanoserve`;
the path and the hash tell which one a process really imported.
"""

import hashlib
from pathlib import Path

__version__ = "0.1.0"


def source_path() -> str:
    """The folder of the `nanoserve` package that this process runs."""
    return str(Path(__file__).resolve().parent)


def source_hash() -> str:
    """The first 12 hex digits of a sha256 over every .py file of the package (path and bytes)."""
    root = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0")
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
