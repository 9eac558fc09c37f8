"""Performance and efficiency cores as systems tell them apart, from what they would say."""

import struct
import sys
from pathlib import Path

import psutil
import pytest

from localinfer.system import machine_limits
from localinfer.system.core_kinds import (
    efficiency_cores,
    efficiency_cores_of_sysctl,
    efficiency_cores_of_windows,
)


@pytest.fixture(autouse=True)
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")


def arm64(root: Path, capacities: list[int | None], threads_per_core: int = 1) -> Path:
    """A /sys with the capacity of each processor; None for one that is off."""
    for index, capacity in enumerate(capacities):
        folder = root / f"sys/devices/system/cpu/cpu{index}"
        (folder / "topology").mkdir(parents=True)
        if capacity is not None:
            (folder / "cpu_capacity").write_text(f"{capacity}\n")
            first = index - index % threads_per_core
            (folder / "topology/core_cpus_list").write_text(f"{first}-{first + threads_per_core - 1}\n")
    (root / "sys/devices/system/cpu/cpufreq").mkdir()
    return root


@pytest.mark.parametrize(
    ("capacities", "threads_per_core", "wanted"),
    [
        ([1024] * 4, 1, 0),
        ([397] * 4 + [1024] * 4, 1, 4),
        # Three kinds: the fastest, the same design with a lower clock, and the small ones.
        ([320] * 4 + [810] * 3 + [1024], 1, 4),
        ([980, 980, 1024, 1024], 1, 0),
        ([400, 400, 1024, 1024, 1024, 1024], 2, 1),
        ([400, None, 1024, 1024], 1, 1),
    ],
)
def test_linux_says_how_fast_each_arm64_core_is(
    capacities: list[int | None], threads_per_core: int, wanted: int, tmp_path: Path
) -> None:
    assert efficiency_cores(arm64(tmp_path, capacities, threads_per_core)) == wanted


@pytest.mark.parametrize(
    ("performance", "efficiency", "wanted"),
    [
        ("0-11\n", "12-19\n", 8),
        ("0-3", "4,6-7", 3),
        ("0-3", None, 0),
        (None, "0-7", 0),
        ("0-3", "", 0),
        ("0-3", "x-y,-,9999999", 0),
    ],
)
def test_linux_has_a_device_for_each_kind_of_intels_cores(
    performance: str | None, efficiency: str | None, wanted: int, tmp_path: Path
) -> None:
    for name, text in (("cpu_core", performance), ("cpu_atom", efficiency)):
        if text is not None:
            (tmp_path / "sys/devices" / name).mkdir(parents=True)
            (tmp_path / "sys/devices" / name / "cpus").write_text(text)
    assert efficiency_cores(tmp_path) == wanted


@pytest.mark.parametrize(
    ("answers", "wanted"),
    [
        ({"hw.nperflevels": 2, "hw.perflevel0.physicalcpu": 4, "hw.perflevel1.physicalcpu": 6}, 6),
        ({"hw.nperflevels": 1, "hw.perflevel0.physicalcpu": 8}, 0),
        ({}, 0),
        ({"hw.nperflevels": 2}, 0),
    ],
)
def test_macos_counts_the_cores_of_each_level(answers: dict[str, int], wanted: int) -> None:
    assert efficiency_cores_of_sysctl(answers.get) == wanted


def test_windows_has_a_class_for_each_core() -> None:
    def record(efficiency_class: int, relation: int = 0) -> bytes:
        return struct.pack("<IIBB", relation, 48, 1, efficiency_class).ljust(48, b"\0")

    fast, slow = record(1), record(0)
    assert efficiency_cores_of_windows(2 * fast + 3 * slow + record(0, relation=3)) == 3
    assert efficiency_cores_of_windows(4 * slow) == efficiency_cores_of_windows(b"") == 0
    assert efficiency_cores_of_windows((fast + slow)[:-40]) == 0


def test_a_machine_says_its_performance_cores_where_others_are_slower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8)
    found = machine_limits.processor_limits(arm64(tmp_path, [400] * 5 + [1024] * 3))
    assert (found.physical_cores, found.performance_cores, found.efficiency_cores) == (8, 3, 5)
    assert machine_limits.core_text(found.performance_cores, found.efficiency_cores) == "3 P + 5 E"
    # A container that sees the speeds of more cores in /sys than it has.
    (tmp_path / "sys/devices/system/cpu/cpu0/topology/core_cpus_list").unlink()
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 4)
    found = machine_limits.processor_limits(tmp_path)
    assert (found.physical_cores, found.performance_cores, found.efficiency_cores) == (4, 0, 0)
