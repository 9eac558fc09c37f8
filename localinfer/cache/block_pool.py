"""Fixed-size pages of key-value memory, counted: who holds a page is a number, and a page nobody holds is free.

A page holds `page_tokens` positions of all layers (its inside is the device's business). Where a model has layers with
a sliding window, their part of a page is memory of its own, and counted apart: a page can lose it and stay. The pool is
mechanism only: which sequence or which node of the prefix tree holds what, and what is given up when memory ends, is
decided above.
"""

import ctypes
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.cache.slabs import DeviceMemory, SlabAllocator
from localinfer.cache.sliding_window import BoolArray, SlidingWindow
from localinfer.errors import ClosedError, OutOfMemoryError

PageNumbers = NDArray[np.int64]


class KVLayout(Protocol):
    """Sizes of a page for `page_tokens` positions, multiples of 64: `page_bytes`, and apart from those
    `windowed_bytes` of the layers that see `window` positions at most, if there are any."""

    @property
    def page_tokens(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...

    @property
    def windowed_bytes(self) -> int: ...

    @property
    def window(self) -> int: ...


_DEFAULT_MEMORY = 8 << 30
_DEVICE_SPARE = 256 << 20
"""Of a device's memory, for what its programs reserve as they go."""


def default_kv_memory(layout: KVLayout, context_length: int) -> int:
    """How many bytes of pages a model may have where nobody says.

    Half of what the machine has free now, and of that at most 8 GiB or, where it is more, one full context. Of a GPU it
    may be nearly all: who else needs room there was counted when the model was loaded.
    """
    import psutil

    num_windowed = SlidingWindow(layout.window, layout.page_tokens).most_pages(context_length, 0)
    context_bytes = -(-context_length // layout.page_tokens) * layout.page_bytes + num_windowed * layout.windowed_bytes
    free = int(psutil.virtual_memory().available) // 2
    if isinstance(layout, DeviceMemory):
        on_device, in_host = layout.device_page_bytes, layout.page_bytes - layout.device_page_bytes
        pages = max(layout.free_bytes() - _DEVICE_SPARE, layout.free_bytes() // 2) // on_device
        free = (min(pages, free // in_host) if in_host else pages) * layout.page_bytes
    return min(free, max(_DEFAULT_MEMORY, context_bytes))


class PagePool:
    """Pages known by number, allocated as they are asked for and reused when nobody holds them any more.

    `max_bytes` bounds what is ever allocated, of pages and their windowed parts together; None leaves it to the
    machine. `reclaim`, where it is set, is asked for a number of pages when the budget is spent, and frees what it can.
    One thread at a time.

    windowed: in every method bool[pages], which of the pages' windowed parts are meant too; None for all of them. It
    means nothing for a model whose layers all see everything.
    """

    def __init__(self, layout: KVLayout, *, max_bytes: int | None = None) -> None:
        self.page_tokens = layout.page_tokens
        self.page_bytes = layout.page_bytes
        self.windowed_bytes = layout.windowed_bytes
        self.sliding = SlidingWindow(layout.window, layout.page_tokens)
        self.max_bytes = max_bytes
        self.reclaim: Callable[[int], object] | None = None
        self._device = layout if isinstance(layout, DeviceMemory) else None
        self._has_windows = layout.window > 0
        # What one kind of memory does not need any more must be there for the other.
        self._memory = SlabAllocator(layout.page_bytes, self._device, can_shrink=self._has_windows)
        self._windowed = SlabAllocator(layout.windowed_bytes, self._device, can_shrink=True)
        self._counts = np.zeros(64, np.int32)
        self._windowed_counts = np.zeros(64, np.int32)
        self._windowed_slots = np.full(64, -1, np.int64)
        self._closed = False

    @property
    def num_pages(self) -> int:
        """Pages allocated, held or not."""
        return self._memory.num_slots

    @property
    def num_free_pages(self) -> int:
        """Pages allocated that nobody holds."""
        return len(self._memory.free)

    @property
    def num_windowed(self) -> int:
        """Windowed parts that somebody holds."""
        return self._windowed.num_slots - len(self._windowed.free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages allocated, with their windowed parts."""
        return self._memory.num_bytes + self._windowed.num_bytes

    def num_pages_for(self, length: int) -> int:
        """Pages that `length` positions take."""
        return -(-length // self.page_tokens)

    def num_bytes(self, num_pages: int, num_windowed: int) -> int:
        """Bytes of so many pages and windowed parts."""
        return num_pages * self.page_bytes + num_windowed * self.windowed_bytes

    def peak_bytes(self, length: int, batch_tokens: int) -> int:
        """Bytes that a sequence of `length` positions ever holds, where a batch adds at most `batch_tokens`."""
        return self.num_bytes(self.num_pages_for(length), self.sliding.most_pages(length, batch_tokens))

    def acquire(self, count: int, windowed: BoolArray | None = None) -> PageNumbers:
        """Hand out `count` pages, all or none, each held once. What a page holds is left from its last use, or zero.

        Raises: OutOfMemoryError if the budget or the machine's memory is spent and nothing more can be reclaimed;
            ClosedError after `close`.
        """
        if self._closed:
            raise ClosedError("the key-value cache was closed with its model; load the model again")
        num_windowed = 0 if not self._has_windows else count if windowed is None else int(windowed.sum())
        while (missing := self._missing(count, num_windowed)) > 0:
            held = self._num_held
            if self.reclaim is not None:
                self.reclaim(missing)
            if self._num_held == held:
                raise self._out_of_memory(count, num_windowed)
        pages = self._memory.take(count)
        self._counts[pages] = 1
        if self._has_windows:
            with_part = pages if windowed is None else pages[windowed]
            self._windowed_slots[with_part] = self._windowed.take(num_windowed)
            self._windowed_counts[with_part] = 1
        return pages

    def retain(self, pages: PageNumbers, windowed: BoolArray | None = None) -> None:
        """Hold distinct pages once more each; somebody must hold them already."""
        assert (self._counts[pages] > 0).all(), "a page that nobody holds cannot be shared"
        self._counts[pages] += 1
        if self._has_windows:
            self.retain_windowed(pages if windowed is None else pages[windowed])

    def retain_windowed(self, pages: PageNumbers) -> None:
        """Hold the windowed parts of distinct pages once more each; somebody must hold them already."""
        if self._has_windows:
            assert (self._windowed_counts[pages] > 0).all(), "a windowed part that nobody holds cannot be shared"
            self._windowed_counts[pages] += 1

    def release(self, pages: PageNumbers, windowed: BoolArray | None = None) -> None:
        """Hold distinct pages once less each; those that nobody holds any more are free."""
        if self._closed:
            return
        if self._has_windows:
            self.release_windowed(pages if windowed is None else pages[windowed])
        counts = self._counts[pages] - 1
        assert (counts >= 0).all(), "a page was released that nobody held"
        self._counts[pages] = counts
        self._memory.free.extend(pages[counts == 0][::-1].tolist())

    def release_windowed(self, pages: PageNumbers) -> None:
        """Hold the windowed parts of distinct pages once less each."""
        if self._closed or not self._has_windows:
            return
        counts = self._windowed_counts[pages] - 1
        assert (counts >= 0).all(), "a windowed part was released that nobody held"
        self._windowed_counts[pages] = counts
        unheld = pages[counts == 0][::-1]
        slots = self._windowed_slots[unheld].tolist()
        self._windowed_slots[unheld] = -1
        self._windowed.free.extend(slots)

    def holders(self, pages: PageNumbers) -> NDArray[np.int32]:
        """How often each page is held."""
        return self._counts[pages]

    def windowed_holders(self, pages: PageNumbers) -> NDArray[np.int32]:
        """How often the windowed part of each page is held."""
        return self._windowed_counts[pages]

    def is_shared(self, page: int) -> bool:
        """Whether more than one holds this page, so that nobody may write to it."""
        return bool(self._counts[page] > 1)

    def addresses(self, pages: PageNumbers) -> NDArray[np.int64]:
        """Where each page lies in memory, aligned to 64 bytes."""
        return self._memory.addresses[pages]

    def windowed_addresses(self, pages: PageNumbers, windowed: BoolArray) -> NDArray[np.int64] | None:
        """Where the windowed part of each page lies, 0 for those that are not meant; None if no page has one."""
        if not self._has_windows:
            return None
        return np.where(windowed, self._windowed.addresses[self._windowed_slots[pages]], 0)

    def view(self, page: int) -> NDArray[np.uint8]:
        """The bytes of a page, uint8[page_bytes], for as long as it is held and the pool is open; a copy of what lies
        on a device."""
        place = int(self._memory.addresses[page])
        if self._device is None:
            return self._view(place, self.page_bytes)
        copy = np.empty(self.page_bytes, np.uint8)
        self._device.read(place, copy)
        return copy

    def buffer(self, page: int) -> NDArray[np.uint8]:
        """Where to put what a page is to hold, before `fill`: its own bytes, or memory in their place."""
        return self.view(page) if self._device is None else np.empty(self.page_bytes, np.uint8)

    def fill(self, page: int, data: NDArray[np.uint8]) -> None:
        """Make a page hold what was put into its `buffer`."""
        if self._device is not None:
            self._device.write(int(self._memory.addresses[page]), data)

    def windowed_view(self, page: int) -> NDArray[np.uint8]:
        """The bytes of a page's windowed part, uint8[windowed_bytes], for as long as that is held."""
        assert self._windowed_counts[page] > 0, "this page has no windowed part"
        return self._view(int(self._windowed.addresses[self._windowed_slots[page]]), self.windowed_bytes)

    def copy(self, source: int, target: int) -> None:
        """Copy everything from one page into another, which has the same parts."""
        self._copy(int(self._memory.addresses[source]), int(self._memory.addresses[target]), self.page_bytes)
        if self._has_windows:
            parts = self._windowed_slots[[source, target]]
            assert (parts >= 0).all(), "a page is copied with its windowed part"
            first, second = self._windowed.addresses[parts].tolist()
            self._copy(first, second, self.windowed_bytes)

    def close(self) -> None:
        """Give all memory back; pages handed out before are invalid from now on."""
        self._closed = True
        self._memory.close()
        self._windowed.close()

    @property
    def _num_held(self) -> tuple[int, int]:
        """Pages and windowed parts that somebody holds."""
        return self.num_pages - self.num_free_pages, self.num_windowed

    def _missing(self, count: int, num_windowed: int) -> int:
        """How many pages must be freed before these can be handed out, after allocating what the budget allows."""
        wanted = ((self._memory, count), (self._windowed, num_windowed))
        short = [max(0, number - len(memory.free)) for memory, number in wanted]
        if not any(short):
            return 0
        if self.max_bytes is not None:
            self._give_back(self.num_bytes(*short) + self.allocated_bytes - self.max_bytes, count, num_windowed)
        for (memory, _), missing in zip(wanted, short, strict=True):
            if missing:
                memory.grow(missing, None if self.max_bytes is None else self.max_bytes - self.allocated_bytes)
        while self._memory.addresses.size > self._counts.size:
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._windowed_counts = np.concatenate((self._windowed_counts, np.zeros_like(self._windowed_counts)))
            self._windowed_slots = np.concatenate((self._windowed_slots, np.full_like(self._windowed_slots, -1)))
        return max(0, *(number - len(memory.free) for memory, number in wanted))

    def _give_back(self, num_bytes: int, count: int, num_windowed: int) -> None:
        """Return up to `num_bytes` that one kind of memory has over what is wanted of it, for the other to have."""
        for memory, wanted in ((self._memory, count), (self._windowed, num_windowed)):
            if num_bytes > 0 and memory.slot_bytes:
                spare = max(0, len(memory.free) - wanted)
                before = memory.num_bytes
                memory.give_back(min(spare, -(-num_bytes // memory.slot_bytes)))
                num_bytes -= before - memory.num_bytes

    def _view(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        assert self._device is None, "pages of a device are not in this process's memory"
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

    def _copy(self, source: int, target: int, num_bytes: int) -> None:
        if self._device is not None:
            self._device.copy(source, target, num_bytes)
            return
        ctypes.memmove(target, source, num_bytes)

    def _out_of_memory(self, count: int, num_windowed: int) -> OutOfMemoryError:
        num_pages, parts = self._num_held
        wanted = self.num_bytes(num_pages + count, parts + num_windowed)
        if self.max_bytes is not None and wanted > self.max_bytes:
            return OutOfMemoryError(
                f"the key-value cache needs {wanted:,} bytes and may use {self.max_bytes:,}; shorten the text, or "
                "allow it more with kv_memory"
            )
        return OutOfMemoryError(
            f"the key-value cache needs {wanted:,} bytes, and the machine gave it {self.allocated_bytes:,}; shorten "
            "the text, or load a smaller model"
        )
