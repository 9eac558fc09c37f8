"""Memory that was freed, but that the C library keeps for the next allocation: returned to the system."""

import ctypes
import sys


def return_free_memory() -> None:
    """Return it now, as after a model was closed; some milliseconds, in which other threads may run Python.

    glibc keeps what lies between two blocks that are in use, in one heap for several threads each, which after many
    models and threads is more than all that is in use. Other systems' allocators return pages by themselves.
    """
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
