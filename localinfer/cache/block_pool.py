"""Key-value memory: a slab allocator, and fixed-size pages with reference counts in what it allocates.

A page holds `page_tokens` positions of all layers, laid out as the device wants. For layers with a sliding window it
has a block of memory of its own, counted apart: a page can lose its sliding-window block and stay. A page
without references is free. The pool is
mechanism only; what is evicted when memory ends is decided above.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ClosedError, OutOfMemoryError
from localinfer.kernels.kv_layout import DevicePages, KVLayout

ALIGNMENT = 64
_SLAB_BYTES = 16 << 20
_SLAB_SHARE = 64
"""A slab is at most this part of what is allocated already, so that a pool holds little unused memory."""


class SlabAllocator:
    """Slots of `slot_bytes`, in slabs of zeroed memory that the system commits on first touch.

    addresses: int64, where each slot lies. free: numbers of the free slots, the next one last. can_shrink: each slot
    is a slab of its own, so that `shrink` can return it to the system; its number is reused.
    """

    def __init__(self, slot_bytes: int, device: DevicePages | None = None, *, can_shrink: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.addresses = np.zeros(64, np.int64)
        self.free: list[int] = []
        self.num_slots = 0
        self._device = device
        self._can_shrink = can_shrink
        self._slabs: dict[int, NDArray[np.uint8]] = {}
        self._vacant: list[int] = []
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots, free or not."""
        return self.num_slots * self.slot_bytes

    def take(self, count: int) -> NDArray[np.int64]:
        """Allocate `count` free slots."""
        first = len(self.free) - count
        slots = np.array(self.free[first:][::-1], np.int64)
        del self.free[first:]
        return slots

    def grow(self, missing: int, max_bytes: int | None) -> None:
        """Allocate at least `missing` slots, or as many as `max_bytes` and the machine allow."""
        if self._can_shrink:
            count = missing
        else:
            count = max(missing, min(_SLAB_BYTES // max(1, self.slot_bytes), self.num_slots // _SLAB_SHARE))
        if max_bytes is not None and self.slot_bytes:
            count = min(count, max_bytes // self.slot_bytes)
        try:
            if self._can_shrink:
                for _ in range(count):
                    self._add_slab(1)
            elif count > 0:
                self._add_slab(count)
        except (MemoryError, OSError, OutOfMemoryError):
            return

    def shrink(self, count: int) -> None:
        """Return up to `count` free slots to the system."""
        for _ in range(min(count, len(self.free)) if self._can_shrink else 0):
            slot = self.free.pop()
            self._vacant.append(slot)
            self.num_slots -= 1
            self._slabs.pop(slot, None)

    def close(self) -> None:
        """Release all memory."""
        self._slabs.clear()
        self.free.clear()
        self.num_slots = 0

    def _add_slab(self, count: int) -> None:
        is_reused = count == 1 and bool(self._vacant)
        first = self._vacant[-1] if is_reused else self._next
        address = self._allocate(first, count * self.slot_bytes)
        if is_reused:
            self._vacant.pop()
        self._next = max(self._next, first + count)
        while self._next > self.addresses.size:
            self.addresses = np.concatenate((self.addresses, np.zeros_like(self.addresses)))
        self.addresses[first : first + count] = address + np.arange(count) * self.slot_bytes
        self.num_slots += count
        self.free.extend(range(first + count - 1, first - 1, -1))

    def _allocate(self, slot: int, num_bytes: int) -> int:
        """Address of a slab; 0 for slots of no bytes, which hold nothing."""
        if not num_bytes:
            return 0
        if self._device is not None:
            return self._device.allocate(num_bytes)
        slab = _mapped(num_bytes) if self._can_shrink else np.zeros(num_bytes + ALIGNMENT, np.uint8)
        self._slabs[slot] = slab
        return -(-slab.ctypes.data // ALIGNMENT) * ALIGNMENT


def _mapped(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that returns to the system, not to an allocator, once its last reference is gone."""
    flags = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return np.frombuffer(mmap.mmap(-1, num_bytes, **flags), np.uint8)


PageNumbers = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

_DEFAULT_MEMORY = 8 << 30
_DEVICE_SPARE = 256 << 20
"""Of a device's memory, for what its programs reserve as they go."""


@dataclass(frozen=True)
class SlidingWindow:
    """Which sliding-window blocks a sequence still needs: the one rule that sequences, tree and disk go by.

    Layers with a sliding window see the last `tokens` positions only, so their block of a page is needed no more once
    the window has passed it, unless another sequence may continue from before. A sequence can continue from a length
    if every page that overlaps the window before it still has that block; of several such lengths the longest is
    taken. tokens: 0 for a model without such layers; then all is kept.
    """

    tokens: int
    page_tokens: int

    def first_page(self, length: int) -> int:
        """The first page whose sliding-window block is kept for a sequence of `length` positions.

        One page more than the next position sees, so that a text can also continue a little before its end, and
        drafts be rolled back.
        """
        if not self.tokens:
            return 0
        return max(0, (length - self.tokens + 1) // self.page_tokens - 1)

    def kept(self, num_pages: int, *lengths: int) -> BoolArray:
        """bool[num_pages]: whether a page's sliding-window block is kept for continuing from any of these lengths.

        Pages after the first of them are kept too: they are being written.
        """
        kept = np.zeros(num_pages, np.bool_)
        kept[self.first_page(lengths[0]) :] = True
        for length in lengths[1:]:
            kept[self.first_page(length) : -(-length // self.page_tokens)] = True
        return kept

    def usable_length(self, windowed: BoolArray, length: int) -> int:
        """The longest prefix of `length` positions from which a sequence can continue; windowed: which pages have
        their sliding-window block."""
        if not self.tokens or windowed.all():
            return length
        missing = np.flatnonzero(~windowed)
        # Runs of pages that have one: where each begins, and the last length inside it.
        begins = np.concatenate(([0], (missing + 1) * self.page_tokens))
        lengths = np.concatenate((missing * self.page_tokens, [length]))
        seen = np.maximum(lengths - self.tokens + 1, 0)
        return int(lengths[np.flatnonzero(seen // self.page_tokens * self.page_tokens >= begins)[-1]])

    def most_pages(self, length: int, batch_tokens: int) -> int:
        """Most sliding-window blocks that a sequence of `length` positions ever holds at once.

        Those before its end and before three places that others may continue from, and those of a batch.
        """
        num_pages = -(-length // self.page_tokens)
        if not self.tokens:
            return num_pages
        return min(num_pages, 4 * (-(-self.tokens // self.page_tokens) + 2) + -(-batch_tokens // self.page_tokens) + 1)


def default_kv_memory(layout: KVLayout, context_length: int) -> int:
    """Default bytes of pages for a model.

    Half of the machine's free memory, and of that at most 8 GiB or, if larger, one full context. Of a GPU nearly all
    that is free: what else needs memory there was counted when the model was loaded.
    """
    import psutil

    num_windowed = SlidingWindow(layout.window, layout.page_tokens).most_pages(context_length, 0)
    context_bytes = -(-context_length // layout.page_tokens) * layout.page_bytes + num_windowed * layout.windowed_bytes
    free = int(psutil.virtual_memory().available) // 2
    if isinstance(layout, DevicePages):
        on_device, in_host = layout.device_page_bytes, layout.page_bytes - layout.device_page_bytes
        pages = max(layout.free_bytes() - _DEVICE_SPARE, layout.free_bytes() // 2) // on_device
        free = (min(pages, free // in_host) if in_host else pages) * layout.page_bytes
    return min(free, max(_DEFAULT_MEMORY, context_bytes))


class PagePool:
    """Pages known by number, allocated on demand and reused once their reference count is zero. One thread at a time.

    `max_bytes` bounds what is ever allocated, of pages and their sliding-window blocks together; None leaves it to the
    machine. `reclaim`, if set, is called with a number of pages when the budget is spent, and frees what it can.
    counts, windowed_counts: int32, references to each page and to its sliding-window
    block. windowed, in every method: bool[pages], which of the pages' sliding-window
    blocks are meant too; None for all of them. It means nothing for a model without such layers.
    """

    def __init__(self, layout: KVLayout, *, max_bytes: int | None = None) -> None:
        self.page_tokens = layout.page_tokens
        self.page_bytes = layout.page_bytes
        self.windowed_bytes = layout.windowed_bytes
        self.sliding = SlidingWindow(layout.window, layout.page_tokens)
        self.max_bytes = max_bytes
        self.reclaim: Callable[[int], object] | None = None
        self.counts = np.zeros(64, np.int32)
        self._device = layout if isinstance(layout, DevicePages) else None
        self._has_windows = layout.window > 0
        # Memory that one kind no longer needs must be available to the other.
        self._memory = SlabAllocator(layout.page_bytes, self._device, can_shrink=self._has_windows)
        self._windowed = SlabAllocator(layout.windowed_bytes, self._device, can_shrink=True)
        self.windowed_counts = np.zeros(64, np.int32)
        self._windowed_slots = np.full(64, -1, np.int64)
        self._closed = False

    @property
    def num_pages(self) -> int:
        """Pages allocated, referenced or not."""
        return self._memory.num_slots

    @property
    def num_free_pages(self) -> int:
        """Pages allocated without a reference."""
        return len(self._memory.free)

    @property
    def num_windowed(self) -> int:
        """Sliding-window blocks with a reference."""
        return self._windowed.num_slots - len(self._windowed.free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages allocated, with their sliding-window blocks."""
        return self._memory.num_bytes + self._windowed.num_bytes

    def num_pages_for(self, length: int) -> int:
        """Pages that `length` positions take."""
        return -(-length // self.page_tokens)

    def num_bytes(self, num_pages: int, num_windowed: int) -> int:
        """Bytes of so many pages and sliding-window blocks."""
        return num_pages * self.page_bytes + num_windowed * self.windowed_bytes

    def peak_bytes(self, length: int, batch_tokens: int) -> int:
        """Bytes that a sequence of `length` positions ever holds, where a batch adds at most `batch_tokens`."""
        return self.num_bytes(self.num_pages_for(length), self.sliding.most_pages(length, batch_tokens))

    def acquire(self, count: int, windowed: BoolArray | None = None) -> PageNumbers:
        """Allocate `count` pages, all or none, with one reference each. Contents: those of the last use, or zero.

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
        self.counts[pages] = 1
        if self._has_windows:
            with_block = pages if windowed is None else pages[windowed]
            self._windowed_slots[with_block] = self._windowed.take(num_windowed)
            self.windowed_counts[with_block] = 1
        return pages

    def retain(self, pages: PageNumbers, windowed: BoolArray | None = None) -> None:
        """Add a reference to distinct pages, each of which must have one already."""
        assert (self.counts[pages] > 0).all(), "a free page cannot be shared"
        self.counts[pages] += 1
        if self._has_windows:
            self.retain_windowed(pages if windowed is None else pages[windowed])

    def retain_windowed(self, pages: PageNumbers) -> None:
        """Add a reference to the sliding-window blocks of distinct pages, each of which must have one already."""
        if self._has_windows:
            assert (self.windowed_counts[pages] > 0).all(), "a free sliding-window block cannot be shared"
            self.windowed_counts[pages] += 1

    def release(self, pages: PageNumbers, windowed: BoolArray | None = None) -> None:
        """Drop a reference to distinct pages; those without any are free."""
        if self._closed:
            return
        if self._has_windows:
            self.release_windowed(pages if windowed is None else pages[windowed])
        counts = self.counts[pages] - 1
        assert (counts >= 0).all(), "a free page was released"
        self.counts[pages] = counts
        self._memory.free.extend(pages[counts == 0][::-1].tolist())

    def release_windowed(self, pages: PageNumbers) -> None:
        """Drop a reference to the sliding-window blocks of distinct pages."""
        if self._closed or not self._has_windows:
            return
        counts = self.windowed_counts[pages] - 1
        assert (counts >= 0).all(), "a free sliding-window block was released"
        self.windowed_counts[pages] = counts
        unheld = pages[counts == 0][::-1]
        slots = self._windowed_slots[unheld].tolist()
        self._windowed_slots[unheld] = -1
        self._windowed.free.extend(slots)

    def addresses(self, pages: PageNumbers) -> NDArray[np.int64]:
        """Where each page lies in memory, aligned to 64 bytes."""
        return self._memory.addresses[pages]

    def windowed_addresses(self, pages: PageNumbers, windowed: BoolArray) -> NDArray[np.int64] | None:
        """Where the sliding-window block of each page lies, 0 for those not meant; None if no page has one."""
        if not self._has_windows:
            return None
        return np.where(windowed, self._windowed.addresses[self._windowed_slots[pages]], 0)

    def view(self, page: int) -> NDArray[np.uint8]:
        """The bytes of a page, uint8[page_bytes], valid while it is referenced and the pool is open; a copy of what
        lies on a device."""
        address = int(self._memory.addresses[page])
        if self._device is None:
            return self._view(address, self.page_bytes)
        copy = np.empty(self.page_bytes, np.uint8)
        self._device.read(address, copy)
        return copy

    def buffer(self, page: int) -> NDArray[np.uint8]:
        """Where to put a page's new contents before `fill`: its own bytes, or a buffer of the host's."""
        return self.view(page) if self._device is None else np.empty(self.page_bytes, np.uint8)

    def fill(self, page: int, data: NDArray[np.uint8]) -> None:
        """Make a page hold what was put into its `buffer`."""
        if self._device is not None:
            self._device.write(int(self._memory.addresses[page]), data)

    def windowed_view(self, page: int) -> NDArray[np.uint8]:
        """The bytes of a page's sliding-window block, uint8[windowed_bytes], valid while that is referenced."""
        assert self.windowed_counts[page] > 0, "this page has no sliding-window block"
        return self._view(int(self._windowed.addresses[self._windowed_slots[page]]), self.windowed_bytes)

    def copy(self, source: int, target: int) -> None:
        """Copy one page into another, which has a sliding-window block too if the first has."""
        self._copy(int(self._memory.addresses[source]), int(self._memory.addresses[target]), self.page_bytes)
        if self._has_windows:
            blocks = self._windowed_slots[[source, target]]
            assert (blocks >= 0).all(), "a page is copied with its sliding-window block"
            first, second = self._windowed.addresses[blocks].tolist()
            self._copy(first, second, self.windowed_bytes)

    def close(self) -> None:
        """Release all memory; pages acquired before are invalid from now on."""
        self._closed = True
        self._memory.close()
        self._windowed.close()

    @property
    def _num_held(self) -> tuple[int, int]:
        return self.num_pages - self.num_free_pages, self.num_windowed

    def _missing(self, count: int, num_windowed: int) -> int:
        """How many pages must be freed before these can be acquired, after allocating what the budget allows."""
        wanted = ((self._memory, count), (self._windowed, num_windowed))
        short = [max(0, number - len(memory.free)) for memory, number in wanted]
        if not any(short):
            return 0
        if self.max_bytes is not None:
            excess = self.num_bytes(*short) + self.allocated_bytes - self.max_bytes
            # Memory that one kind has beyond what is wanted of it goes to the other.
            for memory, number in wanted:
                if excess > 0 and memory.slot_bytes:
                    before = memory.num_bytes
                    memory.shrink(min(max(0, len(memory.free) - number), -(-excess // memory.slot_bytes)))
                    excess -= before - memory.num_bytes
        for (memory, _), missing in zip(wanted, short, strict=True):
            if missing:
                memory.grow(missing, None if self.max_bytes is None else self.max_bytes - self.allocated_bytes)
        while self._memory.addresses.size > self.counts.size:
            self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
            self.windowed_counts = np.concatenate((self.windowed_counts, np.zeros_like(self.windowed_counts)))
            self._windowed_slots = np.concatenate((self._windowed_slots, np.full_like(self._windowed_slots, -1)))
        return max(0, *(number - len(memory.free) for memory, number in wanted))

    def _view(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        assert self._device is None, "pages of a device are not in this process's memory"
        return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))

    def _copy(self, source: int, target: int, num_bytes: int) -> None:
        if self._device is not None:
            self._device.copy(source, target, num_bytes)
        else:
            ctypes.memmove(target, source, num_bytes)

    def _out_of_memory(self, count: int, num_windowed: int) -> OutOfMemoryError:
        num_pages, num_blocks = self._num_held
        wanted = self.num_bytes(num_pages + count, num_blocks + num_windowed)
        if self.max_bytes is not None and wanted > self.max_bytes:
            return OutOfMemoryError(
                f"the key-value cache needs {wanted:,} bytes and may use {self.max_bytes:,}; shorten the text, or "
                "allow it more with kv_memory"
            )
        return OutOfMemoryError(
            f"the key-value cache needs {wanted:,} bytes, and the machine gave it {self.allocated_bytes:,}; shorten "
            "the text, or load a smaller model"
        )
