"""Clock, power, huge pages and memory modules, as Linux reports them; other systems report little of it."""

from pathlib import Path
from typing import Any

_ROOT = Path("/")
_CPU = "sys/devices/system/cpu"
_MODULES = "sys/firmware/dmi/entries"
_SCALING_DRIVERS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""Drivers whose governor `powersave` is the usual one: the clock follows the load."""


def power_facts(root: Path = _ROOT) -> dict[str, Any]:
    """The governor of the clock, its limits in MHz, the platform's power profile, and whether a battery feeds it.

    is_saving: the clock is held low by the governor or the profile.
    """
    clock = root / _CPU / "cpu0/cpufreq"
    governor, driver = _text(clock / "scaling_governor"), _text(clock / "scaling_driver")
    preference = _text(clock / "energy_performance_preference")
    profile = _text(root / "sys/firmware/acpi/platform_profile")
    most, limit = _number(clock / "cpuinfo_max_freq"), _number(clock / "scaling_max_freq")
    is_slow_governor = governor == "powersave" and driver not in _SCALING_DRIVERS
    return {
        "governor": governor or None,
        "driver": driver or None,
        "preference": preference or None,
        "profile": profile or None,
        "max_mhz": None if most is None else most // 1000,
        "limit_mhz": None if limit is None else limit // 1000,
        "on_battery": _on_battery(),
        "is_saving": is_slow_governor or preference == "power" or profile == "low-power",
    }


def huge_pages(root: Path = _ROOT) -> str | None:
    """The system's setting of huge pages: "always", "madvise" or "never"; None if it has none."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    _, opened, rest = text.partition("[")
    return rest.partition("]")[0] if opened else None


def memory_modules(root: Path = _ROOT) -> list[dict[str, int]] | None:
    """Each fitted module: its bytes, and transfers per second in millions (0 if unknown); None if not readable.

    From the SMBIOS table's records of type 17 (DSP0134, section 7.18), which usually only the administrator may read.
    """
    found = []
    for path in sorted((root / _MODULES).glob("17-*/raw")):
        try:
            record = path.read_bytes()
        except OSError:
            return None
        if len(record) < 0x17:
            continue
        size = int.from_bytes(record[0x0C:0x0E], "little")
        if size in (0, 0xFFFF):
            continue
        num_bytes = (size & 0x7FFF) << (10 if size & 0x8000 else 20)
        if size == 0x7FFF and len(record) >= 0x20:
            num_bytes = int.from_bytes(record[0x1C:0x20], "little") << 20
        speed = record[0x20:0x22] if len(record) >= 0x22 else record[0x15:0x17]
        found.append({"num_bytes": num_bytes, "mega_transfers": int.from_bytes(speed, "little")})
    return found or None


def _on_battery() -> bool | None:
    import psutil

    try:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    except (OSError, RuntimeError, ValueError):
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
