"""Every kernel compiles for a GPU, without one: the interpreter accepts what the compiler refuses.

The compiler needs no GPU, only the name of one. It runs in a process of its own, since this one's
Triton may have been set to interpret.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from nanokernels.runtime import INTERPRET, KernelUnavailableError, require_triton

ROOT = Path(__file__).resolve().parents[2]

try:
    require_triton()
except KernelUnavailableError as reason:
    pytest.skip(f"no kernels here: {reason}", allow_module_level=True)

# Types of the kernels' pointers, by argument; what is not listed is a 32-bit integer.
CODE = """
import sys
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

import nanokernels.kv_gather as gather
import nanokernels.kv_write as write
import nanokernels.merge as merge
import nanokernels.paged_decode as decode
import nanokernels.paged_prefill as prefill

POINTERS = dict.fromkeys("query cache key value out_a out_b".split(), "*bf16") | dict.fromkeys(
    "table items merges query_start lengths key_start tiles".split(), "*i32"
) | dict.fromkeys("sinks lse parts part_lse lse_a lse_b".split(), "*fp32") | {
    "slots": "*i64", "out": "*bf16", "scale": "fp32", "soft_cap": "fp32"
}


def build(kernel, types=(), **constants):
    types = {**POINTERS, **dict(types)}
    names = kernel.arg_names
    missing = [name for name in names if name.isupper() and name not in constants]
    assert not missing, f"{kernel.__name__} has new constants: {missing}"
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    warps = constants.get("WARPS", 4)
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"]
    print(kernel.__name__, compiled.metadata.shared)


shape = dict(DIM=96, DIM_PAD=128, BLOCK_SIZE=16)
build(write._kv_write_kernel, HEADS=3, ROWS=8, **shape)
build(gather._gather_kernel, TOKENS=64, **shape)
build(merge._merge_kernel, DIM=96, DIM_PAD=128, ROWS=8)
for sinks in (False, True):
    build(
        decode._decode_kernel, GROUP=3, ROWS=16, HEADS=9, TILE=64, SOFT_CAP=sinks, SINKS=sinks,
        DOT=tl.bfloat16, STAGES=3, PDL=not sinks, **shape,
    )
    build(
        decode._combine_kernel, HEADS=9, DIM=96, DIM_PAD=128, TILE=16, PDL=not sinks,
    )
    for dense in (False, True):
        data = "tensordesc<bf16[64, 128]>" if dense else "*bf16"
        build(
            prefill._prefill_kernel, {"key_data": data, "value_data": data}, GROUP=3, TOKENS=21,
            ROWS=64, TILE=64, WINDOW=40 if sinks else 0, SOFT_CAP=sinks, SINKS=sinks, DENSE=dense,
            DOT=tl.bfloat16, STAGES=3, **shape,
        )
"""


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRET, reason="the other tests compile them on a GPU")
def test_every_kernel_compiles_for_a_gpu(tmp_path):
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "kernels"), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env=env, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == 11
