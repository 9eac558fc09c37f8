"""Compiled kernels as object files, of a pack or in a private folder: compiled by Numba once, linked by LLVM at start.

A warm start does not import Numba, which would take more time and memory than the rest of it. The folder's name is a
key of everything that compiled kernels depend on: versions of localinfer, Python and Numba, CPU and features,
instruction set, Numba's settings, and a hash of every kernel source. A file with a wrong checksum is compiled again.
The files are code, so the folder must be private. Folders of keys that are unused for long are removed.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import shutil
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llvmlite import binding as llvm

from localinfer.kernels import address_space
from localinfer.kernels.jit import host, isa, packs
from localinfer.kernels.versions import (
    UNKNOWN_SOURCES,
    UNKNOWN_SOURCES_WAY_OUT,
    combined,
    cpu_kernels,
    installed_version,
    source_digests,
)
from localinfer.system.files import read_bounded, write_all, write_atomically
from localinfer.system.folders import chosen_cache_folder, make_private, temporary_folder, user_folder

_CTYPES: dict[str, Any] = {"q": ctypes.c_int64, "d": ctypes.c_double}
"""Argument kinds of a `Function`: q is int64 or an address, d float64."""

_MAX_OBJECT_BYTES = 64 << 20
_COMPILER_BYTES = 64_000_000
_LINKER_BYTES = 4_000_000
"""LLVM aborts the process when memory runs out, so these are required first."""

_lock = threading.RLock()


def source_hash() -> str | None:
    """Hash of every source file of CPU kernels, which inline functions of other files; None if unknown.

    See `source_digests`.
    """
    digests = source_digests("kernels")
    if digests is None:
        return None
    return combined(cpu_kernels(digests))


def cache_key() -> str | None:
    """The folder name for everything that compiled kernels depend on; None if the sources are unknown."""
    sources = source_hash()
    if sources is None:
        return None
    target = f"{llvm.get_host_cpu_name()} {sorted(host.host_features().items())} {llvm.get_process_triple()}"
    machine = hashlib.sha256(f"{target} {host.settings_in_code()}".encode()).hexdigest()[:12]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    versions = f"{python}-numba{installed_version('numba')}-llvmlite{installed_version('llvmlite')}"
    return f"{installed_version('localinfer')}-{versions}-{isa.SELECTED.value}-{machine}-{sources}"


def private_folder(folder: Path) -> Path | None:
    """Make the folder private and check that no other user can have written to it; else None."""
    with contextlib.suppress(OSError):
        if make_private(folder) is None:
            with tempfile.TemporaryFile(dir=folder):
                return folder
    return None


def cache_folder() -> Path | None:
    """Folder of compiled kernels, or None, after one warning, if there can be none; found once, when first asked."""
    with _lock:
        return _cache_folder(chosen_cache_folder())


@functools.cache
def _cache_folder(chosen: Path | None) -> Path | None:
    """The folder while the application has chosen this one for all caches, or none."""
    key = cache_key()
    if key is None:
        _warn(f"kernels are compiled at every start: {UNKNOWN_SOURCES}; {UNKNOWN_SOURCES_WAY_OUT}")
        return None
    cache = user_folder("cache")
    wanted = None if cache is None else cache / "kernels"
    found = None if wanted is None else _inside(wanted, key)
    if found is not None:
        note_use(found)
        return found
    if wanted is None:
        problem, way_out = "this user has no home folder", "set LOCALINFER_CACHE to a folder of yours"
    else:
        problem = f"{wanted} is not a folder that only this user can write"
        way_out = "remove it, or set its owner and mode 0700, or set LOCALINFER_CACHE to a folder of yours"
    temporary = temporary_folder()
    instead = None
    if temporary is not None and private_folder(temporary) is not None:
        instead = _inside(temporary / "kernels", key)
    result = "kernels are compiled at every start" if instead is None else f"compiled kernels are kept in {temporary}"
    # One notice for all: other files of a user have no folder either.
    others = " and nothing else is cached" if wanted is None else ""
    _warn(f"{problem}, so {result}{others}; {way_out}")
    return instead


def _inside(parent: Path, key: str) -> Path | None:
    """The folder of a key, if it and its parent are private."""
    return None if private_folder(parent) is None else private_folder(parent / key)


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


class Kernel:
    """A compiled function by its name, "module.function" of `kernels.cpu.compiled`; equal by name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kernel) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"Kernel({self.name!r})"

    @functools.cached_property
    def address(self) -> int:
        """Address of its machine code; compiled if it is not cached."""
        return _address(self.name)

    @property
    def is_cached(self) -> bool:
        """True once it is compiled."""
        if self.name in _addresses or _packed(self.name) is not None:
            return True
        return (path := _path(self.name)) is not None and path.exists()


class Function(Kernel):
    """A compiled function that Python calls without the GIL; kinds of result and arguments as in `_CTYPES`."""

    def __init__(self, name: str, result: str, arguments: str) -> None:
        super().__init__(name)
        self.result, self.arguments = result, arguments
        self._prototype = ctypes.CFUNCTYPE(_CTYPES[result], *[_CTYPES[kind] for kind in arguments])

    @functools.cached_property
    def call(self) -> Any:
        """The ctypes function, for callers that avoid one Python call."""
        return self._prototype(self.address)

    def __call__(self, *arguments: float) -> Any:
        return self.call(*arguments)


_addresses: dict[str, int] = {}
when_linked: list[Callable[[str, int, bytes], None]] = []
"""Called with name, address and object file of each kernel that is linked from now on."""


def _address(name: str) -> int:
    with _lock:
        if name not in _addresses:
            code = _code(name)
            address_space.require(_LINKER_BYTES + 4 * len(code), "linking compiled kernels")
            engine = _engine()
            engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            engine.finalize_object()
            _addresses[name] = int(engine.get_function_address(symbol(name)))
            for tell in when_linked:
                tell(name, _addresses[name], code)
        return _addresses[name]


_damaged: set[str] = set()
"""Kernels at which the pack was found to be damaged."""


def _packed(name: str) -> packs.Pack | None:
    """The pack that a kernel comes from, if it does."""
    pack = packs.chosen_pack()
    return pack if pack is not None and name not in _damaged and pack.has(name) else None


def _found(name: str) -> bytes | None:
    """A kernel's object file from the pack or else from the cache."""
    pack = _packed(name)
    if pack is not None:
        code = pack.code(name)
        if code is not None:
            return code
        _damaged.add(name)
    path = _path(name)
    return None if path is None else stored(path)


def _code(name: str) -> bytes:
    """A kernel's object file as it is found, or compiled, and cached."""
    code = _found(name)
    if code is None:
        address_space.require(_COMPILER_BYTES, "compiling kernels")
        from localinfer.kernels.jit.numba import compile_kernel

        code = compile_kernel(name)
        path = _path(name)
        if path is not None:
            store(path, code)
    return code


def store_compiled(name: str) -> None:
    """Compile a kernel that is not cached, without loading it into this process."""
    with _lock:
        _code(name)


def linked() -> Iterator[tuple[str, int, bytes]]:
    """Name, address and object file of each kernel that is linked and cached."""
    for name, place in list(_addresses.items()):
        code = _found(name)
        if code is not None:
            yield name, place, code


def symbol(name: str) -> str:
    """Name of a kernel's entry in its object file."""
    return f"localinfer.{name}"


@functools.cache
def _engine() -> Any:
    """LLVM's linker for this process."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    if sys.platform == "win32":
        # Not tested. By this a waiting thread of the pool lets others run; the linker may not look into its library.
        yields = ctypes.WinDLL("kernel32").SwitchToThread
        llvm.add_symbol("SwitchToThread", ctypes.cast(yields, ctypes.c_void_p).value)
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())


def target_machine() -> Any:
    """LLVM's code generator for this CPU, or for that of Numba's variables."""
    return llvm.Target.from_triple(llvm.get_process_triple()).create_target_machine(
        cpu=host.target_cpu(), features=host.target_features(), opt=3, reloc="default", codemodel="jitdefault", jit=True
    )


def _path(name: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / f"{name}.o"


def stored(path: Path) -> bytes | None:
    """The contents that `store` wrote to a file, if it is intact."""
    try:
        content = read_bounded(path, _MAX_OBJECT_BYTES)
    except OSError:
        return None
    checksum, code = content[:32], content[32:]
    return code if hashlib.sha256(code).digest() == checksum else None


def store(path: Path, code: bytes) -> None:
    """Write a file atomically: 32 bytes of SHA-256, then the contents. Errors of the disk are ignored."""
    content = hashlib.sha256(code).digest() + code
    with contextlib.suppress(OSError):
        write_atomically(path, lambda file: write_all(file, content))


KEPT_SECONDS = 90 * 24 * 3600
NOTED_SECONDS = 24 * 3600
"""Seconds between two notes of a folder's use, and looks at others."""

_STAMP = "last-used"
"""A file in each folder, whose time is that of its last use."""


def note_use(folder: Path) -> None:
    """Note that a folder is in use, and remove those beside it that were last used KEPT_SECONDS ago.

    folder: private, in a private folder that holds nothing else. Errors of the disk are ignored.
    """
    now = time.time()
    stamp = folder / _STAMP
    with contextlib.suppress(OSError):
        if stamp.exists() and abs(now - stamp.stat().st_mtime) < NOTED_SECONDS:
            return
        stamp.touch()
        # A clock that was set forward for a moment must not leave a time that is never reached.
        os.utime(stamp, (now, now))
        for other in folder.parent.iterdir():
            if other != folder and other.is_dir() and not other.is_symlink() and _last_use(other) < now - KEPT_SECONDS:
                shutil.rmtree(other, ignore_errors=True)


def _last_use(folder: Path) -> float:
    """Time of the last store in a folder, or note of its use."""
    times = [folder.stat().st_mtime]
    with contextlib.suppress(FileNotFoundError):
        times.append((folder / _STAMP).stat().st_mtime)
    return max(times)
