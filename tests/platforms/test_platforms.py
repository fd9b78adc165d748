"""Which device, which type, how much memory: decided from made-up machines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nanoserve.config.arch import ModelArch
from nanoserve.config.cache import CacheConfig
from nanoserve.config.engine import EngineConfig
from nanoserve.config.model import ModelConfig
from nanoserve.engine.client import child_environment
from nanoserve.errors import ConfigError
from nanoserve.platforms import cpu, cuda
from nanoserve.platforms.cpu import CpuPlatform
from nanoserve.platforms.platform import resolve_platform

GIB = 2**30


def engine_config(**cache):
    arch = ModelArch("Fake", 8, 2, 2, 1, 1, 1, 2, 32)
    return EngineConfig(ModelConfig("fake", "", "", ["fake"], arch), CacheConfig(**cache))


@pytest.mark.parametrize("has_gpu", [False, True])
def test_resolve_platform(monkeypatch, has_gpu):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 * GIB, 16 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    assert resolve_platform("cpu").name == "cpu"
    assert resolve_platform("auto").name == ("cuda" if has_gpu else "cpu")
    if has_gpu:
        assert resolve_platform("cuda").name == "cuda"
    else:
        with pytest.raises(ConfigError, match="torch finds no usable GPU here"):
            resolve_platform("cuda")
    with pytest.raises(ConfigError, match="device must be auto, cpu, cuda, not 'mps'"):
        resolve_platform("mps")


def test_the_seam_imports_no_torch():
    code = "import sys, nanoserve.platforms.platform; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


def test_an_engine_process_lets_its_idle_threads_sleep(monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setenv("GOMP_SPINCOUNT", "77")
    environment = child_environment()
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert environment["GOMP_SPINCOUNT"] == "77"


def test_threads_follow_the_settings_in_their_order(monkeypatch):
    monkeypatch.setenv("NANOSERVE_CPU_THREADS", "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert cpu.num_threads() == 3
    monkeypatch.delenv("NANOSERVE_CPU_THREADS")
    assert cpu.num_threads() == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    monkeypatch.setattr(cpu, "cgroup_folders", list)
    assert cpu.num_threads() == 6
    monkeypatch.setenv("NANOSERVE_CPU_THREADS", "0")
    with pytest.raises(ConfigError, match="at least 1, not 0"):
        cpu.num_threads()


@pytest.mark.parametrize(
    ("cores", "quotas", "expected"),
    [
        (64, [], 64),
        (64, ["max 100000\n", ""], 64),
        (64, ["200000 100000\n"], 2),
        (64, ["50000 100000"], 1),
        (2, ["800000 100000"], 2),
        (64, ["max 100000", "400000 100000", "300000 100000"], 3),
    ],
)
def test_cores_within_a_container_s_quota(cores, quotas, expected):
    assert cpu.cores_within_quota(cores, quotas) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("flags\t\t: fpu avx512f avx512_vnni", False),
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16", True),
        ("model name\t: avx512_bf16", False),
        ("", False),
    ],
)
def test_native_bf16(flags, expected):
    assert cpu.has_native_bf16(f"processor\t: 0\n{flags}\n") is expected


@pytest.mark.parametrize(
    ("stored", "native", "expected"),
    [
        ("bfloat16", True, "bfloat16"),
        ("bfloat16", False, "float32"),
        ("float16", True, "float32"),
        ("float32", True, "float32"),
    ],
)
def test_auto_dtype_on_a_cpu(stored, native, expected):
    assert cpu.choose_dtype(stored, native) == expected


@pytest.mark.parametrize(
    ("stored", "major", "expected"),
    [("bfloat16", 9, "bfloat16"), ("bfloat16", 7, "float16"), ("float32", 9, "float32")],
)
def test_auto_dtype_on_a_gpu(stored, major, expected):
    assert cuda.choose_dtype(stored, major) == expected


MEMINFO = "MemTotal:       32000000 kB\nMemFree: 1 kB\nMemAvailable:   20000000 kB\n"


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([], 20_000_000 * 1024),
        ([("max\n", "5\n", "")], 20_000_000 * 1024),
        ([(f"{4 * GIB}\n", f"{GIB}\n", "")], 3 * GIB),
        ([(f"{4 * GIB}", f"{3 * GIB}", f"anon 1\ninactive_file {GIB}\n")], 2 * GIB),
        ([("max", "1", ""), (f"{GIB}", f"{2 * GIB}", "")], 0),
        ([(f"{8 * GIB}", "0", ""), (f"{2 * GIB}", "0", "")], 2 * GIB),
    ],
)
def test_available_memory_is_the_container_s(groups, expected):
    assert cpu.memory_within_limits(MEMINFO, groups) == expected


def test_available_memory_of_this_machine_is_plausible():
    assert 2**20 < cpu.available_memory() < 2**50


def test_cpu_kv_budget(monkeypatch):
    platform = CpuPlatform()
    monkeypatch.setattr(cpu, "available_memory", lambda: 6 * GIB)
    assert platform.kv_memory_budget(engine_config(), lambda: None) == 6 * GIB // 4
    monkeypatch.setattr(cpu, "available_memory", lambda: 600 * GIB)
    assert platform.kv_memory_budget(engine_config(), lambda: None) == 4 * GIB
    given = engine_config(kv_cache_memory=12345)
    assert platform.kv_memory_budget(given, lambda: None) == 12345


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cpu_cache_is_zeroed_and_costs_nothing_until_used(dtype):
    # A tebibyte of zeros would not fit: the pages do not exist before they are written.
    cache = CpuPlatform().allocate_cache((2, 1000, 16, 4), dtype)
    assert cache.shape == (2, 1000, 16, 4)
    assert cache.dtype == dtype
    assert cache.is_contiguous()
    assert (cache == 0).all()
    cache[1, 999] = 3.0
    assert cache[1, 999].sum() == 192

    resident = _resident_bytes()
    big = CpuPlatform().allocate_cache((GIB // dtype.itemsize,), dtype)
    assert _resident_bytes() - resident < GIB // 8
    assert big[-1] == 0


def _resident_bytes():
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        pytest.skip("no /proc here")
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("utilization", "expected"),
    # 16 in all, 9 free before loading (others hold 7), weights 4, peak 1.
    [(0.9, 16 * 0.9 - 7 - 5), (1.0, 4.0)],
)
def test_A59_the_pool_is_sized_from_what_is_free(utilization, expected):
    memory = cuda.DeviceMemory(total=16 * GIB, free_before=9 * GIB, used=5 * GIB)
    budget = cuda.kv_budget(memory, utilization)
    assert budget == pytest.approx(expected * GIB, rel=1e-9)
    assert budget <= (9 - 5) * GIB


@pytest.mark.parametrize(("free", "used"), [(9, 9), (9, 12), (1, 4)])
def test_A59_nothing_left_is_a_clear_message(free, used):
    memory = cuda.DeviceMemory(total=16 * GIB, free_before=free * GIB, used=used * GIB)
    with pytest.raises(ConfigError, match="no GPU memory is left for the KV cache") as caught:
        cuda.kv_budget(memory, 0.9)
    assert f"others hold {16 - free}.0 GiB" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_A59_a_real_gpu_has_room_for_what_was_measured():
    platform = resolve_platform("cuda")
    budget = platform.kv_memory_budget(engine_config(gpu_memory_utilization=0.5), lambda: None)
    cache = platform.allocate_cache((budget // 4,), torch.float32)
    assert cache.numel() * 4 <= budget
    del cache
    platform.release_memory()
