"""Compiled CUDA kernels on disk: PTX, compiled by numba-cuda once per machine; the driver makes machine code of it.

It lies beside the CPU's kernels under the rules of `kernels/jit/object_cache.py`: a private folder, named after all
that the PTX depends on, and a checksum in every file. A start that finds all it needs imports no Numba.
"""

import functools
import gc
import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from localinfer.errors import BackendUnavailableError
from localinfer.kernels.jit import object_cache
from localinfer.kernels.jit.compile_ahead import can_start_children, run_children
from localinfer.kernels.jit.object_cache import note_use
from localinfer.kernels.versions import combined, installed_version, source_digests
from localinfer.types import ProgressCallback

SHARED_SOURCES = (
    "kernels/ops/attention.py",
    "kernels/ops/elementwise.py",
    "kernels/kv_layout.py",
    "kernels/layouts.py",
    "kernels/cpu/kernel_abi.py",
)
"""Other modules of this package that CUDA kernels read."""

STAGE = "compiling CUDA kernels (once per machine)"
_MAX_CHILDREN = 8
MIN_SHARE = 4
"""Kernels that are worth a process: importing the compilers takes as long as compiling some."""

KernelKey = tuple[str, tuple[int, ...]]
"""A kernel: "module.function" of `kernels.cuda.compiled`, and the constants it is made for."""


def entry_name(key: KernelKey) -> str:
    """The name of a kernel in its PTX, which profilers and sanitizers show: its function and constants."""
    name, constants = key
    return "_".join([name.partition(".")[2], *(str(int(constant)) for constant in constants)])


OLDEST_VERSIONS = {"numba-cuda": (0, 30, 4), "torch": (2, 6)}
"""Older ones of numba-cuda fail at import beside Numba 0.67; as in pyproject.toml."""


NEWER_VERSIONS = {"numpy": (2, 5)}
"""From these on numba-cuda 0.30.4 fails as it compiles (`numpy.row_stack` is gone); as in pyproject.toml."""


def require_numba_cuda() -> None:
    """Raise BackendUnavailableError where the extra `cuda` is not installed, or in versions that fail."""
    for package, limit in (OLDEST_VERSIONS | NEWER_VERSIONS).items():
        try:
            version = metadata.version(package)
            found = f"and {version} is installed"
        except metadata.PackageNotFoundError:
            version, found = "0", "which is not installed"
        is_newer = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[: len(limit)]) >= limit
        if is_newer != (package in OLDEST_VERSIONS):
            wanted = f"before {_dotted(limit)}" if is_newer else f"{_dotted(limit)} or newer"
            raise BackendUnavailableError(
                f"device 'cuda' needs {package} {wanted}, {found}; install 'localinfer[cuda]', or take device 'cpu'"
            )


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


@functools.cache
def cache_folder() -> Path | None:
    """Folder of kernels, or None where the sources are unknown or no folder is private."""
    beside = object_cache.cache_folder()
    if beside is None:
        return None
    digests = source_digests("kernels")
    if digests is None:
        return None
    own = {name: digest for name, digest in digests.items() if name.startswith(("kernels/cuda/", *SHARED_SOURCES))}
    packages = ("numba", "numba-cuda", "llvmlite")
    versions = "-".join([installed_version("localinfer"), *(f"{name}{installed_version(name)}" for name in packages)])
    name = f"cuda-py{sys.version_info.major}{sys.version_info.minor}-{versions}-{combined(own)}"
    folder = object_cache.private_folder(beside.parent / name)
    if folder is not None:
        note_use(folder)
    return folder


def _path(key: KernelKey, capability: tuple[int, int]) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    name, constants = key
    parts = [name, *(str(int(constant)) for constant in constants), f"sm_{capability[0]}{capability[1]}"]
    return folder / (re.sub(r"[^a-z0-9_.-]", "_", "-".join(parts)) + ".ptx")


def _is_stored(key: KernelKey, capability: tuple[int, int]) -> bool:
    path = _path(key, capability)
    return path is not None and path.exists()


def kernel_ptx(key: KernelKey, capability: tuple[int, int]) -> bytes:
    """PTX of a kernel, whose entry is called `entry_name(key)`; compiled if no earlier start has."""
    name, constants = key
    path = _path(key, capability)
    if path is not None:
        code = object_cache.stored(path)
        if code is not None:
            return code
    from localinfer.kernels.cuda.jit import compile_ptx

    code = compile_ptx(name, constants, capability).encode()
    if path is not None:
        object_cache.store(path, code)
    return code


def compile_share(share: tuple[Sequence[tuple[str, Sequence[int]]], Sequence[int]]) -> None:
    """Compile kernels for a compute capability, both as lists of JSON: the task of a child process."""
    gc.disable()
    keys, (major, minor) = share
    for name, constants in keys:
        kernel_ptx((name, tuple(constants)), (major, minor))


def compile_all(keys: Sequence[KernelKey], capability: tuple[int, int], progress: ProgressCallback | None) -> None:
    """Have all of these on disk, compiled by child processes where that is sooner, and say how far it is."""
    missing = [key for key in dict.fromkeys(keys) if not _is_stored(key, capability)]

    def report() -> bool:
        if progress is not None:
            progress(STAGE, sum(_is_stored(key, capability) for key in missing), len(missing))
        return True

    count = min(os.cpu_count() or 1, _MAX_CHILDREN, len(missing) // MIN_SHARE)
    if count > 1 and cache_folder() is not None and can_start_children():
        # Neighbours are alike in size, so dealing them out in turns balances the work.
        run_children("cuda", [(missing[first::count], capability) for first in range(count)], report)
    for index, key in enumerate(missing):
        if progress is not None:
            progress(STAGE, index, len(missing))
        kernel_ptx(key, capability)
    if progress is not None and missing:
        progress(STAGE, len(missing), len(missing))
