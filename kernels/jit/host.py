"""Features of this CPU: what LLVM reads of them, and what the system says itself where LLVM does not ask it.

LLVM 22 knows the features of x86-64. Of an arm64 CPU it learns from the words of /proc/cpuinfo, of which it knows few,
and on macOS nothing: neither ever names dot products. The kernel's own words, as `getauxval`, `sysctlbyname` and
`IsProcessorFeaturePresent` return them, are what may be used: those of all cores, less what the kernel masks.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from llvmlite import binding as llvm

Features = Mapping[str, bool]
"""Whether a CPU has each feature, by LLVM's name; one that is not there is unknown."""

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
    """What Linux says of an arm64 CPU; nothing if the first word is 0, which no such CPU has."""
    if not hwcap:
        return {}
    words = [(hwcap, _HWCAP), (hwcap2, _HWCAP2)]
    return {name: bool(word >> bit & 1) for word, bits in words for name, bit in bits.items()}


def features_of_sysctl(ask: Callable[[str], int | None]) -> Features:
    """What macOS says of an arm64 CPU. ask: the number of a name, None for one that this version does not know."""
    answers = {name: ask(f"hw.optional.arm.{known}") for name, known in _SYSCTL.items()}
    return _ALWAYS | {name: bool(answer) for name, answer in answers.items() if answer is not None}


def features_of_windows(is_present: Callable[[int], object]) -> Features:
    """What Windows says of an arm64 CPU. is_present: `IsProcessorFeaturePresent`."""
    return _ALWAYS | {name: bool(is_present(number)) for name, number in _WINDOWS.items()}


def is_arm64() -> bool:
    """True if this process runs code of arm64, which one of x86-64 under emulation does not."""
    return str(llvm.get_process_triple()).startswith(("aarch64", "arm64"))


@functools.cache
def host_features() -> Features:
    """The features of this CPU that are known."""
    return MappingProxyType({**llvm.get_host_cpu_features(), **(_system_features() if is_arm64() else {})})


def _system_features() -> Features:
    """What this system says of its arm64 CPU; nothing where it cannot be asked. Untested on macOS and Windows."""
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


def sysctl_number(name: str) -> int | None:
    """A number by its name in macOS; None if it has none of this name."""
    found = sysctl_bytes(name)
    return None if found is None else int.from_bytes(found, sys.byteorder)


def sysctl_bytes(name: str) -> bytes | None:
    """The bytes of a value by its name in macOS; None if it has none of this name."""
    try:
        ask: Any = ctypes.CDLL(None).sysctlbyname
    except (OSError, AttributeError):
        return None
    buffer, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
    if ask(name.encode(), buffer, ctypes.byref(size), None, ctypes.c_size_t(0)) != 0:
        return None
    return buffer.raw[: size.value]


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
    return ",".join(f"{'+' if features[name] else '-'}{name}" for name in sorted(features))
