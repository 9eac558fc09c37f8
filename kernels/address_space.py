"""The limit of this process's address space (`ulimit -v`), checked before libraries would abort the process.

NumPy's OpenBLAS aborts when it cannot map its buffers, and LLVM when it cannot map code.
"""

import errno
import os
import sys
from pathlib import Path

from localinfer.errors import OutOfMemoryError
from localinfer.system.machine_limits import allowed_processors

_MB = 1_000_000
_NUMPY_BYTES = 85 * _MB
_THREAD_BYTES = 40 * _MB
"""Bytes mapped by each further thread of OpenBLAS: a stack and a buffer."""
_LLVM_BYTES = 160 * _MB
_MODULE_BYTES = 30 * _MB
"""Bytes for later imports. Measured on Linux with NumPy 2.4 and llvmlite 0.50."""


def limit_bytes() -> int | None:
    """The limit of the address space in bytes; None without one."""
    if not sys.platform.startswith("linux"):
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def mapped_bytes() -> int:
    """Bytes of mapped address space; Linux only."""
    import resource

    try:
        return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def describe() -> str:
    """The limit and the mapped bytes, as the end of an error message; empty without a limit."""
    limit = limit_bytes()
    if limit is None:
        return ""
    return (
        f"; this process may map {_megabytes(limit)} and has mapped {_megabytes(mapped_bytes())}: raise its limit "
        "(ulimit -v)"
    )


def shortage(num_bytes: int, purpose: str) -> OutOfMemoryError:
    """The error for a failed allocation."""
    way_out = describe() or "; close other programs, or take a smaller model or context_length"
    return OutOfMemoryError(f"{purpose} needs {_megabytes(num_bytes)} of memory, which the system refuses{way_out}")


def require(num_bytes: int, purpose: str) -> None:
    """Raise OutOfMemoryError if the process may not map this many further bytes."""
    limit = limit_bytes()
    if limit is not None and limit - mapped_bytes() < num_bytes:
        raise shortage(num_bytes, purpose)


def require_libraries(*, with_llvm: bool = True) -> None:
    """Raise OutOfMemoryError if there is not enough memory to import NumPy and LLVM; called before their import."""
    if limit_bytes() is None:
        return
    num_bytes = 0
    if "numpy" not in sys.modules:
        num_bytes += _NUMPY_BYTES + _THREAD_BYTES * (_num_blas_threads() - 1)
    if with_llvm and "llvmlite" not in sys.modules:
        num_bytes += _LLVM_BYTES + _MODULE_BYTES
    require(num_bytes, "importing NumPy and LLVM" if with_llvm else "importing NumPy")


def _num_blas_threads() -> int:
    """Threads of OpenBLAS: one per core, or fewer by its environment variables."""
    count = allowed_processors()
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value):
            return min(count, int(value))
    return count


def is_shortage(error: BaseException) -> bool:
    """True if an error of a library means that memory ran out."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    if isinstance(error, RuntimeError) and "can't start new thread" in str(error):
        return True
    signs = ("failed to map segment", "cannot allocate memory", "Could not find/load shared object")
    return (
        isinstance(error, ImportError | OSError) and limit_bytes() is not None and any(s in str(error) for s in signs)
    )


def _megabytes(num_bytes: int) -> str:
    return f"{-(-num_bytes // _MB):,} MB"
