"""Whether Triton kernels can run in this notebook, and what stands in for Triton where it cannot.

Where Triton has no wheel, a cell that defines a kernel should still run, and a cell that starts one
should say that it did not, instead of failing. This module must not know any kernel.
"""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Anything:
    """Takes the place of whatever a kernel's module asks of Triton; starting it does nothing."""

    def __init__(self, function: Any = None) -> None:
        self.fn = function

    def __call__(self, *args: Any, **_: Any) -> "_Anything":
        return _Anything(args[0] if args else None)

    def __getitem__(self, _: Any) -> "_Anything":
        return self

    def __getattr__(self, name: str) -> "_Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _StandIn(ModuleType):
    """A module of which every name can be had."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)

    @staticmethod
    def next_power_of_2(size: int) -> int:
        return 1 << max(0, size - 1).bit_length()


def ready(runtime: str = "nanokernels.runtime") -> tuple[bool, str]:
    """(whether kernels run here, the device whose tensors they take); prints it in a sentence.

    Where they do not, modules that define kernels can be imported from now on all the same.

    Args:
        runtime: the module that knows.
    """
    how = importlib.import_module(runtime)
    try:
        how.require_triton()
    except how.KernelUnavailableError as reason:
        _stand_in()
        print(
            f"No kernel runs here. {reason}\nThe cells below define kernels and do not start them."
        )
        return False, "cpu"
    if how.INTERPRET:
        print("Kernels run in Triton's interpreter, on the CPU: exact, and slow.")
        return True, "cpu"
    print("Kernels are compiled for this machine's GPU.")
    return True, "cuda"


def _stand_in() -> None:
    names = ["triton", "triton.language", "triton.tools", "triton.tools.tensor_descriptor"]
    for name in names:
        module = _StandIn(name)
        module.__spec__ = ModuleSpec(name, None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
    for name in names[1:]:
        parent, _, own = name.rpartition(".")
        setattr(sys.modules[parent], own, sys.modules[name])
