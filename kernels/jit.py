"""Compile kernels once per machine: the private cache folder and the one way kernels are jitted.

Numba's own cache misses changes in called files, module constants and decorator options, and writes beside the source.
Here the folder's name carries everything a compiled kernel depends on, so a stale entry cannot be found:
version of localinfer, of Python and Numba, CPU and features, instruction set in use, and a hash of every kernel source.
"""

import functools
import hashlib
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
from llvmlite import binding as llvm
from numba.core import config as numba_config

from localinfer.kernels import isa

_SETTINGS_IN_CODE = (
    *("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "NUMBA_ENABLE_AVX", "NUMBA_OPT", "NUMBA_BOUNDSCHECK"),
    *("NUMBA_LOOP_VECTORIZE", "NUMBA_SLP_VECTORIZE", "NUMBA_DEBUGINFO"),
)
"""Numba's settings that change what a kernel compiles to."""


def source_hash() -> str:
    """Hash of every file of the kernel floor, since a kernel inlines functions of other files."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def cache_key() -> str:
    """What a compiled kernel depends on, as one folder name."""
    host = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} {llvm.get_process_triple()}"
    overrides = [os.environ.get(name) for name in _SETTINGS_IN_CODE]
    machine = hashlib.sha256(f"{host} {overrides}".encode()).hexdigest()[:12]
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-numba{numba.__version__}-{isa.SELECTED.value}-{machine}-{source_hash()}"


def _prepare(folder: Path) -> Path | None:
    """Make the folder private and prove that only we can have written in it, for its files are code; else None."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.lstat()
        if hasattr(os, "getuid"):
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
                return None
            if status.st_mode & 0o077:
                folder.chmod(0o700)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    return folder


def _cache_folder() -> Path | None:
    import platformdirs

    parent = Path(platformdirs.user_cache_dir("localinfer", appauthor=False)) / "kernels"
    # Without a home folder the path is relative, and would lead wherever the process was started.
    if parent.is_absolute() and _prepare(parent) is not None:
        folder = _prepare(parent / cache_key())
        if folder is not None:
            return folder
    warnings.warn(
        f"{parent} is not a folder that this user, and nobody else, can write, so every start compiles the kernels "
        "anew; remove it, or set its owner and mode 0700",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


CACHE_FOLDER = _cache_folder()


def _cached(decorator: Callable[..., Any], *signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Apply a Numba decorator with its cache in our folder; Numba fixes the folder when it decorates."""

    def wrap(function: Callable[..., Any]) -> Any:
        saved = numba_config.CACHE_DIR
        numba_config.CACHE_DIR = str(CACHE_FOLDER or "")
        try:
            return decorator(*signature, cache=CACHE_FOLDER is not None, **options)(function)
        finally:
            numba_config.CACHE_DIR = saved

    return wrap


def jit(function: Callable[..., Any]) -> Any:
    """`numba.njit` without the GIL, bounds checks or Python's division rules, cached in the private folder."""
    return _cached(numba.njit, nogil=True, error_model="numpy", boundscheck=False)(function)


def inline(function: Callable[..., Any]) -> Any:
    """A jitted piece of other kernels, inlined by LLVM; never cached by itself."""
    return numba.njit(nogil=True, error_model="numpy", boundscheck=False)(function)


def compose(function: Callable[..., Any]) -> Any:
    """A piece of other kernels that is copied into them before typing, so that literal arguments stay literal."""
    return numba.njit(inline="always", nogil=True, error_model="numpy", boundscheck=False)(function)


class Op:
    """A tape op, compiled or loaded from the cache when its address is first asked for."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self._function = function

    @functools.cached_property
    def address(self) -> int:
        """Where the C function (parameters, batch, thread, num_threads), all int64, begins."""
        signature = "void(int64, int64, int64, int64)"
        compiled = _cached(numba.cfunc, signature, nopython=True, error_model="numpy", boundscheck=False)
        self._compiled = compiled(self._function)
        return int(self._compiled.address)

    def compile(self) -> None:
        """Compile now, or load from the cache, what would else wait for the first use."""
        assert self.address, "a compiled function has an address"


def op(function: Callable[..., Any]) -> Op:
    """Make a function of (parameters, batch, thread, num_threads) a tape op."""
    return Op(function)
