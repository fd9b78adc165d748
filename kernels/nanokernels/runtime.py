"""How kernels run in this process: compiled for a GPU, or by Triton's interpreter on the CPU.

Triton looks at TRITON_INTERPRET more than once: when it is first imported, for its own helpers
(`tl.sum`, `tl.softmax`, ...), and at each `@triton.jit`. So the variable has to be right before the
first import of Triton anywhere in the process; and `torch.compile` and transformers' model files
import it too. `choose_mode` runs when nanokernels is imported, before any kernel module, and puts
right what came earlier. This module must not define a kernel.
"""

import os
import sys

import torch

_TRUE = ("1", "true", "on")


class KernelUnavailableError(RuntimeError):
    """No Triton kernel can run here; the message says why, and how to get one running."""


def _asked_for() -> bool | None:
    """What TRITON_INTERPRET asks for, read as Triton reads it; None if it is unset."""
    text = os.environ.get("TRITON_INTERPRET")
    return None if text is None else text.lower() in _TRUE


def _imported_mode() -> bool | None:
    """Whether Triton's own helpers were made for the interpreter; None if it is not imported."""
    helpers = sys.modules.get("triton.language.standard")
    if helpers is None:
        return None
    return type(helpers.sum).__name__ == "InterpretedFunction"


def _forget_triton() -> None:
    """Let the next `import triton` run again, and so make its helpers for the mode now chosen.

    Its native part stays: it cannot be loaded twice. Whoever imported Triton before keeps the old
    modules and works as before.
    """
    for name in list(sys.modules):
        inside = name == "triton" or name.startswith("triton.")
        if inside and not name.startswith("triton._C"):
            del sys.modules[name]


def choose_mode() -> bool:
    """Settle whether kernels are interpreted, and make Triton agree.

    TRITON_INTERPRET decides if it is set; else kernels are interpreted where there is no GPU. Needs
    no Triton.
    """
    asked = _asked_for()
    interpret = not torch.cuda.is_available() if asked is None else asked
    if interpret:
        os.environ["TRITON_INTERPRET"] = "1"
    if _imported_mode() not in (None, interpret):
        _forget_triton()
    return interpret


INTERPRET: bool = choose_mode()
"""Whether this process interprets its kernels. Fixed when nanokernels is imported."""


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _obstacle() -> str | None:
    """Why a kernel would not run, or not rightly, and what to do about it; None if nothing is."""
    try:
        import triton
    except ImportError as error:
        return (
            f"Triton cannot be imported ({error}). It has wheels for Linux only: to run kernels, "
            "go to Linux (a container, WSL or a hosted notebook will do) and `pip install "
            "'triton>=3.6,<3.8'`. Everything else works without it, on torch's own operations."
        )
    if (_asked_for() or False) != INTERPRET:
        return (
            "TRITON_INTERPRET was changed after nanokernels had been imported, when kernels had "
            f"already been {'interpreted' if INTERPRET else 'compiled'}. Restart the notebook's "
            "kernel (the Python process) and set it before the first import."
        )
    if not INTERPRET and not torch.cuda.is_available():
        return (
            "There is no GPU, and TRITON_INTERPRET is set to something other than 1. Unset it and "
            "restart the notebook's kernel (the Python process) to run kernels on the CPU."
        )
    if INTERPRET and _version(triton.__version__) < (3, 7):
        import numpy

        if _version(numpy.__version__) >= (2, 4):
            return (
                f"The interpreter of Triton {triton.__version__} cannot run loops with numpy "
                f"{numpy.__version__}: install numpy<2.4, or Triton 3.7."
            )
    return None


def require_triton() -> None:
    """Return if kernels can run in this process. Raises KernelUnavailableError with a way out."""
    if obstacle := _obstacle():
        raise KernelUnavailableError(obstacle)
