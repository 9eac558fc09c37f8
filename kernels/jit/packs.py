"""Packs: files of kernels that were compiled elsewhere, for a level of CPUs, so that a first start compiles nothing.

A pack is code, so it is taken from two places only: the installed package, whose build wrote the digest of each of its
packs into `built_sources`, and the folder or file that the user names in LOCALINFER_KERNEL_PACKS. It is used where it
was made of the same version and sources, for this kind of system, for the selected instruction set, and for features
that this CPU has; a kernel's digest is checked when it is linked. Whatever does not fit is compiled as without packs.

No kernel depends on the sizes of a model, so a pack has every kernel of every model. A file is the SHA-256 of its
index, the index's number of bytes (8, little-endian), the index as JSON, and the object files one after another.
"""

import ctypes
import functools
import hashlib
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from llvmlite import binding as llvm

from localinfer.errors import BackendUnavailableError
from localinfer.kernels.jit import host, isa
from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.versions import combined, cpu_kernels, installed_version, source_digests
from localinfer.system.files import OutputFile, open_regular
from localinfer.types import ProgressCallback, Record

VARIABLE = "LOCALINFER_KERNEL_PACKS"
"""Environment variable with a folder of packs, or one pack, which is asked before those of the installed package."""

SUFFIX = ".pack"

_INSTALLED = Path(__file__).parents[1] / "packs"
_HEAD_BYTES = 40
_MAX_INDEX_BYTES = 4 << 20

logger = logging.getLogger(__name__)


class Level(NamedTuple):
    """A kind of CPUs that share kernels."""

    path: ISA
    cpu: str
    """LLVM's name of the CPU that instructions are ordered for."""
    features: frozenset[str]
    """Features that its kernels may use, by LLVM's names."""


_V3 = frozenset(
    "64bit cmov cx8 fxsr mmx sse sse2 cx16 sahf popcnt sse3 ssse3 sse4.1 sse4.2 crc32 avx avx2 bmi bmi2 f16c fma lzcnt "
    "movbe xsave".split()
)
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
"""Levels 3 and 4 of the x86-64 psABI."""
_VBMI = {"avx512vbmi", "avx512vbmi2", "avx512bitalg", "avx512ifma", "avx512vpopcntdq"}
_DOTPROD = frozenset({"fp-armv8", "neon", "lse", "dotprod"})

LEVELS: Mapping[str, Mapping[str, Level]] = {
    "x86_64": {
        "avx2": Level(ISA.AVX2, "x86-64-v3", _V3),
        "avxvnni": Level(ISA.AVX_VNNI, "x86-64-v3", _V3 | {"avxvnni"}),
        "avx512vnni": Level(ISA.AVX512_VNNI, "x86-64-v4", _V4 | {"avx512vnni"}),
        "avx512vbmi": Level(ISA.AVX512_VNNI, "x86-64-v4", _V4 | _VBMI | {"avx512vnni"}),
    },
    "aarch64": {
        "dotprod": Level(ISA.NEON_DOTPROD, "generic", _DOTPROD),
        "i8mm": Level(ISA.NEON_I8MM, "generic", _DOTPROD | {"i8mm"}),
    },
}
"""By architecture and name; the later of two that fit is the faster."""


class Pack(Record):
    """An open pack whose index is intact."""

    path: Path
    digest: str
    """SHA-256 of its index, which has those of its kernels."""
    index: Mapping[str, Any]
    start: int
    """Byte at which its object files begin."""

    def has(self, name: str) -> bool:
        """True if it lists a kernel."""
        return name in self.index["kernels"]

    def code(self, name: str) -> bytes | None:
        """A kernel's object file; None, after a warning, if the pack is damaged there."""
        offset, num_bytes, digest = self.index["kernels"][name]
        try:
            with open_regular(self.path) as file:
                file.seek(self.start + offset)
                code = file.read(num_bytes)
        except OSError:
            code = b""
        if hashlib.sha256(code).hexdigest() == digest:
            return code
        logger.warning("%s is damaged at %s, which is compiled instead; install localinfer again", self.path, name)
        return None


def architecture() -> str:
    """The architecture of this process, by the name that LEVELS has."""
    return "aarch64" if host.is_arm64() else str(llvm.get_process_triple()).partition("-")[0]


def _origin() -> dict[str, str] | None:
    """Origin that a pack for this process has, besides its level; None if the sources are unknown."""
    digests = source_digests("kernels")
    if digests is None:
        return None
    return {
        "version": installed_version("localinfer"),
        "sources": combined(cpu_kernels(digests)),
        "system": f"{architecture()}-{sys.platform}",
    }


def read(path: Path, *, is_named: bool = False) -> Pack:
    """Open a pack. is_named: by the user, so that no other user may have written it.

    Raises: ValueError, with what is wrong with it.
    """
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            if is_named and hasattr(os, "getuid") and not _is_own(status):
                raise ValueError("it belongs to another user, or can be written by others")
            head = file.read(_HEAD_BYTES)
            num_bytes = int.from_bytes(head[32:], "little")
            index = file.read(num_bytes) if len(head) == _HEAD_BYTES and num_bytes <= _MAX_INDEX_BYTES else b""
    except OSError as error:
        raise ValueError(error.strerror or str(error)) from error
    if not index or hashlib.sha256(index).digest() != head[:32]:
        raise ValueError("it is damaged")
    return Pack(path, head[:32].hex(), json.loads(index), _HEAD_BYTES + num_bytes)


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def misfit(pack: Pack) -> str | None:
    """The reason for which a pack is not for this process, in words; None if it is."""
    origin, index = _origin(), pack.index
    if origin is None or index.get("origin") != origin:
        return "it was made of another version of localinfer, or for another system"
    if index["path"] != isa.SELECTED.value:
        return f"it is for {index['path']}, and {isa.SELECTED.value} is selected"
    features = host.host_features()
    lacking = sorted(name for name in index["features"] if not features.get(name))
    if lacking:
        return f"this CPU lacks {', '.join(lacking)}"
    unknown = [name for name in index["symbols"] if not _is_known(name)]
    return f"this process has no {', '.join(unknown)}" if unknown else None


def _is_known(symbol: str) -> bool:
    """True if the linker will find a symbol of the process: it aborts the process where it does not."""
    return symbol == "SwitchToThread" if sys.platform == "win32" else hasattr(ctypes.CDLL(None), symbol)


@functools.cache
def chosen_pack() -> Pack | None:
    """The pack that kernels come from, found once; None where all are compiled."""
    if any(host.settings_in_code()):
        return None
    named = os.environ.get(VARIABLE)
    if named:
        found, reasons = _best(_packs_in(Path(named)), is_named=True)
        if found is not None:
            return found
        logger.warning("no pack of %s is used: %s", named, "; ".join(reasons) or "there is none")
    from localinfer.kernels.built_sources import PACKS

    return _best([_INSTALLED / name for name in PACKS if (_INSTALLED / name).exists()], PACKS)[0]


def _packs_in(named: Path) -> list[Path]:
    return sorted(named.glob(f"*{SUFFIX}")) if named.is_dir() else [named]


def _best(
    paths: Sequence[Path], digests: Mapping[str, str] | None = None, *, is_named: bool = False
) -> tuple[Pack | None, list[str]]:
    """The pack for most features among those that fit, and why others do not. digests: of known ones, by name."""
    fitting, reasons = [], []
    for path in paths:
        try:
            pack = read(path, is_named=is_named)
            reason = misfit(pack)
        except (ValueError, KeyError, TypeError) as error:
            reason = str(error)
        else:
            if digests is not None and pack.digest != digests[path.name]:
                reason = "it is not the one of this build"
            if reason is None:
                fitting.append(pack)
                continue
        reasons.append(f"{path.name}: {reason}")
    return max(fitting, key=lambda pack: len(pack.index["features"]), default=None), reasons


def build(folder: Path, progress: ProgressCallback | None = None) -> Iterator[tuple[Path, int]]:
    """Compile every kernel for each level of this architecture; yields each pack that was written, and its kernels.

    folder: exists. Levels need not be those of this CPU: nothing is run. Raises: BackendUnavailableError for an
    architecture without levels, settings that change code, unknown sources, or a kernel that cannot be compiled;
    RequestError if a file cannot be written.
    """
    origin, levels = _origin(), LEVELS.get(architecture(), {})
    if any(host.settings_in_code()):
        raise BackendUnavailableError(
            "a variable NUMBA_... or LOCALINFER_GUARD changes what is compiled; unset it to make packs"
        )
    if origin is None or not levels:
        reason = f"{architecture()} has no levels" if origin else "the sources are unknown"
        raise BackendUnavailableError(f"no packs can be made: {reason}; make them in a checkout, on x86-64 or arm64")
    for name, level in levels.items():
        path = folder / f"{origin['system']}-{name}{SUFFIX}"
        with tempfile.TemporaryDirectory(prefix="localinfer-") as scratch:
            codes, symbols = _compiled(name, Path(scratch), progress)
        index = {"origin": origin, "path": level.path.value, "features": sorted(level.features), "symbols": symbols}
        write(path, index, codes)
        yield path, len(codes)


def _compiled(level: str, scratch: Path, progress: ProgressCallback | None) -> tuple[dict[str, bytes], list[str]]:
    """Object files of all kernels, compiled by child processes, and the symbols of others that they use."""
    from localinfer.kernels.jit.compile_ahead import run_children, shares_of
    from localinfer.kernels.jit.numba import all_kernels

    names = all_kernels()
    count = os.cpu_count() or 1
    shares = [[level, str(scratch), *share] for share in shares_of(names, count)]

    def go_on() -> bool:
        if progress is not None:
            progress(f"compiling for {level}", sum(1 for _ in scratch.glob("*.json")), len(names))
        return True

    run_children("packs", shares, go_on)
    missing = [name for name in names if not (scratch / f"{name}.json").exists()]
    if missing:
        raise BackendUnavailableError(
            f"{missing[0]} and {len(missing) - 1} more cannot be compiled for {level}; on such a CPU LOCALINFER_ISA="
            f"{LEVELS[architecture()][level].path.value} shows why"
        )
    symbols = {symbol for name in names for symbol in json.loads((scratch / f"{name}.json").read_bytes())}
    return {name: (scratch / f"{name}.o").read_bytes() for name in names}, sorted(symbols)


def compile_share(share: Sequence[str]) -> None:
    """Compile kernels for a level, whatever this CPU is, to files: the task of a child process.

    share: the level's name, the folder, and the kernels' names.
    """
    name, folder, *names = share
    level = LEVELS[architecture()][name]
    features = {known: False for known in host.host_features()} | dict.fromkeys(level.features, True)
    os.environ["NUMBA_CPU_NAME"] = level.cpu
    # Vectors of 64 bytes are what kernels of this level are written in.
    os.environ["NUMBA_CPU_FEATURES"] = host.feature_flags(features | {"prefer-256-bit": False})
    isa.SELECTED = level.path
    from localinfer.kernels.jit.numba import compile_with_symbols

    for kernel in names:
        target = Path(folder, f"{kernel}.json")
        if not target.exists():
            code, symbols = compile_with_symbols(kernel)
            Path(folder, f"{kernel}.o").write_bytes(code)
            target.write_text(json.dumps(symbols), encoding="utf-8")


def write(path: Path, index: Mapping[str, Any], codes: Mapping[str, bytes]) -> None:
    """Write a pack; index: without its kernels. Raises: RequestError."""
    kernels, offset = {}, 0
    for name, code in codes.items():
        kernels[name] = (offset, len(code), hashlib.sha256(code).hexdigest())
        offset += len(code)
    text = json.dumps({**index, "kernels": kernels}).encode()
    with OutputFile(path) as file:
        file.write(hashlib.sha256(text).digest() + len(text).to_bytes(8, "little") + text)
        for code in codes.values():
            file.write(code)
