"""How much memory this process may still map, where a limit was set (`ulimit -v`), so that it can be refused in words.

Libraries do worse: NumPy's OpenBLAS ends the process when its buffers cannot be mapped, and LLVM when code cannot be.
"""

import errno
import os
import sys
from pathlib import Path

from localinfer.errors import OutOfMemoryError

_MB = 1_000_000
_NUMPY_BYTES = 85 * _MB
_THREAD_BYTES = 40 * _MB
"""What one more thread of OpenBLAS maps: a stack and a buffer."""
_LLVM_BYTES = 160 * _MB
_MODULE_BYTES = 30 * _MB
"""What is imported after these. Measured on Linux with NumPy 2.4 and llvmlite 0.50."""


def limit_bytes() -> int | None:
    """How many bytes of addresses this process may map; None without a limit, and where none is kept."""
    if not sys.platform.startswith("linux"):
        return None
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else int(soft)


def mapped_bytes() -> int:
    """How many bytes of addresses this process has mapped; Linux only."""
    import resource

    try:
        return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def describe() -> str:
    """What is known of this process's memory, as the end of a sentence; empty without a limit."""
    limit = limit_bytes()
    if limit is None:
        return ""
    return (
        f"; this process may map {_megabytes(limit)} and has mapped {_megabytes(mapped_bytes())}: raise its limit "
        "(ulimit -v)"
    )


def shortage(num_bytes: int, purpose: str) -> OutOfMemoryError:
    """The error of memory that the system does not give."""
    way_out = describe() or "; close other programs, or take a smaller model or context_length"
    return OutOfMemoryError(f"{purpose} needs {_megabytes(num_bytes)} of memory that the system does not give{way_out}")


def require(num_bytes: int, purpose: str) -> None:
    """Raise OutOfMemoryError if this process may not map as many bytes more."""
    limit = limit_bytes()
    if limit is not None and limit - mapped_bytes() < num_bytes:
        raise shortage(num_bytes, purpose)


def require_libraries(*, with_llvm: bool = True) -> None:
    """Raise OutOfMemoryError if NumPy, and LLVM, cannot be imported for want of memory; call it before they are."""
    if limit_bytes() is None:
        return
    num_bytes = 0
    if "numpy" not in sys.modules:
        num_bytes += _NUMPY_BYTES + _THREAD_BYTES * (_num_blas_threads() - 1)
    if with_llvm and "llvmlite" not in sys.modules:
        num_bytes += _LLVM_BYTES + _MODULE_BYTES
    require(num_bytes, "importing NumPy and LLVM" if with_llvm else "importing NumPy")


def _num_blas_threads() -> int:
    """Threads that OpenBLAS starts: one per core, unless its variables say less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        value = os.environ.get(name, "")
        if value.isdecimal() and int(value):
            return min(count, int(value))
    return count


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that memory ran out, as libraries say it."""
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
