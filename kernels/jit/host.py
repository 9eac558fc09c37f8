"""This machine's CPU: the features that LLVM and the system itself know of it, and the name that a person knows.

LLVM 22 knows the features of x86-64. Of an arm64 CPU it learns from the words of /proc/cpuinfo, of which it knows few,
and on macOS nothing: neither ever names dot products. The kernel's own words, as `getauxval`, `sysctlbyname` and
`IsProcessorFeaturePresent` return them, are what may be used: those of all cores, less what the kernel masks.

x86-64 and Apple's systems have a text of the name. Linux on arm64 has the numbers of each core's maker and design, in
/proc/cpuinfo or else in /sys, and often the board's name in the device tree.
"""

import ctypes
import functools
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from llvmlite import binding as llvm

from localinfer.system.core_kinds import sysctl_bytes, sysctl_number
from localinfer.system.files import text_of

Features = Mapping[str, bool]
"""Features by LLVM's name: True where a CPU has one, False where it lacks it; one that is not there is unknown."""

_AT_HWCAP, _AT_HWCAP2 = 16, 26
_HWCAP = {
    "fp-armv8": 0,
    "neon": 1,
    "lse": 8,
    "fullfp16": 10,
    "rdm": 12,
    "rcpc": 15,
    "dotprod": 20,
    "fp16fml": 23,
}
_HWCAP2 = {"i8mm": 13, "bf16": 14}
"""Bits of the two words. Source: Linux, arch/arm64/include/uapi/asm/hwcap.h."""

_SYSCTL = {
    "lse": "FEAT_LSE",
    "fullfp16": "FEAT_FP16",
    "rdm": "FEAT_RDM",
    "rcpc": "FEAT_LRCPC",
    "dotprod": "FEAT_DotProd",
    "fp16fml": "FEAT_FHM",
    "i8mm": "FEAT_I8MM",
    "bf16": "FEAT_BF16",
}
"""Names under hw.optional.arm, since macOS 12."""

_WINDOWS = {"lse": 34, "dotprod": 43, "rcpc": 45, "i8mm": 66, "fullfp16": 67, "bf16": 68}
"""PF_ARM_..._INSTRUCTIONS_AVAILABLE of winnt.h; a version of Windows that does not know one says that it is absent."""

_ALWAYS = {"fp-armv8": True, "neon": True}
"""Of every CPU that macOS and Windows run on."""


def features_of_hwcap(hwcap: int, hwcap2: int) -> Features:
    """Features of an arm64 CPU from Linux's two words; none if the first is 0, which no such CPU has."""
    if not hwcap:
        return {}
    words = [(hwcap, _HWCAP), (hwcap2, _HWCAP2)]
    return {name: bool(word >> bit & 1) for word, bits in words for name, bit in bits.items()}


def features_of_sysctl(ask: Callable[[str], int | None]) -> Features:
    """Features of an arm64 CPU as macOS has them.

    ask: returns the number of a name, None for one that this version does not know.
    """
    answers = {name: ask(f"hw.optional.arm.{known}") for name, known in _SYSCTL.items()}
    return _ALWAYS | {name: bool(answer) for name, answer in answers.items() if answer is not None}


def features_of_windows(is_present: Callable[[int], object]) -> Features:
    """Features of an arm64 CPU as Windows has them. is_present: `IsProcessorFeaturePresent`."""
    return _ALWAYS | {name: bool(is_present(number)) for name, number in _WINDOWS.items()}


def is_arm64(triple: str | None = None) -> bool:
    """True for LLVM's name of an arm64 target; by default of this process, which under emulation may be x86-64's."""
    return (triple or str(llvm.get_process_triple())).startswith(("aarch64", "arm64"))


@functools.cache
def host_features() -> Features:
    """The features of this CPU that are known."""
    return MappingProxyType({**llvm.get_host_cpu_features(), **(_system_features() if is_arm64() else {})})


def _system_features() -> Features:
    """Features of this arm64 CPU as its system has them; none if it does not say. Untested on macOS and Windows."""
    try:
        if sys.platform == "darwin":
            return features_of_sysctl(sysctl_number)
        if sys.platform == "win32":
            return features_of_windows(ctypes.windll.kernel32.IsProcessorFeaturePresent)
        ask = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return {}
    ask.restype, ask.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return features_of_hwcap(ask(_AT_HWCAP), ask(_AT_HWCAP2))


_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18
"""Source: Linux, Documentation/arch/x86/xstate.rst."""


@functools.cache
def amx_refusal() -> str | None:
    """Ask Linux, once, to let the threads of this process use the registers of AMX; the reason why they may not.

    Threads that are made later may too; without it the first such instruction would end the process.
    """
    if not sys.platform.startswith("linux"):
        return f"{sys.platform} is not known to allow it"
    try:
        ask = ctypes.CDLL(None, use_errno=True).syscall
    except (OSError, AttributeError) as error:
        return str(error)
    ask.restype, ask.argtypes = ctypes.c_long, [ctypes.c_long] * 3
    if ask(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0:
        return None
    return f"Linux refuses it to this process: {os.strerror(ctypes.get_errno())}"


_SETTINGS_IN_CODE = (
    *("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX", "NUMBA_OPT", "NUMBA_BOUNDSCHECK"),
    *("NUMBA_LOOP_VECTORIZE", "NUMBA_SLP_VECTORIZE", "NUMBA_DEBUGINFO"),
)


def settings_in_code() -> list[str | bool | None]:
    """Settings that affect compiled code, those of Numba and guard mode; all are false if none is set."""
    # In guard mode kernels check alignments, alike whichever end of an array is exact.
    return [*map(os.environ.get, _SETTINGS_IN_CODE), bool(os.environ.get("LOCALINFER_GUARD"))]


def target_cpu() -> str:
    """LLVM's name of the CPU that kernels are compiled for: this one, or that of NUMBA_CPU_NAME."""
    return os.environ.get("NUMBA_CPU_NAME") or str(llvm.get_host_cpu_name())


def target_features() -> str:
    """The features that kernels are compiled for, as LLVM takes them: those of this CPU, or of Numba's variables."""
    given = os.environ.get("NUMBA_CPU_FEATURES")
    if given is not None:
        return given
    if target_cpu().lower() == "generic" and "NUMBA_CPU_NAME" in os.environ:
        return ""
    features = host_features()
    if os.environ.get("NUMBA_ENABLE_AVX") == "0":
        features = {name: has and not name.startswith("avx") for name, has in features.items()}
    return feature_flags(features)


def feature_flags(features: Features) -> str:
    """Features as LLVM takes them for a target."""
    return ",".join(f"{'+' if features[name] else '-'}{name}" for name in sorted(features))


_ROOT = Path("/")

_MAKERS = {
    0x41: "Arm",
    0x46: "Fujitsu",
    0x48: "HiSilicon",
    0x4E: "NVIDIA",
    0x51: "Qualcomm",
    0x61: "Apple",
    0x6D: "Microsoft",
    0xC0: "Ampere",
}
_DESIGNS = {
    "Arm": "d03 Cortex-A53, d04 Cortex-A35, d05 Cortex-A55, d07 Cortex-A57, d08 Cortex-A72, d09 Cortex-A73,"
    " d0a Cortex-A75, d0b Cortex-A76, d0c Neoverse N1, d0d Cortex-A77, d40 Neoverse V1, d41 Cortex-A78, d44 Cortex-X1,"
    " d46 Cortex-A510, d47 Cortex-A710, d48 Cortex-X2, d49 Neoverse N2, d4b Cortex-A78C, d4c Cortex-X1C,"
    " d4d Cortex-A715, d4e Cortex-X3, d4f Neoverse V2, d80 Cortex-A520, d81 Cortex-A720, d82 Cortex-X4,"
    " d84 Neoverse V3, d85 Cortex-X925, d87 Cortex-A725, d8e Neoverse N3",
    "Fujitsu": "001 Fujitsu A64FX",
    "HiSilicon": "d01 HiSilicon TaiShan v110",
    "NVIDIA": "004 NVIDIA Carmel",
    "Qualcomm": "001 Qualcomm Oryon, 802 Qualcomm Kryo 385 Gold, 803 Qualcomm Kryo 385 Silver,"
    " 804 Qualcomm Kryo 485 Gold, 805 Qualcomm Kryo 485 Silver",
    "Apple": "022 Apple M1, 023 Apple M1, 024 Apple M1 Pro, 025 Apple M1 Pro, 028 Apple M1 Max, 029 Apple M1 Max,"
    " 032 Apple M2, 033 Apple M2, 034 Apple M2 Pro, 035 Apple M2 Pro, 038 Apple M2 Max, 039 Apple M2 Max",
    "Microsoft": "d49 Microsoft Azure Cobalt 100",
    "Ampere": "ac3 Ampere-1, ac4 Ampere-1A",
}
"""Numbers of each maker's designs, in hexadecimal digits, and their names, from their manuals."""

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
    lines = text_of(root / "proc/cpuinfo").splitlines()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    cores = set(_designs(lines)) or set(_designs_in_sys(root))
    if not cores:
        return ""
    # A later design has a larger number: the large cores come first.
    names = dict.fromkeys(_design_name(*core) for core in sorted(cores, reverse=True))
    board = text_of(root / "proc/device-tree/model").strip("\0 \n")
    return f"{' and '.join(names)} ({board})" if board else " and ".join(names)


def _design_name(maker: int, design: int) -> str:
    made_by = _MAKERS.get(maker, f"maker {maker:#04x}")
    known = [word.strip().partition(" ") for word in _DESIGNS.get(made_by, "").split(",")]
    return {number: name for number, _, name in known}.get(f"{design:03x}") or f"{made_by} CPU {design:#05x}"


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
        text = text_of(path)
        if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", text):
            word = int(text, 16)
            yield word >> 24 & 0xFF, word >> 4 & 0xFFF
