"""Cores that differ in speed, performance and efficiency cores, as each system tells them apart; macOS's named values.

Linux has the relative speed of each core of arm64, and of Intel's hybrid CPUs a counting device for each kind of core.
macOS has the numbers of cores by level, from the fastest, and Windows a class of efficiency for each core; what is read
from these two is untested.
"""

import ctypes
import re
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from localinfer.system.files import text_of

_ROOT = Path("/")
CPUS = "sys/devices/system/cpu"
_INTEL_KINDS = "sys/devices/cpu_core/cpus", "sys/devices/cpu_atom/cpus"
"""The processors that are threads of performance cores, and those that are efficiency cores, which have one each."""
_SLOW = 0.6
"""Of the fastest core's speed, the share below which another is an efficiency core: one of the same design with a lower
clock has more, and the small designs have a fifth to a half."""

_RELATION_PROCESSOR_CORE = 0
_MOST_LEVELS = 8
_MOST_PROCESSORS = 4096
_MOST_BYTES = 256
"""Of a value of macOS."""


def efficiency_cores(root: Path = _ROOT) -> int:
    """Number of the machine's cores that are slow beside the others; 0 where all are alike, or the system says nothing.

    root: of the file system, for tests.
    """
    if sys.platform == "darwin":
        return efficiency_cores_of_sysctl(sysctl_number)
    if sys.platform == "win32":
        return efficiency_cores_of_windows(_windows_cores())
    return _by_capacity(root) or _by_intels_devices(root)


def efficiency_cores_of_sysctl(ask: Callable[[str], int | None]) -> int:
    """The same as macOS has it. ask: returns the number of a name, None for one that this version does not know."""
    levels = min(ask("hw.nperflevels") or 1, _MOST_LEVELS)
    return sum(ask(f"hw.perflevel{level}.physicalcpu") or 0 for level in range(1, levels))


def efficiency_cores_of_windows(records: bytes) -> int:
    """The same from what `GetLogicalProcessorInformationEx` returns of processor cores."""
    classes, at = [], 0
    while at + 10 <= len(records):
        relation, size, _, efficiency_class = struct.unpack_from("<IIBB", records, at)
        if relation == _RELATION_PROCESSOR_CORE:
            classes.append(efficiency_class)
        at += max(size, 10)
    # A higher class is a faster core.
    return sum(one < max(classes) for one in classes)


def _windows_cores() -> bytes:
    if sys.platform != "win32":
        return b""
    ask = ctypes.windll.kernel32.GetLogicalProcessorInformationEx
    size = ctypes.c_ulong(0)
    ask(_RELATION_PROCESSOR_CORE, None, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(max(1, size.value))
    return buffer.raw[: size.value] if ask(_RELATION_PROCESSOR_CORE, buffer, ctypes.byref(size)) else b""


def _by_capacity(root: Path) -> int:
    """By the speeds of cores relative to the fastest, which Linux has of arm64."""
    if not text_of(root / CPUS / "cpu0/cpu_capacity"):
        return 0
    capacities: dict[str, int] = {}
    for folder in sorted((root / CPUS).glob("cpu[0-9]*")):
        text = text_of(folder / "cpu_capacity")
        if text.isdecimal():
            # Threads of one core have the same list.
            capacities[text_of(folder / "topology/core_cpus_list") or folder.name] = int(text)
    return sum(one < _SLOW * max(capacities.values()) for one in capacities.values())


def _by_intels_devices(root: Path) -> int:
    performance, efficiency = ([*_numbers(text_of(root / place))] for place in _INTEL_KINDS)
    return len(efficiency) if performance else 0


def _numbers(text: str) -> Iterator[int]:
    """The numbers of a list such as "0-3,8"."""
    for part in text.split(","):
        if found := re.fullmatch(r"(\d{1,4})(?:-(\d{1,4}))?", part):
            first, last = int(found[1]), int(found[2] or found[1])
            yield from range(first, min(last, _MOST_PROCESSORS) + 1)


def sysctl_number(name: str) -> int | None:
    """A number by its name; None if the system has none of this name."""
    found = sysctl_bytes(name)
    return None if found is None else int.from_bytes(found, sys.byteorder)


def sysctl_bytes(name: str) -> bytes | None:
    """The bytes of a value by its name; None if the system has none of this name."""
    try:
        ask: Any = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return None
    buffer, size = ctypes.create_string_buffer(_MOST_BYTES), ctypes.c_size_t(_MOST_BYTES)
    if ask(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return buffer.raw[: size.value]
