"""The name of this machine's CPU as a person knows it: "Apple M2", "Cortex-A76", "AMD EPYC 9B45".

x86-64 and Apple's systems have a text of it. Linux on arm64 has the numbers of each core's maker and design, in
/proc/cpuinfo or else in /sys, and often the board's name in the device tree.
"""

import platform
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from llvmlite import binding as llvm

from localinfer.kernels.jit.host import sysctl_bytes

_ROOT = Path("/")

_ARM, _FUJITSU, _HISILICON, _NVIDIA, _QUALCOMM, _APPLE, _MICROSOFT, _AMPERE = bytes.fromhex("4146484E51616DC0")
_MAKERS = {
    _ARM: "Arm",
    _FUJITSU: "Fujitsu",
    _HISILICON: "HiSilicon",
    _NVIDIA: "NVIDIA",
    _QUALCOMM: "Qualcomm",
    _APPLE: "Apple",
    _MICROSOFT: "Microsoft",
    _AMPERE: "Ampere",
}
_DESIGNS = {
    (_ARM, 0xD03): "Cortex-A53",
    (_ARM, 0xD04): "Cortex-A35",
    (_ARM, 0xD05): "Cortex-A55",
    (_ARM, 0xD07): "Cortex-A57",
    (_ARM, 0xD08): "Cortex-A72",
    (_ARM, 0xD09): "Cortex-A73",
    (_ARM, 0xD0A): "Cortex-A75",
    (_ARM, 0xD0B): "Cortex-A76",
    (_ARM, 0xD0C): "Neoverse N1",
    (_ARM, 0xD0D): "Cortex-A77",
    (_ARM, 0xD40): "Neoverse V1",
    (_ARM, 0xD41): "Cortex-A78",
    (_ARM, 0xD44): "Cortex-X1",
    (_ARM, 0xD46): "Cortex-A510",
    (_ARM, 0xD47): "Cortex-A710",
    (_ARM, 0xD48): "Cortex-X2",
    (_ARM, 0xD49): "Neoverse N2",
    (_ARM, 0xD4B): "Cortex-A78C",
    (_ARM, 0xD4C): "Cortex-X1C",
    (_ARM, 0xD4D): "Cortex-A715",
    (_ARM, 0xD4E): "Cortex-X3",
    (_ARM, 0xD4F): "Neoverse V2",
    (_ARM, 0xD80): "Cortex-A520",
    (_ARM, 0xD81): "Cortex-A720",
    (_ARM, 0xD82): "Cortex-X4",
    (_ARM, 0xD84): "Neoverse V3",
    (_ARM, 0xD85): "Cortex-X925",
    (_ARM, 0xD87): "Cortex-A725",
    (_ARM, 0xD8E): "Neoverse N3",
    (_FUJITSU, 0x001): "Fujitsu A64FX",
    (_HISILICON, 0xD01): "HiSilicon TaiShan v110",
    (_NVIDIA, 0x004): "NVIDIA Carmel",
    (_QUALCOMM, 0x001): "Qualcomm Oryon",
    (_QUALCOMM, 0x802): "Qualcomm Kryo 385 Gold",
    (_QUALCOMM, 0x803): "Qualcomm Kryo 385 Silver",
    (_QUALCOMM, 0x804): "Qualcomm Kryo 485 Gold",
    (_QUALCOMM, 0x805): "Qualcomm Kryo 485 Silver",
    **dict.fromkeys([(_APPLE, 0x022), (_APPLE, 0x023)], "Apple M1"),
    **dict.fromkeys([(_APPLE, 0x024), (_APPLE, 0x025)], "Apple M1 Pro"),
    **dict.fromkeys([(_APPLE, 0x028), (_APPLE, 0x029)], "Apple M1 Max"),
    **dict.fromkeys([(_APPLE, 0x032), (_APPLE, 0x033)], "Apple M2"),
    **dict.fromkeys([(_APPLE, 0x034), (_APPLE, 0x035)], "Apple M2 Pro"),
    **dict.fromkeys([(_APPLE, 0x038), (_APPLE, 0x039)], "Apple M2 Max"),
    (_MICROSOFT, 0xD49): "Microsoft Azure Cobalt 100",
    (_AMPERE, 0xAC3): "Ampere-1",
    (_AMPERE, 0xAC4): "Ampere-1A",
}
"""Names by the numbers of the maker and of the design, from their manuals."""

_MIDR = "sys/devices/system/cpu/cpu*/regs/identification/midr_el1"
_WINDOWS_KEY = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"


def cpu_name(root: Path = _ROOT) -> str:
    """The name of the CPU, of each kind of core where they differ, with the board if it has a name.

    LLVM's name, or the architecture, if the system tells none. root: of the file system, for tests.
    """
    found = _told_name() or _linux_name(root)
    if found:
        return found
    known = str(llvm.get_host_cpu_name())
    return known if known != "generic" else platform.processor() or platform.machine()


def _told_name() -> str:
    """The text that macOS and Windows have (both untested); empty elsewhere."""
    if sys.platform == "darwin":
        return (sysctl_bytes("machdep.cpu.brand_string") or b"").split(b"\0")[0].decode("utf-8", "replace").strip()
    if sys.platform == "win32":
        import winreg

        try:
            with winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, _WINDOWS_KEY) as key:
                return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
        except OSError:
            return ""
    return ""


def _linux_name(root: Path) -> str:
    """The model's text of x86-64, or the designs of all cores and the board; empty if nothing is known."""
    lines = _text(root / "proc/cpuinfo").splitlines()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    cores = set(_designs(lines)) or set(_designs_in_sys(root))
    if not cores:
        return ""
    # A later design has a larger number: the large cores come first.
    names = dict.fromkeys(
        _DESIGNS.get((maker, design)) or f"{_MAKERS.get(maker, f'maker {maker:#04x}')} CPU {design:#05x}"
        for maker, design in sorted(cores, reverse=True)
    )
    board = _text(root / "proc/device-tree/model").strip("\0 \n")
    return f"{' and '.join(names)} ({board})" if board else " and ".join(names)


def _designs(lines: list[str]) -> Iterator[tuple[int, int]]:
    maker = 0
    for line in lines:
        name, _, value = line.partition(":")
        number = re.fullmatch(r"0x[0-9a-fA-F]{1,4}", value.strip())
        if number and name.startswith("CPU implementer"):
            maker = int(number[0], 16)
        elif number and name.startswith("CPU part"):
            yield maker, int(number[0], 16)


def _designs_in_sys(root: Path) -> Iterator[tuple[int, int]]:
    """The same from the main identification register of each core: bits 24 to 31 and 4 to 15."""
    for path in sorted(root.glob(_MIDR)):
        text = _text(path).strip()
        if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text):
            word = int(text, 16)
            yield word >> 24 & 0xFF, word >> 4 & 0xFFF


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
