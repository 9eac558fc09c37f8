"""Compiled CUDA kernels on disk: PTX, compiled by numba-cuda once per machine; the driver makes machine code of it.

It lies beside the CPU's kernels, under the same rules (see `kernels/object_cache.py`): a folder that is ours alone, its
name everything the PTX depends on, and a checksum in every file. A start that finds all it needs imports no Numba.
"""

import functools
import hashlib
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from localinfer.errors import BackendUnavailableError
from localinfer.kernels import object_cache
from localinfer.kernels.compile_ahead import ProgressCallback

_SHARED_SOURCES = ("ops.py", "cpu/layouts.py", "cpu/protocol.py")
"""What CUDA kernels read of the rest of this floor."""

KernelKey = tuple[str, tuple[int, ...]]
"""A kernel: "module.function" of `kernels.cuda.compiled`, and the constants it is made for."""


def require_numba_cuda() -> None:
    """Raise BackendUnavailableError where the extra `cuda` is not installed."""
    for package in ("numba-cuda", "torch"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            raise BackendUnavailableError(
                f"device 'cuda' needs {package}, which is not installed; install 'localinfer[cuda]', or take device "
                "'cpu'"
            ) from None


@functools.cache
def _folder() -> Path | None:
    if object_cache.CACHE_FOLDER is None:
        return None
    digest = hashlib.sha256()
    kernels = Path(__file__).parent.parent
    for path in [*sorted((kernels / "cuda").rglob("*.py")), *(kernels / name for name in _SHARED_SOURCES)]:
        digest.update(path.relative_to(kernels).as_posix().encode() + path.read_bytes())
    versions = "-".join(f"{name}{metadata.version(name)}" for name in ("numba", "numba-cuda", "llvmlite"))
    name = f"cuda-py{sys.version_info.major}{sys.version_info.minor}-{versions}-{digest.hexdigest()[:16]}"
    return object_cache.private_folder(object_cache.CACHE_FOLDER.parent / name)


def kernel_ptx(key: KernelKey, capability: tuple[int, int]) -> bytes:
    """PTX of a kernel, whose entry is called `kernel`; compiled if no earlier start has."""
    name, constants = key
    folder = _folder()
    path = None
    if folder is not None:
        words = [name, *map(str, constants), f"sm_{capability[0]}{capability[1]}"]
        path = folder / (re.sub(r"[^a-z0-9_.-]", "_", "-".join(words)) + ".ptx")
        code = object_cache.stored(path)
        if code is not None:
            return code
    from localinfer.kernels.cuda.jit import compile_ptx

    code = compile_ptx(name, constants, capability).encode()
    if path is not None:
        object_cache.store(path, code)
    return code


def compile_all(keys: Sequence[KernelKey], capability: tuple[int, int], progress: ProgressCallback | None) -> None:
    """Have all of these on disk, and say how far it is."""
    for index, key in enumerate(keys):
        if progress is not None:
            progress("compiling CUDA kernels", index, len(keys))
        kernel_ptx(key, capability)
    if progress is not None:
        progress("compiling CUDA kernels", len(keys), len(keys))
