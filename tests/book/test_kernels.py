"""Notebooks about kernels, where no kernel can run: they define them, and leave them be."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_TRITON = """
import sys

class NoTriton:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ImportError("no wheel")

sys.meta_path.insert(0, NoTriton())
"""

LAUNCH = """
from nanobook import kernels

print(kernels.ready())
import torch
from nanokernels.kv_write import kv_write
from nanokernels.paged_prefill import paged_prefill
from nanokernels.runtime import KernelUnavailableError, require_triton

cache = torch.full((2, 1, 1, 16, 16), 7.0)
kv_write(torch.ones(1, 1, 16), torch.ones(1, 1, 16), cache, torch.tensor([0]))
print(cache.unique().tolist())
"""


def run(code: str) -> str:
    paths = [str(ROOT / folder) for folder in ("book", "kernels", ".")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_triton_kernels_are_defined_and_their_launch_does_nothing() -> None:
    said = run(WITHOUT_TRITON + LAUNCH)
    assert said.startswith("No kernel runs here. Triton cannot be imported (no wheel)")
    assert said.splitlines()[-2:] == ["(False, 'cpu')", "[7.0]"]


def test_where_kernels_run_nothing_stands_in_for_triton() -> None:
    code = """
from nanobook import kernels
runs, device = kernels.ready()
import triton
assert not runs or triton.__file__
print(device)
"""
    assert run(code).splitlines()[-1] in ("cpu", "cuda")
