"""The CPU: how many threads, which type, and how much memory is really there.

Containers are the rule: a process may have fewer cores than the machine (affinity, a cgroup's CPU
quota) and less memory (a cgroup's limit), and the smaller number is the true one.
"""

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from nanoserve import envs
from nanoserve.config.engine import EngineConfig
from nanoserve.errors import ConfigError
from nanoserve.platforms.platform import Platform

# The cache's share of the memory that is available, and the most it takes unasked.
KV_SHARE = 4
KV_CAP = 4 * 2**30
NATIVE_BF16_FLAGS = ("avx512_bf16", "amx_bf16", "bf16")  # the last is Arm's


class CpuPlatform(Platform):
    """Any CPU that torch runs on."""

    name = "cpu"

    def configure_process(self) -> None:
        """Use every core this process may use."""
        torch.set_num_threads(num_threads())

    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def default_dtype(self, arch_dtype: str) -> str:
        """bfloat16 where weights are stored so and the CPU multiplies it natively, else float32.

        Elsewhere half-width types are several times slower than float32.
        """
        return choose_dtype(arch_dtype, has_native_bf16(_read("/proc/cpuinfo")))

    def attention_backend(self) -> str:
        """Paged attention with torch operations."""
        return "torch_paged"

    def kv_memory_budget(self, config: EngineConfig, profile: Callable[[], None]) -> int:
        """`kv_cache_memory`, else a quarter of the memory available now, at most 4 GiB."""
        if config.cache.kv_cache_memory is not None:
            return config.cache.kv_cache_memory
        return default_kv_budget(available_memory())

    def allocate_cache(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Zeroed, but not touched: a page costs memory once a token is written to it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(*shape)

    def synchronize(self) -> None:
        """Nothing runs behind the caller's back."""

    def release_memory(self) -> None:
        """Freed memory goes back by itself."""


def cgroup_folders() -> list[Path]:
    """This process's cgroup v2 folder and those above it; empty where there are none."""
    root = Path("/sys/fs/cgroup")
    for line in _read("/proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            own = root / line[3:].strip().lstrip("/")
            return [p for p in (own, *own.parents) if p.is_relative_to(root) and p.is_dir()]
    return []


def _read(path: str | Path) -> str:
    """A file's text, or nothing."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _field(text: str, name: str) -> int:
    """The number after a name, 0 if it is not there."""
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1])
    return 0


def num_threads() -> int:
    """Threads to compute with: NANOSERVE_CPU_THREADS, else OMP_NUM_THREADS, else the cores."""
    asked = envs.get("NANOSERVE_CPU_THREADS")
    if asked is not None:
        if asked < 1:
            raise ConfigError(f"NANOSERVE_CPU_THREADS must be at least 1, not {asked}")
        return int(asked)
    omp = os.environ.get("OMP_NUM_THREADS", "")
    if omp.isdigit() and int(omp) > 0:
        return int(omp)
    return usable_cores()


def usable_cores() -> int:
    """Cores that this process may use: its affinity, cut by a cgroup's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return cores_within_quota(cores, [_read(folder / "cpu.max") for folder in cgroup_folders()])


def cores_within_quota(cores: int, quotas: Sequence[str]) -> int:
    """Cut a number of cores by cgroup v2 `cpu.max` texts ("200000 100000" is two cores)."""
    for text in quotas:
        quota, _, period = text.strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def has_native_bf16(cpuinfo: str) -> bool:
    """Whether /proc/cpuinfo's text names instructions that multiply bfloat16."""
    for line in cpuinfo.splitlines():
        name, _, flags = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return not set(NATIVE_BF16_FLAGS).isdisjoint(flags.split())
    return False


def choose_dtype(arch_dtype: str, native_bf16: bool) -> str:
    """What `auto` means on a CPU."""
    return "bfloat16" if native_bf16 and arch_dtype == "bfloat16" else "float32"


def available_memory() -> int:
    """Bytes that this process could still take without swapping or being killed."""
    meminfo = _read("/proc/meminfo")
    if not meminfo:
        # No /proc (macOS): half of what is built in.
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    groups = [
        (_read(f / "memory.max"), _read(f / "memory.current"), _read(f / "memory.stat"))
        for f in cgroup_folders()
    ]
    return memory_within_limits(meminfo, groups)


def memory_within_limits(meminfo: str, groups: Sequence[tuple[str, str, str]]) -> int:
    """The least of what the machine and each enclosing cgroup have left, in bytes.

    Args:
        meminfo: /proc/meminfo.
        groups: cgroup v2 texts (memory.max, memory.current, memory.stat).
    """
    left = _field(meminfo.replace(":", ""), "MemAvailable") * 1024
    for limit, current, stat in groups:
        if limit.strip().isdigit() and current.strip().isdigit():
            # Cached file pages are counted as used, but are dropped when memory is asked for.
            used = int(current) - _field(stat, "inactive_file")
            left = min(left, max(0, int(limit) - used))
    return left


def default_kv_budget(available: int) -> int:
    """The cache's bytes when the user names none."""
    return min(KV_CAP, available // KV_SHARE)
