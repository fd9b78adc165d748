"""nanokernels imports anywhere, and settles Triton's mode whatever came before it.

Each case needs a fresh process, because the mode is fixed at the first import.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]

# A kernel with the two things that break when the mode comes too late: a helper of Triton's own
# (tl.sum) and a loop whose bound is known only at run time.
ROW_SUMS = """
import torch
import triton
import triton.language as tl


@triton.jit
def row_sums_kernel(x_ptr, out_ptr, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, columns, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        values = tl.load(x_ptr + row * columns + offsets, mask=offsets < columns, other=0.0)
        total += tl.sum(values.to(tl.float32))
    tl.store(out_ptr + row, total)


def row_sums(x):
    out = torch.full((x.shape[0],), float("nan"))
    row_sums_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=8)
    return out
"""

RUN_ROW_SUMS = """
import nanokernels, row_sums, torch
nanokernels.require_triton()
x = torch.arange(30, dtype=torch.float32).reshape(2, 15)
torch.testing.assert_close(row_sums.row_sums(x), x.sum(1))
print("interpreted", nanokernels.INTERPRET)
"""

BLOCK_TRITON = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
"""

interpreter_only = pytest.mark.skipif(
    torch.cuda.is_available(), reason="without a flag a machine with a GPU compiles its kernels"
)


def python(code: str, folder: Path, interpret: str | None = None) -> str:
    """What `code` prints in a fresh process that can import the kernels and `folder`'s modules."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), str(folder)])
    if interpret is not None:
        env["TRITON_INTERPRET"] = interpret
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture
def kernel_folder(tmp_path: Path) -> Path:
    (tmp_path / "row_sums.py").write_text(ROW_SUMS)
    return tmp_path


IMPORT_ALL = """
import importlib, pkgutil, sys
import nanokernels, torch
names = [m.name for m in pkgutil.walk_packages(nanokernels.__path__, "nanokernels.")]
for name in names:
    importlib.import_module(name)
assert "nanokernels.runtime" in names
assert not torch.cuda.is_initialized()
print(nanokernels.INTERPRET)
"""


@pytest.mark.parametrize(
    "interpret",
    [None, pytest.param("0", marks=pytest.mark.slow), pytest.param("1", marks=pytest.mark.slow)],
)
def test_A79_every_kernel_module_imports_without_touching_a_gpu(
    interpret: str | None, tmp_path: Path
) -> None:
    expected = not torch.cuda.is_available() if interpret is None else interpret == "1"
    assert python(IMPORT_ALL, tmp_path, interpret) == str(expected)


@interpreter_only
@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="nothing", marks=pytest.mark.slow),
        pytest.param("import triton", id="triton"),
        pytest.param(
            "import triton, os; os.environ['TRITON_INTERPRET'] = '1'",
            id="flag-too-late",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "import torch._inductor.utils, triton.testing", id="inductor", marks=pytest.mark.slow
        ),
    ],
)
def test_A80_kernel_is_right_whatever_imported_triton_before(
    before: str, kernel_folder: Path
) -> None:
    assert python(before + "\n" + RUN_ROW_SUMS, kernel_folder) == "interpreted True"


@interpreter_only
def test_A80_flag_changed_after_the_import_is_explained(tmp_path: Path) -> None:
    code = """
import nanokernels, os
nanokernels.require_triton()
os.environ["TRITON_INTERPRET"] = "0"
try:
    nanokernels.require_triton()
except nanokernels.KernelUnavailableError as error:
    print(error)
"""
    message = python(code, tmp_path)
    assert "TRITON_INTERPRET was changed" in message
    assert "Restart the notebook's kernel" in message


@interpreter_only
def test_A80_flag_that_forbids_the_interpreter_without_a_gpu_is_explained(tmp_path: Path) -> None:
    code = """
import nanokernels
try:
    nanokernels.require_triton()
except nanokernels.KernelUnavailableError as error:
    print(error)
"""
    assert "There is no GPU" in python(code, tmp_path, interpret="0")


def test_A78_without_triton_the_package_imports_and_says_what_is_missing(tmp_path: Path) -> None:
    code = f"""{BLOCK_TRITON}
import nanokernels
try:
    nanokernels.require_triton()
except nanokernels.KernelUnavailableError as error:
    print(error)
assert "triton" not in sys.modules
"""
    message = python(code, tmp_path)
    assert "No module named 'triton'" in message
    assert "pip install 'triton" in message
