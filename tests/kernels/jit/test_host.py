"""What systems say of arm64 CPUs, and the kernels that are selected by it; the names of CPUs."""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from llvmlite import binding as llvm

from localinfer.apps.doctor.checks import faster_instructions
from localinfer.errors import BackendUnavailableError
from localinfer.kernels.jit import host, isa, object_cache
from localinfer.kernels.jit.host import cpu_name
from localinfer.kernels.jit.isa import ISA

# As /proc/cpuinfo calls the bits of AT_HWCAP, from the lowest.
HWCAP = (
    "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 "
    "sm4 asimddp sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs sb paca pacg"
).split()
HWCAP2 = (
    "dcpodp sve2 sveaes svepmull svebitperm svesha3 svesm4 flagm2 frint svei8mm svef32mm svef64mm svebf16 i8mm bf16 "
    "dgh rng bti mte"
).split()

V8 = "fp asimd evtstrm crc32 cpuid"
V8_2 = f"{V8} aes pmull sha1 sha2 atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp"
V8_4 = f"{V8_2} jscvt fcma sha3 sha512 asimdfhm dit uscat ilrcpc flagm ssbs dcpodp flagm2 frint"
CPUS = {
    # Name of the machine: what Linux says of it, and whether its kernels are NEON's, and i8mm known.
    "Raspberry Pi 4, Graviton 1 (Cortex-A72)": (V8, False, False),
    "A64FX": (f"{V8} atomics fphp asimdhp asimdrdm fcma dcpop sve", False, False),
    "Raspberry Pi 5 (Cortex-A76)": (V8_2, True, False),
    "Graviton 2, Ampere Altra (Neoverse N1)": (f"{V8_2} ssbs", True, False),
    "Apple M1 (Asahi)": (f"{V8_4} sb paca pacg", True, False),
    "Apple M2 (Asahi)": (f"{V8_4} sb paca pacg i8mm bf16", True, True),
    "Graviton 3 (Neoverse V1)": (f"{V8_4} sve svei8mm svebf16 i8mm bf16 rng", True, True),
    "Graviton 4 (Neoverse V2)": (f"{V8_4} sve sve2 svei8mm svebf16 i8mm bf16 rng", True, True),
    "Snapdragon X (Oryon)": (f"{V8_4} i8mm bf16 rng bti", True, True),
}
_BOTH = ("products of matrices (i8mm)", "dot products (ARMv8.2)")
MACS = {
    "Apple M1": ({"FEAT_DotProd": 1, "FEAT_I8MM": 0, "FEAT_BF16": 0, "FEAT_FP16": 1}, False),
    "Apple M2": ({"FEAT_DotProd": 1, "FEAT_I8MM": 1, "FEAT_BF16": 1, "FEAT_FP16": 1}, True),
    "Apple M4": ({"FEAT_DotProd": 1, "FEAT_I8MM": 1, "FEAT_BF16": 1, "FEAT_FP16": 1, "FEAT_SME2": 1}, True),
}


def words(flags: str) -> tuple[int, int]:
    """The two words of some flags."""
    names = flags.split()
    assert set(names) <= {*HWCAP, *HWCAP2}
    first, second = (sum(1 << bit for bit, name in enumerate(order) if name in names) for order in (HWCAP, HWCAP2))
    return first, second


def best_path(features: host.Features) -> ISA:
    """The path that a CPU of these features gets."""
    return next(path for path in ISA if isa.runs_on(path, [name for name, has in features.items() if has]))


@pytest.fixture
def arm64(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An arm64 machine, of which LLVM knows as much as it does on Linux: no dot products."""
    monkeypatch.setattr(llvm, "get_process_triple", lambda: "aarch64-unknown-linux-gnu")
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "some-cpu")
    monkeypatch.setattr(llvm, "get_host_cpu_features", lambda: {"neon": True, "crc": True, "sve": False})
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"):
        monkeypatch.delenv(name, raising=False)
    host.host_features.cache_clear()
    return monkeypatch


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Let no other test see the features of a stand-in."""
    yield
    host.host_features.cache_clear()


def library(**functions: Any) -> Any:
    """A stand-in for `ctypes.CDLL` whose libraries have these functions."""
    return lambda name: SimpleNamespace(**functions)


def linux(flags: str) -> Any:
    """Linux's C library on a CPU of these flags."""
    found = dict(zip((16, 26), words(flags), strict=True))

    def getauxval(kind: int) -> int:
        return found.get(kind, 0)

    return library(getauxval=getauxval)


@pytest.mark.parametrize("cpu", CPUS)
def test_a_cpu_of_linux_gets_the_kernels_that_it_can_run(cpu: str, arm64: pytest.MonkeyPatch) -> None:
    flags, has_dot_products, has_i8mm = CPUS[cpu]
    arm64.setattr(ctypes, "CDLL", linux(flags))
    features = host.host_features()
    assert features["dotprod"] is has_dot_products and features["i8mm"] is has_i8mm
    wanted = ISA.NEON_I8MM if has_i8mm else ISA.NEON_DOTPROD if has_dot_products else ISA.GENERIC
    assert best_path(features) is isa.available()[0] is wanted
    assert features["crc"] is True and features["sve"] is False, "what LLVM says itself"
    # Numba's code and LLVM's are for the same features.
    assert ("+dotprod" if has_dot_products else "-dotprod") in host.target_features().split(",")
    assert faster_instructions(isa.available()[0].value, "aarch64", features) == (
        [] if has_i8mm else ["products of matrices (i8mm)"] if has_dot_products else [*_BOTH]
    )


@pytest.mark.parametrize("cpu", MACS)
def test_a_mac_gets_the_kernels_that_it_can_run(cpu: str, arm64: pytest.MonkeyPatch) -> None:
    known, has_i8mm = MACS[cpu]

    def sysctlbyname(name: bytes, out: Any, size: Any, new: None, new_size: Any) -> int:
        place, _, feature = name.decode().rpartition(".")
        if place != "hw.optional.arm" or feature not in known:
            return -1
        out.raw = known[feature].to_bytes(4, sys.byteorder) + bytes(252)
        size._obj.value = 4
        return 0

    arm64.setattr(llvm, "get_host_cpu_features", dict)
    arm64.setattr(ctypes, "CDLL", library(sysctlbyname=sysctlbyname))
    arm64.setattr(sys, "platform", "darwin")
    features = host.host_features()
    assert features["neon"] and features["dotprod"] and features["i8mm"] is has_i8mm
    assert "rdm" not in features, "a version that does not know a name says nothing of it"
    assert isa.available() == [*[ISA.NEON_I8MM] * has_i8mm, ISA.NEON_DOTPROD, ISA.GENERIC]


@pytest.mark.parametrize(
    ("present", "wanted"),
    [
        ({19, 34}, [ISA.GENERIC]),
        ({19, 34, 43}, [ISA.NEON_DOTPROD, ISA.GENERIC]),
        ({19, 34, 43, 66, 67, 68}, [ISA.NEON_I8MM, ISA.NEON_DOTPROD, ISA.GENERIC]),
    ],
    ids=["Snapdragon 835", "Snapdragon 8cx", "Snapdragon X Elite"],
)
def test_a_cpu_of_windows_gets_the_kernels_that_it_can_run(
    present: set[int], wanted: list[ISA], arm64: pytest.MonkeyPatch
) -> None:
    kernel32 = SimpleNamespace(IsProcessorFeaturePresent=lambda number: int(number in present))
    arm64.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    arm64.setattr(sys, "platform", "win32")
    assert isa.available() == wanted
    assert host.host_features()["i8mm"] is (66 in present)


@pytest.mark.parametrize("absent", ["the function", "the library", "the word"])
def test_a_system_that_says_nothing_leaves_what_llvm_knows(absent: str, arm64: pytest.MonkeyPatch) -> None:
    def missing(name: object) -> Any:
        raise OSError("no library")

    found = {"the function": library(), "the library": missing, "the word": linux("")}
    arm64.setattr(ctypes, "CDLL", found[absent])
    assert host.host_features() == {"neon": True, "crc": True, "sve": False}
    assert isa.available() == [ISA.GENERIC]
    # Nobody has said that the CPU lacks them.
    assert faster_instructions("generic", "aarch64", host.host_features()) == []


def test_what_the_kernel_masks_is_not_used_though_llvm_names_it(arm64: pytest.MonkeyPatch) -> None:
    arm64.setattr(llvm, "get_host_cpu_features", lambda: {"neon": True, "dotprod": True})
    arm64.setattr(ctypes, "CDLL", linux(V8))
    assert isa.available() == [ISA.GENERIC]
    with pytest.raises(BackendUnavailableError, match="'neon'.*runs generic"):
        isa.select("neon")


def test_the_key_of_compiled_kernels_follows_what_the_system_says(arm64: pytest.MonkeyPatch) -> None:
    keys = set()
    for cpu in ("Raspberry Pi 5 (Cortex-A76)", "Snapdragon X (Oryon)"):
        arm64.setattr(ctypes, "CDLL", linux(CPUS[cpu][0]))
        host.host_features.cache_clear()
        keys.add(object_cache.cache_key())
    assert len(keys) == 2


def test_on_x86_features_are_those_of_llvm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_process_triple", lambda: "x86_64-unknown-linux-gnu")
    for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX"):
        monkeypatch.delenv(name, raising=False)
    host.host_features.cache_clear()
    assert host.target_features() == llvm.get_host_cpu_features().flatten()
    assert host.target_cpu() == llvm.get_host_cpu_name()


def test_numbas_variables_are_for_its_code_and_for_llvms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CPU_NAME", "nehalem")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "")
    assert (host.target_cpu(), host.target_features()) == ("nehalem", "")
    monkeypatch.delenv("NUMBA_CPU_FEATURES")
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    assert host.target_features() == ""
    monkeypatch.delenv("NUMBA_CPU_NAME")
    monkeypatch.setenv("NUMBA_ENABLE_AVX", "0")
    assert "+avx" not in host.target_features()


def core(maker: int, design: int) -> str:
    """What /proc/cpuinfo says of a core."""
    return f"processor\t: 0\nBogoMIPS\t: 108.00\nCPU implementer\t: {maker:#04x}\nCPU part\t: {design:#05x}\n\n"


@pytest.mark.parametrize(
    ("cores", "board", "wanted"),
    [
        ([(0x41, 0xD0C)] * 4, "", "Neoverse N1"),
        ([(0x41, 0xD0B)] * 4, "Raspberry Pi 5 Model B Rev 1.0\0", "Cortex-A76 (Raspberry Pi 5 Model B Rev 1.0)"),
        ([(0x41, 0xD05)] * 4 + [(0x41, 0xD0B)] * 4, "", "Cortex-A76 and Cortex-A55"),
        ([(0x61, 0x032)] * 4 + [(0x61, 0x033)] * 4, "", "Apple M2"),
        ([(0x61, 0x000)], "", "Apple CPU 0x000"),
        ([(0x12, 0x345)], "", "maker 0x12 CPU 0x345"),
        ([(0x51, 0x001)], "", "Qualcomm Oryon"),
        ([(0x41, 0xD4F)], "", "Neoverse V2"),
    ],
)
def test_cores_have_the_names_that_people_know(
    cores: list[tuple[int, int]], board: str, wanted: str, tmp_path: Path
) -> None:
    (tmp_path / "proc" / "device-tree").mkdir(parents=True)
    (tmp_path / "proc" / "cpuinfo").write_text("".join(core(*numbers) for numbers in cores))
    (tmp_path / "proc" / "device-tree" / "model").write_text(board)
    assert cpu_name(tmp_path) == wanted
    # Where /proc is masked, /sys has each core's register.
    (tmp_path / "proc" / "cpuinfo").unlink()
    for index, (maker, design) in enumerate(cores):
        folder = tmp_path / "sys/devices/system/cpu" / f"cpu{index}" / "regs/identification"
        folder.mkdir(parents=True)
        (folder / "midr_el1").write_text(f"{maker << 24 | 0xF << 16 | design << 4 | 1:#018x}\n")
    assert cpu_name(tmp_path) == wanted


def test_a_cpu_has_the_text_of_x86_or_of_macos_or_llvms_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llvm, "get_host_cpu_name", lambda: "znver5")
    assert cpu_name(tmp_path) == "znver5"
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text("processor\t: 0\nmodel name\t: AMD EPYC 9B45\ncpu MHz\t: 1\n")
    assert cpu_name(tmp_path) == "AMD EPYC 9B45"

    def sysctlbyname(name: bytes, out: Any, size: Any, new: None, new_size: Any) -> int:
        assert name == b"machdep.cpu.brand_string"
        out.raw = b"Apple M4 Max\0" + bytes(243)
        size._obj.value = 13
        return 0

    monkeypatch.setattr(ctypes, "CDLL", library(sysctlbyname=sysctlbyname))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cpu_name(tmp_path) == "Apple M4 Max"
