"""Limits of the machine and of control groups, of both versions, as containers show them."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from localinfer.system.machine_limits import (
    MemoryLimits,
    ProcessorLimits,
    memory_limits,
    processor_limits,
    processor_quota,
)

GB = 10**9


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=64 * GB, available=40 * GB))
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(free=2 * GB))
    monkeypatch.setattr("sys.platform", "linux")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_without_groups_the_machine_counts(tmp_path: Path) -> None:
    found = memory_limits(tmp_path)
    assert found == MemoryLimits(64 * GB, 40 * GB, 2 * GB)
    assert found.most_bytes == 42 * GB
    assert found.describe() == "40.0 GB of 64.0 GB are free"
    assert processor_quota(tmp_path) is None


def test_linux_says_memory_and_cores_in_files(tmp_path: Path) -> None:
    wanted = psutil.swap_memory().free
    lines = "MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 5000000 kB\nSwapFree: 300 kB\nHugePages_Total: 7\n"
    siblings = {f"sys/devices/system/cpu/cpu{index}/topology/core_cpus_list": f"{index % 3},3" for index in range(6)}
    root = write(tmp_path, {"proc/meminfo": lines} | siblings)
    assert memory_limits(root) == MemoryLimits(16_000_000 << 10, 5_000_000 << 10, 300 << 10)
    assert processor_limits(root).physical_cores == 3
    # Before Linux 3.14 it did not say how much is available; nothing is made up here.
    write(root, {"proc/meminfo": lines.replace("MemAvailable", "Cached")})
    assert memory_limits(root) == MemoryLimits(64 * GB, 40 * GB, wanted)


def test_version_2_counts_the_least_of_all_groups_above(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/user.slice/job"
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/user.slice/job\n",
            f"{group}/memory.max": "max\n",
            f"{group}/memory.current": f"{6 * GB}\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{8 * GB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{6 * GB}\n",
            "sys/fs/cgroup/user.slice/memory.stat": f"anon 1\ninactive_file {2 * GB}\nactive_file {1 * GB}\n",
            f"{group}/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
        },
    )
    found = memory_limits(root)
    assert found == MemoryLimits(8 * GB, 5 * GB, 0, "the cgroup")
    assert found.describe() == "5.0 GB of 8.0 GB that the cgroup allows are free"
    assert processor_quota(root) == 1.5


def test_version_1_in_a_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/0123\n4:cpu,cpuacct:/docker/0123\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GB}\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{1 * GB}\n",
            "sys/fs/cgroup/memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GB // 2}\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limits(root) == MemoryLimits(4 * GB, 4 * GB - GB // 2, 0, "the cgroup")
    assert processor_quota(root) == 0.5
    assert processor_limits(root).usable_threads == 1


def test_no_limit_and_damaged_files_change_nothing(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/\n4:cpu:/\nnonsense\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "?\n",
        },
    )
    assert memory_limits(root).limited_by == ""
    assert processor_quota(root) is None


def test_threads_are_the_least_of_cores_affinity_and_quota() -> None:
    assert ProcessorLimits(8, 16, 16).usable_threads == 8
    assert ProcessorLimits(8, 16, 3).usable_threads == 3
    assert ProcessorLimits(8, 16, 16, 2.0).usable_threads == 2
    assert ProcessorLimits(8, 16, 16, 0.2).usable_threads == 1
