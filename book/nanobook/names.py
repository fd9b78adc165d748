"""The notebook's names after a module was imported anew: pointed at the new objects, or told stale.

What a cell has imported or bound (modules, classes, functions, Triton's kernels, constants) is
bound to what is there now. Objects that the old classes have made cannot be mended: they are named.
This module must not know how modules are built.
"""

import functools
import re
import sys
from collections.abc import Iterable, Iterator
from types import MethodType, ModuleType
from typing import Any

# IPython's own: the history, and the last results.
_HIDDEN = re.compile(
    r"__.*__|_+|_i+|_[io]?h|_dh|_i?\d+|_exit_code|In|Out|exit|quit|open|get_ipython"
)
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_LOOK = 100
"""How many things in a container are looked at."""


def rebind(namespace: dict[str, Any], old: dict[str, ModuleType]) -> list[str]:
    """Point a notebook's names at the new modules' objects.

    Args:
        namespace: the notebook's names, changed in place.
        old: the modules that were replaced, by name.

    Returns:
        The names whose objects have gone stale, each with the reason in brackets.
    """
    modules = {id(module): name for name, module in old.items()}
    made = _made(old)
    constants = _constants(old)
    classes = {key: value for key, (_, _, value) in made.items() if isinstance(value, type)}
    stale = []
    for name, value in list(namespace.items()):
        if _HIDDEN.fullmatch(name):
            continue
        if id(value) in modules:
            namespace[name] = sys.modules[modules[id(value)]]
        elif id(value) in made:
            module, attribute, _ = made[id(value)]
            new = sys.modules.get(module)
            if new is not None and hasattr(new, attribute):
                namespace[name] = getattr(new, attribute)
            else:
                stale.append(f"{name} (gone from {module})")
        elif (name, id(value)) in constants:
            new = sys.modules.get(constants[name, id(value)])
            namespace[name] = getattr(new, name, value)
        elif (old_class := _old_class(value, classes)) is not None:
            stale.append(f"{name} ({old_class.__name__})")
    return stale


def _home(value: Any) -> str | None:
    """The module in which a class, a function or a kernel was written."""
    if type(value).__module__.startswith("triton."):
        value = getattr(value, "fn", value)  # the interpreter's functions do not tell themselves
    home = getattr(value, "__module__", None)
    return home if isinstance(home, str) and hasattr(value, "__name__") else None


def _made(old: dict[str, ModuleType]) -> dict[int, tuple[str, str, Any]]:
    """What the old modules define, by identity: module, name and object."""
    return {
        id(value): (name, attribute, value)
        for name, module in old.items()
        for attribute, value in vars(module).items()
        if _home(value) == name
    }


def _constants(old: dict[str, ModuleType]) -> dict[tuple[str, int], str]:
    """What else they hold. Numbers, types of torch, other modules are shared by all who use them,
    so a notebook's name must be the same to count as taken from there.
    """
    return {
        (attribute, id(value)): name
        for name, module in old.items()
        for attribute, value in vars(module).items()
        if not attribute.startswith("__") and _home(value) not in old
    }


def _old_class(value: Any, classes: dict[int, type], depth: int = 2) -> type | None:
    """A replaced class of which `value`, or something that it directly holds, is made."""
    for base in value.__mro__ if isinstance(value, type) else type(value).__mro__:
        if id(base) in classes:
            return classes[id(base)]
    if depth == 0 or isinstance(value, (*_PLAIN, type, ModuleType)):
        return None
    for item in _inside(value):
        if (found := _old_class(item, classes, depth - 1)) is not None:
            return found
    return None


def _inside(value: Any) -> Iterator[Any]:
    held: Iterable[Any] = ()
    if isinstance(value, MethodType):
        yield value.__self__
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args)
    elif isinstance(value, dict):
        held = value.values()
    elif isinstance(value, list | tuple | set):
        held = value
    elif isinstance(getattr(value, "__dict__", None), dict):
        held = vars(value).values()
    yield from list(held)[:_LOOK]
