"""Logging of the server's process: one format, one stream (stderr), and quiet libraries."""

import logging
import os
import sys
import warnings

FORMAT = "%(levelname)s %(asctime)s %(message)s"


def configure_logging(level: str, uvicorn_level: str = "warning", access_log: bool = True) -> None:
    """Set up the process's loggers.

    Args:
        level: of nanoserve's own messages, in any case.
        uvicorn_level: of uvicorn's messages about itself.
        access_log: one line a request.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
    levels = {
        "nanoserve": level.upper(),
        "uvicorn.error": uvicorn_level.upper(),
        "uvicorn.access": "INFO" if access_log else "CRITICAL",
    }
    for name, name_level in levels.items():
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(name_level)
        logger.propagate = False


def quiet_libraries() -> None:
    """Keep other packages' advice off the terminal; to be called before they are imported."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
