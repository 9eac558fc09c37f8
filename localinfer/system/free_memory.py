"""The heaps of the C library: what was freed in them goes back to the system, and many threads share few of them."""

import ctypes
import sys
from functools import cache
from typing import Any

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Of `mallopt`. Source: glibc, malloc.h."""
_MOST_ARENAS = 2
_LARGE_BYTES = 2 << 20


def return_free_memory() -> None:
    """Return it now, as after a model was closed; some milliseconds, in which other threads may run Python.

    glibc keeps what lies between two blocks that are in use, in one heap for several threads each, which after many
    models and threads is more than all that is in use. Other systems' allocators return pages by themselves.
    """
    trim = _of_c_library("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def limit_arenas() -> None:
    """Have all threads of this process allocate from two heaps, for as long as it lives; before it has many.

    glibc gives up to eight for each processor to the threads, and what one of them frees is of use to its own heap
    alone: the same replies of a server leave five times as much free memory in its heaps, and that grows for hours.
    Blocks from two megabytes on get pages of their own, always: by itself glibc puts those of the size of one that was
    freed, up to 32 MB, into the heaps from then on, where they stay when what lies behind them is in use.
    """
    set_option = _of_c_library("mallopt")
    if set_option is not None:
        set_option(_M_ARENA_MAX, _MOST_ARENAS)
        set_option(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def heap_bytes() -> int:
    """Bytes in use in the heaps, of all threads; 0 on systems that do not say."""
    ask = _of_c_library("mallinfo2")
    if ask is None:
        return 0
    ask.restype = _HeapFigures
    figures = ask()
    return int(figures.uordblks + figures.hblkhd)


class _HeapFigures(ctypes.Structure):
    """struct mallinfo2 (glibc, malloc.h): in use are uordblks in heaps, and hblkhd in blocks of their own."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    )


@cache
def _of_c_library(name: str) -> Any:
    """A function that glibc has, None elsewhere."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None
