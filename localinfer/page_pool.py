"""Fixed-size pages of key-value memory, counted: who holds a page is a number, and a page nobody holds is free.

A page holds `page_tokens` positions of all layers (its inside is the device's business). The pool is mechanism only:
which sequence or which node of the prefix tree holds a page, and what is given up when memory ends, is decided above.
"""

import ctypes
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ClosedError, OutOfMemoryError

ALIGNMENT = 64
_SLAB_BYTES = 16 << 20
_SLAB_SHARE = 64
"""A slab is at most this part of what is allocated already, so that a pool holds little that nobody asked for."""

PageNumbers = NDArray[np.int64]


class KVLayout(Protocol):
    """Size of a page: `page_bytes`, a multiple of 64, for `page_tokens` positions."""

    @property
    def page_tokens(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...


@runtime_checkable
class DeviceLayout(KVLayout, Protocol):
    """A layout whose pages lie in the memory of a device of its own."""

    def allocate(self, num_bytes: int) -> int:
        """Address of fresh memory. Raises: OutOfMemoryError."""
        ...

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Copy bytes from one address to another."""
        ...

    def free_bytes(self) -> int:
        """Bytes that nobody has."""
        ...


_DEFAULT_MEMORY = 8 << 30


def default_kv_memory(layout: KVLayout, context_length: int) -> int:
    """How many bytes of pages a model may have where nobody says.

    Half of what the machine has free now, and of that at most 8 GiB or, where it is more, one full context.
    """
    import psutil

    context_bytes = -(-context_length // layout.page_tokens) * layout.page_bytes
    free = layout.free_bytes() if isinstance(layout, DeviceLayout) else int(psutil.virtual_memory().available)
    return min(free // 2, max(_DEFAULT_MEMORY, context_bytes))


class PagePool:
    """Pages known by number, allocated in slabs as they are asked for and reused when nobody holds them any more.

    `max_bytes` bounds what is ever allocated; None leaves it to the machine. `reclaim`, where it is set, is asked for
    a number of pages when the budget is spent, and frees what it can. Slabs are zeroed memory that the system hands
    out on first touch, so a page costs nothing before it is written. One thread at a time.
    """

    def __init__(self, layout: KVLayout, *, max_bytes: int | None = None) -> None:
        self.page_tokens = layout.page_tokens
        self.page_bytes = layout.page_bytes
        self.max_bytes = max_bytes
        self.reclaim: Callable[[int], object] | None = None
        self._device = layout if isinstance(layout, DeviceLayout) else None
        self._slabs: list[NDArray[np.uint8]] = []
        self._free: list[int] = []
        self._addresses = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.int32)
        self._num_pages = 0
        self._closed = False

    @property
    def num_pages(self) -> int:
        """Pages allocated, held or not."""
        return self._num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages allocated that nobody holds."""
        return len(self._free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages allocated."""
        return self._num_pages * self.page_bytes

    def num_pages_for(self, length: int) -> int:
        """Pages that `length` positions take."""
        return -(-length // self.page_tokens)

    def acquire(self, count: int) -> PageNumbers:
        """Hand out `count` pages, all or none, each held once. What a page holds is left from its last use, or zero.

        Raises: OutOfMemoryError if the budget or the machine's memory is spent and nothing more can be reclaimed;
            ClosedError after `close`.
        """
        if self._closed:
            raise ClosedError("the key-value cache was closed with its model; load the model again")
        if count > len(self._free):
            self._grow(count - len(self._free))
        if count > len(self._free) and self.reclaim is not None:
            self.reclaim(count - len(self._free))
        if count > len(self._free):
            raise self._out_of_memory(count)
        first = len(self._free) - count
        pages = np.array(self._free[first:][::-1], np.int64)
        del self._free[first:]
        self._counts[pages] = 1
        return pages

    def retain(self, pages: PageNumbers) -> None:
        """Hold distinct pages once more each; somebody must hold them already."""
        assert (self._counts[pages] > 0).all(), "a page that nobody holds cannot be shared"
        self._counts[pages] += 1

    def release(self, pages: PageNumbers) -> None:
        """Hold distinct pages once less each; those that nobody holds any more are free."""
        if self._closed:
            return
        counts = self._counts[pages] - 1
        assert (counts >= 0).all(), "a page was released that nobody held"
        self._counts[pages] = counts
        self._free.extend(pages[counts == 0][::-1].tolist())

    def holders(self, pages: PageNumbers) -> NDArray[np.int32]:
        """How often each page is held."""
        return self._counts[pages]

    def is_shared(self, page: int) -> bool:
        """Whether more than one holds this page, so that nobody may write to it."""
        return bool(self._counts[page] > 1)

    def addresses(self, pages: PageNumbers) -> NDArray[np.int64]:
        """Where each page lies in memory, aligned to 64 bytes."""
        return self._addresses[pages]

    def view(self, page: int) -> NDArray[np.uint8]:
        """The bytes of a page, uint8[page_bytes], for as long as it is held and the pool is open."""
        assert self._device is None, "pages of a device are not in this process's memory"
        memory = (ctypes.c_uint8 * self.page_bytes).from_address(int(self._addresses[page]))
        return np.ctypeslib.as_array(memory)

    def copy(self, source: int, target: int) -> None:
        """Copy everything from one page into another."""
        if self._device is not None:
            self._device.copy(int(self._addresses[source]), int(self._addresses[target]), self.page_bytes)
            return
        ctypes.memmove(int(self._addresses[target]), int(self._addresses[source]), self.page_bytes)

    def close(self) -> None:
        """Give all memory back; pages handed out before are invalid from now on."""
        self._closed = True
        self._slabs.clear()
        self._free.clear()
        self._num_pages = 0

    def _grow(self, missing: int) -> None:
        """Allocate at least `missing` pages, or as many as the budget and the machine allow."""
        spare = min(_SLAB_BYTES // self.page_bytes, self._num_pages // _SLAB_SHARE)
        count = max(missing, spare)
        if self.max_bytes is not None:
            count = min(count, self.max_bytes // self.page_bytes - self._num_pages)
        if count <= 0:
            return
        try:
            first = self._allocate(count * self.page_bytes)
        except (MemoryError, OutOfMemoryError):
            return
        start, stop = self._num_pages, self._num_pages + count
        while stop > self._counts.size:
            self._addresses = np.concatenate((self._addresses, np.zeros_like(self._addresses)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._addresses[start:stop] = first + np.arange(count) * self.page_bytes
        self._free.extend(range(stop - 1, start - 1, -1))
        self._num_pages = stop

    def _allocate(self, num_bytes: int) -> int:
        """Address of a slab."""
        if self._device is not None:
            return self._device.allocate(num_bytes)
        slab = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        self._slabs.append(slab)
        return -(-slab.ctypes.data // ALIGNMENT) * ALIGNMENT

    def _out_of_memory(self, count: int) -> OutOfMemoryError:
        wanted = (self._num_pages - len(self._free) + count) * self.page_bytes
        if self.max_bytes is not None and wanted > self.max_bytes // self.page_bytes * self.page_bytes:
            return OutOfMemoryError(
                f"the key-value cache needs {wanted:,} bytes and may use {self.max_bytes:,}; shorten the text, or "
                "allow it more with kv_memory"
            )
        return OutOfMemoryError(
            f"the key-value cache needs {wanted:,} bytes, and the machine gave it {self.allocated_bytes:,}; shorten "
            "the text, or load a smaller model"
        )
