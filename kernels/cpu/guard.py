"""Guard mode (`LOCALINFER_GUARD=1`): memory for kernels between protected pages, where a stray access is fatal.

An array's end, and what may be read behind it, lies at the end of a page, and the next page is protected: the first
byte read or written behind it raises SIGSEGV. Its beginning is exact in a second mode, `LOCALINFER_GUARD=before`, in
which arrays start at the start of a page. The rest of an array's own pages is filled with bytes that are NaN in
every floating-point type, so that reading them shows in results, and is compared when the array is given up, so that
writing them ends the process as well. Kernels check what alignment they promise LLVM (`Emitter.pointer`): an access
that breaks it faults on every processor, not only where LLVM chose an instruction that needs it. Results have the same
bits as without.

Every array then takes pages of its own, and at most three of the maps that a process may have.
"""

import contextlib
import ctypes
import functools
import logging
import mmap
import os
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import BackendUnavailableError
from localinfer.kernels.address_space import shortage

logger = logging.getLogger(__name__)

VARIABLE = "LOCALINFER_GUARD"

FILL = 0xFF
"""Of each byte around an array: NaN as float16, bfloat16, float32 and float64, and -1 as an integer."""

_LEAST_ALIGNMENT = 64
_MAPS_PER_ARRAY = 3
_MAPS_FOR_OTHERS = 8_000
"""Maps left for libraries, stacks and the allocator."""
_SLOTS_SHARE = 0.75
"""Of all maps, those that may be taken when a slot of a cache asks for some."""
_LINUX_MAPS = 65_530
"""Maps that Linux allows a process by default."""

_PROT_NONE, _PROT_READ_WRITE = 0, 3
_PAGE_NOACCESS, _PAGE_READWRITE = 0x01, 0x04


class Guard(Enum):
    """The end of an array that is exact: none without guard mode."""

    OFF = ""
    AFTER = "1"
    BEFORE = "before"


def chosen(wanted: str | None) -> Guard:
    """The mode of a value of `LOCALINFER_GUARD`. Raises: BackendUnavailableError if there is none of that name."""
    for mode in Guard:
        if (wanted or "").replace("0", "") == mode.value:
            return mode
    raise BackendUnavailableError(
        f"{VARIABLE} is {wanted!r}; set it to 1 to protect what follows every array, to before to protect what "
        "precedes it, or unset it"
    )


MODE = chosen(os.environ.get(VARIABLE))
IS_ON = MODE is not Guard.OFF

_num_arrays = 0


class _GuardedMap(mmap.mmap):
    """Anonymous pages, the first and the last of them protected; unmapped with the last reference.

    begins, ends: of the array in the map; its bytes outside are `FILL`. is_protected: no page can be read at present.
    """

    begins = ends = 0
    address = 0
    is_protected = False

    def __del__(self) -> None:
        global _num_arrays
        _num_arrays -= 1
        if not self.ends or self.is_protected:
            return
        inside = self.address + mmap.PAGESIZE
        outside = self.address + len(self) - mmap.PAGESIZE
        for place, end in ((inside, self.address + self.begins), (self.address + self.ends, outside)):
            if ctypes.string_at(place, end - place).strip(bytes([FILL])):
                _end_process(self.ends - self.begins)


def guarded(num_bytes: int, readable_bytes: int = 0, *, alignment: int = _LEAST_ALIGNMENT) -> NDArray[np.uint8]:
    """uint8[num_bytes] of zeros at a multiple of `alignment`, a power of two, alone between protected pages.

    readable_bytes: how many behind it may be read. Where their sum is no multiple of the alignment, up to one. Raises:
    OutOfMemoryError; BackendUnavailableError if the process may have no more maps, or the system protects no pages.
    """
    mapped = _mapped(num_bytes, readable_bytes, alignment)
    return np.frombuffer(mapped, np.uint8, num_bytes, mapped.begins)


class GuardedSlot:
    """A slot of the cache alone between protected pages; protected itself while it is not in use."""

    def __init__(self, num_bytes: int) -> None:
        self._mapped = _mapped(num_bytes, 0, _LEAST_ALIGNMENT)
        self.address = self._mapped.address + self._mapped.begins

    def set_protected(self, is_protected: bool) -> None:
        """Make every access end the process, or allow all; the contents stay."""
        mapped, page = self._mapped, mmap.PAGESIZE
        if mapped.is_protected != is_protected:
            mapped.is_protected = is_protected
            _protect(mapped.address + page, len(mapped) - 2 * page, is_protected=is_protected)


def _mapped(num_bytes: int, readable_bytes: int, alignment: int) -> _GuardedMap:
    global _num_arrays
    page = mmap.PAGESIZE
    if not _has_room_for(1, max_maps()):
        raise BackendUnavailableError(f"{VARIABLE} is set, and {_too_many()}")
    reach = -(-(num_bytes + readable_bytes) // alignment) * alignment
    inside = -(-max(reach, 1) // page) * page
    try:
        mapped = _GuardedMap(-1, inside + 2 * page, **_flags())
    except (OSError, MemoryError):
        raise shortage(inside, "an array of guard mode") from None
    _num_arrays += 1
    whole = np.frombuffer(mapped, np.uint8)
    begins = page if MODE is Guard.BEFORE else page + inside - reach
    whole[page:begins] = FILL
    whole[begins + num_bytes : page + inside] = FILL
    mapped.address = int(whole.ctypes.data)
    mapped.begins, mapped.ends = begins, begins + num_bytes
    _protect(mapped.address, page, is_protected=True)
    _protect(mapped.address + page + inside, page, is_protected=True)
    return mapped


def has_room_for_slots(count: int) -> bool:
    """True if so many more arrays may be slots of a cache; logged where not.

    A cache fills whatever it may have, and other arrays need maps after it.
    """
    fits = _has_room_for(count, max_maps() * _SLOTS_SHARE)
    if not fits:
        logger.warning("guard mode: slots of a cache lie together from here on; %s", _too_many())
    return fits


def _has_room_for(count: int, maps: float) -> bool:
    return _MAPS_PER_ARRAY * (_num_arrays + count) + _MAPS_FOR_OTHERS <= maps


@functools.cache
def max_maps() -> int:
    """Maps that this process may have; more than will ever be asked for where the system has no such limit."""
    if not sys.platform.startswith("linux"):
        return 1 << 40
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/proc/sys/vm/max_map_count").read_text(encoding="ascii"))
    return _LINUX_MAPS


def _too_many() -> str:
    return (
        f"{_num_arrays:,} arrays lie between protected pages, of the {max_maps():,} maps that this process may have; "
        "take a smaller model, or allow more (sysctl -w vm.max_map_count=1000000)"
    )


def _protect(address: int, num_bytes: int, *, is_protected: bool) -> None:
    """Forbid or allow every access to whole pages. Raises: BackendUnavailableError if the system cannot."""
    if not _protector()(address, num_bytes, is_protected):
        raise BackendUnavailableError(f"{VARIABLE} is set, and this system does not protect pages; unset it")


@functools.cache
def _protector() -> Callable[[int, int, bool], bool]:
    """A function of an address, a number of bytes and whether they are protected, which says whether it succeeded."""
    if sys.platform == "win32":
        change = ctypes.windll.kernel32.VirtualProtect
        change.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32, ctypes.POINTER(ctypes.c_uint32)
        before = ctypes.c_uint32()
        return lambda address, size, off: bool(
            change(address, size, _PAGE_NOACCESS if off else _PAGE_READWRITE, ctypes.byref(before))
        )
    mprotect = getattr(ctypes.CDLL(None), "mprotect", None)
    if mprotect is None:
        return lambda address, size, off: False
    mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return lambda address, size, off: mprotect(address, size, _PROT_NONE if off else _PROT_READ_WRITE) == 0


def _flags() -> dict[str, int]:
    return {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}


def _end_process(num_bytes: int) -> None:
    """Abort: memory around an array was written at an unknown time."""
    message = f"localinfer: guard mode: bytes around an array of {num_bytes:,} bytes were written\n"
    with contextlib.suppress(OSError):
        os.write(2, message.encode())
    os.abort()
