"""`__init__.py` files hold a docstring and lazy exports: importing a package runs nothing."""

import ast
from pathlib import Path

import pytest
from nanobook.chapters import source_files

ROOT = Path(__file__).resolve().parents[2]
INIT_FILES = {name: file for name, file in source_files(ROOT) if file.name == "__init__.py"}

# Triton's mode has to be settled before any kernel module is imported, so here the package itself
# imports: that one module, and nothing else.
ALLOWED_IMPORTS = {"nanokernels": frozenset({"nanokernels.runtime"})}


def offences(source: str, allowed_imports: frozenset[str] = frozenset()) -> list[str]:
    """What a package's `__init__` holds beyond a docstring and lazy exports."""
    tree = ast.parse(source)
    found = [] if ast.get_docstring(tree) else ["no docstring"]
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                pass
            case ast.Assign(targets=[ast.Name(id="__all__" | "_EXPORTS")]):
                pass
            case ast.AnnAssign(target=ast.Name(id="__all__" | "_EXPORTS")):
                pass
            case ast.FunctionDef(name="__getattr__" | "__dir__"):
                pass
            case ast.If(test=ast.Name(id="TYPE_CHECKING"), orelse=[]):
                pass
            case ast.Import(names=[ast.alias(name="importlib")]):
                pass
            case ast.ImportFrom(module="typing" | "importlib"):
                pass
            case ast.ImportFrom(module=module) if module in allowed_imports:
                pass
            case _:
                found.append(f"line {node.lineno}: {ast.unparse(node).splitlines()[0]}")
    return found


@pytest.mark.parametrize("name", INIT_FILES)
def test_init_file_holds_a_docstring_and_lazy_exports(name: str) -> None:
    assert offences(INIT_FILES[name].read_text(), ALLOWED_IMPORTS.get(name, frozenset())) == []


def test_every_package_has_an_init_file() -> None:
    folders = {file.parent for _, file in source_files(ROOT)}
    assert folders == {file.parent for file in INIT_FILES.values()}


@pytest.mark.parametrize(
    "source",
    [
        "import importlib\n",
        '"""Doc."""\nfrom nanoserve.llm import LLM\n',
        '"""Doc."""\nimport torch\n',
        '"""Doc."""\nfor _ in range(3):\n    pass\n',
        '"""Doc."""\ndef helper():\n    pass\n',
    ],
)
def test_anything_else_is_found(source: str) -> None:
    assert len(offences(source)) == 1
