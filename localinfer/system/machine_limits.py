"""Limits of the machine, or of a process's control group (cgroup): memory, processors, and the driver of GPUs.

A container's limits are not what the machine reports: /proc/meminfo shows the memory of the host. Control groups of
version 1 and 2 are read, as described in the Linux kernel's admin guide.
"""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from localinfer.system.core_kinds import CPUS, efficiency_cores
from localinfer.system.files import text_of
from localinfer.types import Record

_NO_LIMIT = 1 << 60
"""Version 1 reports the largest number of pages where no limit was set."""
_ROOT = Path("/")

_UNREADABLE = (OSError, RuntimeError, ValueError, LookupError)
"""Errors of psutil where /proc and /sys are absent, masked or of another form."""
_ASSUMED_BYTES = 4 << 30
"""Memory of a machine that says nothing of it."""


class MemoryLimits(Record):
    """Bytes of memory.

    total: installed, or the limit of the control group. available: what can be allocated without swapping. swap: what
    more can be allocated by swapping. limited_by: "the cgroup" if its limit is what counts, "" for the machine itself.
    """

    total_bytes: int
    available_bytes: int
    swap_bytes: int = 0
    limited_by: str = ""

    @property
    def most_bytes(self) -> int:
        """Bytes that can be allocated at all, swapping included."""
        return self.available_bytes + self.swap_bytes

    def describe(self) -> str:
        """The available bytes and what they are a part of, such as "14.2 GB of 16.0 GB are free"."""
        where = f" that {self.limited_by} allows" if self.limited_by else ""
        return f"{byte_text(self.available_bytes)} of {byte_text(self.total_bytes)}{where} are free"


class ProcessorLimits(Record):
    """Processors of the machine, and the part of them that this process may use."""

    physical_cores: int
    hardware_threads: int
    allowed: int
    """Hardware threads by affinity."""
    quota: float | None = None
    """Processors' worth of time by the control group; None without a limit."""
    efficiency_cores: int = 0
    """Of the physical ones; 0 where all are alike."""

    @property
    def performance_cores(self) -> int:
        """Of the physical ones, those beside efficiency cores; 0 where all are alike."""
        return self.physical_cores - self.efficiency_cores if self.efficiency_cores else 0

    @property
    def usable_threads(self) -> int:
        """Threads that can run at once, each on a core of its own."""
        quota = self.allowed if self.quota is None else max(1, round(self.quota))
        return max(1, min(self.physical_cores, self.allowed, quota))


def byte_text(num_bytes: int) -> str:
    """Such as "4.7 GB" or "310 MB"."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 10**9 else f"{-(-num_bytes // 10**6)} MB"


def memory_limits(root: Path = _ROOT) -> MemoryLimits:
    """Memory of the machine and of this process's control group. root: of the file system, for tests."""
    total, available, free_swap = _machine_memory(root)
    # macOS compresses memory and makes swap files when it needs them, so what is installed is what counts.
    swap = max(0, total - available) if sys.platform == "darwin" else free_swap
    found = MemoryLimits(total, available, swap)
    for limit, used in _memory_groups(root):
        if limit < found.total_bytes or limit - used < found.available_bytes:
            available = max(0, min(found.available_bytes, limit - used))
            found = MemoryLimits(min(found.total_bytes, limit), available, 0, "the cgroup")
    return found


def processor_limits(root: Path = _ROOT) -> ProcessorLimits:
    """Processors of the machine and of this process."""
    threads = os.cpu_count() or 1
    cores = _physical_cores(root) or threads
    slow = efficiency_cores(root)
    return ProcessorLimits(cores, threads, allowed_processors(), processor_quota(root), slow if slow < cores else 0)


def core_text(performance_cores: int, efficiency_cores: int) -> str:
    """Such as "4 P + 4 E"."""
    return f"{performance_cores} P + {efficiency_cores} E"


def allowed_processors() -> int:
    """Hardware threads that this process may run on: all of them where the system has no affinity, or does not say."""
    if hasattr(os, "sched_getaffinity"):
        with contextlib.suppress(OSError):
            return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor_quota(root: Path = _ROOT) -> float | None:
    """Processors' worth of time that the control group allows; None without a limit."""
    quotas = []
    for folder in _group_folders(root, "cpu"):
        words = text_of(folder / "cpu.max").split()
        if not words:
            words = [text_of(folder / name) for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
        try:
            quota, period = map(int, words)
        except ValueError:
            continue
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def has_driver() -> bool:
    """True if NVIDIA's driver is installed, without importing large libraries."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True


def _machine_memory(root: Path) -> tuple[int, int, int]:
    """Bytes of memory that are installed, that are available (half of it where that is unknown), and of free swap."""
    words = [line.split() for line in text_of(root / "proc/meminfo").splitlines()]
    known = {line[0]: int(line[1]) << 10 for line in words if len(line) == 3 and line[1].isdecimal()}
    total, available, swap = (known.get(f"{name}:", -1) for name in ("MemTotal", "MemAvailable", "SwapFree"))
    if 0 <= available <= total and swap >= 0:
        return total, available, swap
    # Linux says it in a file, which is read in a thousandth of the time that this import takes.
    import psutil

    swap = 0
    with contextlib.suppress(*_UNREADABLE):
        swap = int(psutil.swap_memory().free)
    with contextlib.suppress(*_UNREADABLE):
        memory = psutil.virtual_memory()
        return int(memory.total), int(memory.available), swap
    total, free = _ASSUMED_BYTES, 0
    # Not on Windows, and on some systems without one of the names.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, max(free, total // 2), swap


def _physical_cores(root: Path) -> int:
    """Cores of the machine; 0 if unknown."""
    # Threads of one core have the same list.
    lists = {text_of(path / "topology/core_cpus_list") for path in (root / CPUS).glob("cpu[0-9]*")}
    if lists and "" not in lists:
        return len(lists)
    import psutil

    with contextlib.suppress(*_UNREADABLE):
        return int(psutil.cpu_count(logical=False) or 0)
    return 0


def _memory_groups(root: Path) -> Iterator[tuple[int, int]]:
    """The limit of each control group that has one, and the bytes used in it that cannot be reclaimed."""
    for folder in _group_folders(root, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        # Cached files are given back when memory is needed; version 1 has sums over subgroups as well.
        words = text_of(folder / "memory.stat").split()
        fields = dict(zip(words[::2], words[1::2], strict=False))
        cached = 0
        for name in ("inactive_file", "active_file"):
            text = fields.get(f"total_{name}", fields.get(name, "0"))
            cached += int(text) if text.isdecimal() else 0
        yield limit, max(0, used - cached)


def _group_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control group and of those above it, of either version.

    In a container /proc names a path on the host that does not exist inside; there the mounted root is the group.
    """
    mounted = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            top = mounted
        elif controller in controllers.split(","):
            top = mounted / controller if (mounted / controller).is_dir() else mounted / controllers
        else:
            continue
        folder = top / path.strip("/")
        for place in (folder, *folder.parents):
            if place.is_dir():
                yield place
            if place == top:
                break


def _number(path: Path) -> int | None:
    words = text_of(path).split()
    return int(words[0]) if words and words[0].isdecimal() else None
