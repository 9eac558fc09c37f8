"""Key-value memory: fixed-size pages with reference counts, and slots for the states of recurrent layers.

A page holds `page_tokens` positions of all layers, laid out as the device wants. For layers with a sliding window it
has a block of memory of its own, counted apart: a page can lose its sliding-window block and stay. A page
without references is free. Recurrent layers keep a state per sequence and position that is to be continued from, and a
log of the last rows while drafts are verified; their slots share the pages' budget. The pool is
mechanism only; what is evicted when memory ends is decided above.
"""

import ctypes
import mmap
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ClosedError, OutOfMemoryError
from localinfer.kernels.cpu import guard
from localinfer.kernels.kv_layout import DevicePages, KVLayout
from localinfer.system.machine_limits import memory_limits
from localinfer.types import Record

if TYPE_CHECKING:
    from localinfer.engine.cache.sequence import SequenceCache

BoolArray = NDArray[np.bool_]

ALIGNMENT = 64
_SLAB_BYTES = 16 << 20
_SLAB_SHARE = 64
"""A slab is at most this part of what is allocated already, so that a pool holds little unused memory."""


class SlabAllocator:
    """Slots of `slot_bytes`, in slabs of zeroed memory that the system commits on first touch.

    addresses: int64, where each slot lies. free: numbers of the free slots, the next one last. can_shrink: each slot
    is a slab of its own, so that `shrink` can return it to the system; its number is reused.

    In guard mode slots lie apart between protected pages, and free ones are protected themselves, while the process may
    have the maps for it.
    """

    def __init__(self, slot_bytes: int, device: DevicePages | None = None, *, can_shrink: bool = False) -> None:
        self.slot_bytes = slot_bytes
        self.addresses = np.zeros(64, np.int64)
        self.free: list[int] = []
        self.num_slots = 0
        self._device = device
        self._can_shrink = can_shrink
        self._slabs: dict[int, NDArray[np.uint8]] = {}
        self._guarded: dict[int, guard.GuardedSlot] = {}
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
        self._protect(slots.tolist(), False)
        return slots

    def take_one(self) -> int:
        """Allocate a free slot, of which there must be one."""
        slot = self.free.pop()
        self._protect((slot,), False)
        return slot

    def give_back(self, slots: Sequence[int]) -> None:
        """Make slots free, the last of them the next one."""
        self.free.extend(slots)
        self._protect(slots, True)

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
            self._guarded.pop(slot, None)

    def close(self) -> None:
        """Release all memory."""
        self._slabs.clear()
        self._guarded.clear()
        self.free.clear()
        self.num_slots = 0

    def recover(self, num_held: int, held: Callable[[], Iterable[int]]) -> None:
        """Free the slots that Ctrl-C left neither free nor held, between two lines of a caller.

        held: the numbers of those slots, `num_held`, that are in use; asked for only if slots are missing.
        """
        self.num_slots = self._next - len(self._vacant)
        if len(self.free) + num_held < self.num_slots:
            lost = set(range(self._next)) - set(self._vacant) - set(self.free) - set(held())
            self.free[:0] = sorted(lost)

    def _add_slab(self, count: int) -> None:
        # In this order: should Ctrl-C come between two lines, `recover` finds no slot without memory.
        is_reused = count == 1 and bool(self._vacant)
        first = self._vacant[-1] if is_reused else self._next
        addresses = self._allocate(first, count)
        while first + count > self.addresses.size:
            self.addresses = np.concatenate((self.addresses, np.zeros_like(self.addresses)))
        self.addresses[first : first + count] = addresses
        if is_reused:
            self._vacant.pop()
        self._next = max(self._next, first + count)
        self.num_slots += count
        self.free.extend(range(first + count - 1, first - 1, -1))

    def _allocate(self, first: int, count: int) -> NDArray[np.int64] | int:
        """Addresses of the slots of a slab; 0 for slots of no bytes, which hold nothing."""
        num_bytes = count * self.slot_bytes
        if not num_bytes:
            return 0
        steps = np.arange(count) * self.slot_bytes
        if self._device is not None:
            return self._device.allocate(num_bytes) + steps
        if guard.IS_ON and guard.has_room_for_slots(count):
            apart = {first + index: guard.GuardedSlot(self.slot_bytes) for index in range(count)}
            self._guarded |= apart
            self._protect(list(apart), True)
            return np.array([slot.address for slot in apart.values()], np.int64)
        slab = _mapped(num_bytes) if self._can_shrink else np.zeros(num_bytes + ALIGNMENT, np.uint8)
        self._slabs[first] = slab
        return -(-slab.ctypes.data // ALIGNMENT) * ALIGNMENT + steps

    def _protect(self, slots: Sequence[int], is_protected: bool) -> None:
        """In guard mode let every access to these slots end the process, or allow it."""
        for slot in slots if self._guarded else ():
            if slot in self._guarded:
                self._guarded[slot].set_protected(is_protected)


def _mapped(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that returns to the system, not to an allocator, once its last reference is gone."""
    flags = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    return np.frombuffer(mmap.mmap(-1, num_bytes, **flags), np.uint8)


class SharedSlots:
    """Slots with reference counts, all of one size: recurrent states, or their logs. One thread at a time.

    A slot without references is free; one with more than one is never written.
    """

    def __init__(self, slot_bytes: int, device: DevicePages | None = None) -> None:
        self.slot_bytes = slot_bytes
        self.memory = SlabAllocator(slot_bytes, device, can_shrink=True)
        self._counts: dict[int, int] = {}

    @property
    def num_held(self) -> int:
        """Slots with a reference."""
        return len(self._counts)

    @property
    def held(self) -> frozenset[int]:
        """Their numbers."""
        return frozenset(self._counts)

    def take(self) -> int:
        """A free slot, of which there must be one, with one reference."""
        slot = self.memory.take_one()
        self._counts[slot] = 1
        return slot

    def retain(self, slot: int) -> None:
        """Add a reference to a slot, which must have one already."""
        assert slot in self._counts, "a free slot cannot be shared"
        self._counts[slot] += 1

    def release(self, slot: int) -> None:
        """Drop a reference."""
        count = self._counts.get(slot, 0) - 1
        if count > 0:
            self._counts[slot] = count
        elif count == 0:
            del self._counts[slot]
            self.memory.give_back((slot,))
        else:
            assert not self.memory.num_slots, "a free slot was released"

    def num_references(self, slot: int) -> int:
        """References to a slot; 0 if it is free."""
        return self._counts.get(slot, 0)

    def address(self, slot: int) -> int:
        """Address of a slot, aligned to 64 bytes."""
        return int(self.memory.addresses[slot])

    def close(self) -> None:
        """Release all memory."""
        self.memory.close()
        self._counts.clear()


class SlidingWindow(Record):
    """Rule of the sliding-window blocks that a sequence still needs, shared by sequences, tree and disk.

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

        Those before its end and before three positions that others may continue from, and those of a batch.
        """
        num_pages = -(-length // self.page_tokens)
        if not self.tokens:
            return num_pages
        return min(num_pages, 4 * (-(-self.tokens // self.page_tokens) + 2) + -(-batch_tokens // self.page_tokens) + 1)


PageNumbers = NDArray[np.int64]

STATES_OF_SEQUENCE = 2
"""Slots that a sequence alternates between: what it reads, and what it writes."""
STATES_OF_DEFAULT = 8
"""States for which there is memory by default, whatever a context takes: of a sequence, and of snapshots."""
_DEFAULT_MEMORY = 8 << 30
_MOST_OF_FREE = 0.95
"""Largest share of the free memory that one full context takes by default: more than a context is admitted with."""
_DEVICE_SPARE = 256 << 20
"""Bytes of a device's memory left for what its programs reserve as they go."""


def context_bytes(layout: KVLayout, context_length: int, batch_tokens: int = 0) -> int:
    """Bytes of the pages of one full context, where a batch adds at most `batch_tokens`; with recurrent states."""
    num_windowed = SlidingWindow(layout.window, layout.page_tokens).most_pages(context_length, batch_tokens)
    pages = -(-context_length // layout.page_tokens) * layout.page_bytes + num_windowed * layout.windowed_bytes
    return pages + STATES_OF_DEFAULT * layout.state_bytes + 2 * layout.log_bytes


def default_kv_memory(layout: KVLayout, context_length: int, batch_tokens: int = 0) -> int:
    """Default bytes of pages for a model.

    Half of the free memory, or one full context if that takes more and can be had; and at most 8 GiB or, if larger, one
    full context. Of a GPU nearly all that is free: what else needs memory there was counted when the model was loaded.
    """
    full = context_bytes(layout, context_length, batch_tokens)
    memory = memory_limits()
    free = max(memory.available_bytes // 2, min(full, int(_MOST_OF_FREE * memory.most_bytes)))
    if isinstance(layout, DevicePages) and layout.page_bytes:
        pages, in_host = layout.free_pages(_DEVICE_SPARE), layout.host_page_bytes
        host = memory.available_bytes // 2
        free = (min(pages, host // in_host) if in_host else pages) * layout.page_bytes
    return min(free, max(_DEFAULT_MEMORY, full))


class PagePool:
    """Pages known by number, allocated on demand and reused once their reference count is zero. One thread at a time.

    `max_bytes` bounds what is ever allocated, of pages, their sliding-window blocks, states and logs together; None
    leaves it to the machine. `reclaim`, if set, is called when the budget is spent, with a number of pages and one of
    bytes besides, and frees what it can.
    counts, windowed_counts: int32, references to each page and to its sliding-window
    block. windowed, in every method: bool[pages], which of the pages' sliding-window
    blocks are meant too; None for all of them. It means nothing for a model without such layers.
    states, logs: slots of recurrent states at one position, and of their logs; of no bytes for a model without them.
    grid: slots of states that were kept for no better reason than their distance to others. make_grid_room, if set,
    says whether there may be one more that is worth so much.
    sequences: those that were not closed, of requests and of all else that is computed, such as scores and beams.
    abandoned: those of them that nothing refers to any more, because Ctrl-C kept them from being closed.
    """

    def __init__(self, layout: KVLayout, *, max_bytes: int | None = None) -> None:
        self.page_tokens = layout.page_tokens
        self.page_bytes = layout.page_bytes
        self.windowed_bytes = layout.windowed_bytes
        self.sliding = SlidingWindow(layout.window, layout.page_tokens)
        self.max_bytes = max_bytes
        self.reclaim: Callable[[int, int], object] | None = None
        self.make_grid_room: Callable[[int], bool] | None = None
        self.counts = np.zeros(64, np.int32)
        self._device = layout if isinstance(layout, DevicePages) else None
        self._has_windows = layout.window > 0
        self.has_states = layout.state_bytes > 0
        self.carried_size = layout.carried_size
        # Memory that one kind no longer needs must be available to the others.
        has_kinds = self._has_windows or self.has_states
        self._memory = SlabAllocator(layout.page_bytes, self._device, can_shrink=has_kinds and layout.page_bytes > 0)
        self._windowed = SlabAllocator(layout.windowed_bytes, self._device, can_shrink=True)
        self.states = SharedSlots(layout.state_bytes, self._device)
        self.logs = SharedSlots(layout.log_bytes, self._device)
        self.grid: set[int] = set()
        self.sequences: WeakSet[SequenceCache] = WeakSet()
        self.abandoned: set[SequenceCache] = set()
        self.windowed_counts = np.zeros(64, np.int32)
        self._windowed_slots = np.full(64, -1, np.int64)
        self.is_closed = False

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
        """Bytes of all pages allocated, with their sliding-window blocks, and of states and logs."""
        return sum(memory.num_bytes for memory in self._kinds)

    @property
    def held_bytes(self) -> int:
        """Bytes of those that have a reference."""
        return sum((memory.num_slots - len(memory.free)) * memory.slot_bytes for memory in self._kinds)

    def num_pages_for(self, length: int) -> int:
        """Pages that `length` positions take."""
        return -(-length // self.page_tokens)

    def num_bytes(self, num_pages: int, num_windowed: int, num_states: int = 0, num_logs: int = 0) -> int:
        """Bytes of so many pages and sliding-window blocks, states and logs."""
        pages = num_pages * self.page_bytes + num_windowed * self.windowed_bytes
        return pages + num_states * self.states.slot_bytes + num_logs * self.logs.slot_bytes

    def peak_bytes(self, length: int, batch_tokens: int) -> int:
        """Bytes that a sequence of `length` positions ever holds, where a batch adds at most `batch_tokens`.

        Without logs: a draft that has no memory is left out.
        """
        num_pages, num_windowed = self.num_pages_for(length), self.sliding.most_pages(length, batch_tokens)
        return self.num_bytes(num_pages, num_windowed, STATES_OF_SEQUENCE if self.has_states else 0)

    def acquire(self, count: int, windowed: BoolArray | None = None) -> PageNumbers:
        """Allocate `count` pages, all or none, with one reference each. Contents: those of the last use, or zero.

        Raises: OutOfMemoryError if the budget or the machine's memory is spent and nothing more can be reclaimed;
            ClosedError after `close`.
        """
        num_windowed = 0 if not self._has_windows else count if windowed is None else int(windowed.sum())
        self._find_room(((self._memory, count), (self._windowed, num_windowed)))
        pages = self._memory.take(count)
        self.counts[pages] = 1
        if self._has_windows:
            with_block = pages if windowed is None else pages[windowed]
            self._windowed_slots[with_block] = self._windowed.take(num_windowed)
            self.windowed_counts[with_block] = 1
        return pages

    def take_slot(self, slots: SharedSlots) -> int:
        """Allocate one of `states` or `logs`, with one reference. Contents: undefined. Raises: as `acquire`."""
        if self.is_closed or not slots.memory.free:
            self._find_room(((slots.memory, 1),))
        return slots.take()

    def release_state(self, slot: int) -> None:
        """Drop a reference to a state."""
        if not self.is_closed:
            self.states.release(slot)
            if slot in self.grid and not self.states.num_references(slot):
                self.grid.discard(slot)

    def release_log(self, slot: int) -> None:
        """Drop a reference to a log."""
        if not self.is_closed:
            self.logs.release(slot)

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
        if self.is_closed:
            return
        if self._has_windows:
            self.release_windowed(pages if windowed is None else pages[windowed])
        counts = self.counts[pages] - 1
        assert (counts >= 0).all(), "a free page was released"
        self.counts[pages] = counts
        self._memory.give_back(pages[counts == 0][::-1].tolist())

    def release_windowed(self, pages: PageNumbers) -> None:
        """Drop a reference to the sliding-window blocks of distinct pages."""
        if self.is_closed or not self._has_windows:
            return
        counts = self.windowed_counts[pages] - 1
        assert (counts >= 0).all(), "a free sliding-window block was released"
        self.windowed_counts[pages] = counts
        unheld = pages[counts == 0][::-1]
        slots = self._windowed_slots[unheld].tolist()
        self._windowed_slots[unheld] = -1
        self._windowed.give_back(slots)

    def addresses(self, pages: PageNumbers) -> NDArray[np.int64]:
        """Address of each page, aligned to 64 bytes."""
        return self._memory.addresses[pages]

    def windowed_addresses(self, pages: PageNumbers, windowed: BoolArray) -> NDArray[np.int64] | None:
        """Address of the sliding-window block of each page, 0 for those not meant; None if no page has one."""
        if not self._has_windows:
            return None
        return np.where(windowed, self._windowed.addresses[self._windowed_slots[pages]], 0)

    def view(self, page: int) -> NDArray[np.uint8]:
        """The bytes of a page, uint8[page_bytes], valid while it is referenced and the pool is open; a copy of what
        lies on a device."""
        address = int(self._memory.addresses[page])
        if self._device is None:
            return host_bytes(address, self.page_bytes)
        copy = np.empty(self.page_bytes, np.uint8)
        self._device.read(address, copy)
        return copy

    def buffer(self, page: int) -> NDArray[np.uint8]:
        """Memory for a page's new contents before `fill`: its own bytes, or a buffer of the host's."""
        return self.view(page) if self._device is None else np.empty(self.page_bytes, np.uint8)

    def fill(self, page: int, data: NDArray[np.uint8]) -> None:
        """Make a page hold what was put into its `buffer`."""
        if self._device is not None:
            self._device.write(int(self._memory.addresses[page]), data)

    def windowed_view(self, page: int) -> NDArray[np.uint8]:
        """The bytes of a page's sliding-window block, uint8[windowed_bytes], valid while that is referenced."""
        assert self.windowed_counts[page] > 0, "this page has no sliding-window block"
        assert self._device is None, "blocks of a device are not in this process's memory"
        return host_bytes(int(self._windowed.addresses[self._windowed_slots[page]]), self.windowed_bytes)

    def state_view(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of a state, uint8[state_bytes], valid while it is referenced."""
        assert self._device is None, "states of a device are not in this process's memory"
        return host_bytes(self.states.address(slot), self.states.slot_bytes)

    def copy(self, source: int, target: int) -> None:
        """Copy one page into another, which has a sliding-window block too if the first has."""
        self._copy(int(self._memory.addresses[source]), int(self._memory.addresses[target]), self.page_bytes)
        if self._has_windows:
            blocks = self._windowed_slots[[source, target]]
            assert (blocks >= 0).all(), "a page is copied with its sliding-window block"
            first, second = self._windowed.addresses[blocks].tolist()
            self._copy(first, second, self.windowed_bytes)

    def close_abandoned(self) -> None:
        """Close the sequences that Ctrl-C kept from being closed."""
        for sequence in list(self.abandoned):
            sequence.close()
            self.abandoned.discard(sequence)

    def recover(self) -> None:
        """Close abandoned sequences, and make free again what Ctrl-C left neither free nor held."""
        self.close_abandoned()
        self._memory.recover(int(np.count_nonzero(self.counts)), lambda: np.flatnonzero(self.counts).tolist())
        self._windowed.recover(
            int(np.count_nonzero(self.windowed_counts)),
            lambda: self._windowed_slots[np.flatnonzero(self.windowed_counts)].tolist(),
        )
        self.states.memory.recover(self.states.num_held, lambda: self.states.held)
        self.logs.memory.recover(self.logs.num_held, lambda: self.logs.held)

    def close(self) -> None:
        """Release all memory; pages acquired before are invalid from now on."""
        self.is_closed = True
        self.abandoned.clear()
        self._memory.close()
        self._windowed.close()
        self.states.close()
        self.logs.close()

    @property
    def _kinds(self) -> tuple[SlabAllocator, ...]:
        return self._memory, self._windowed, self.states.memory, self.logs.memory

    @property
    def _num_held(self) -> list[int]:
        return [memory.num_slots - len(memory.free) for memory in self._kinds]

    def _find_room(self, wanted: Sequence[tuple[SlabAllocator, int]]) -> None:
        """See to it that so many slots are free. Raises: ClosedError, OutOfMemoryError."""
        if self.is_closed:
            raise ClosedError("the key-value cache was closed with its model; load the model again")
        while (missing := self._missing(wanted)) != (0, 0):
            held = self._num_held
            if self.reclaim is not None:
                self.reclaim(*missing)
            if self._num_held == held:
                raise self._out_of_memory(wanted)

    def _missing(self, wanted: Sequence[tuple[SlabAllocator, int]]) -> tuple[int, int]:
        """Number of pages, and bytes of states, to be freed before these slots can be taken, after allocating what the
        budget allows."""
        short = [max(0, number - len(memory.free)) for memory, number in wanted]
        if not any(short):
            return 0, 0
        self.recover()
        short = [max(0, number - len(memory.free)) for memory, number in wanted]
        if self.max_bytes is not None:
            needed = sum(count * memory.slot_bytes for (memory, _), count in zip(wanted, short, strict=True))
            excess = needed + self.allocated_bytes - self.max_bytes
            # Memory that one kind has beyond what is wanted of it goes to the others.
            for memory in self._kinds if excess > 0 else ():
                if excess > 0 and memory.slot_bytes:
                    kept = next((number for one, number in wanted if one is memory), 0)
                    before = memory.num_bytes
                    memory.shrink(min(max(0, len(memory.free) - kept), -(-excess // memory.slot_bytes)))
                    excess -= before - memory.num_bytes
        for (memory, _), missing in zip(wanted, short, strict=True):
            if missing:
                memory.grow(missing, None if self.max_bytes is None else self.max_bytes - self.allocated_bytes)
        while self._memory.addresses.size > self.counts.size:
            self.counts = np.concatenate((self.counts, np.zeros_like(self.counts)))
            self.windowed_counts = np.concatenate((self.windowed_counts, np.zeros_like(self.windowed_counts)))
            self._windowed_slots = np.concatenate((self._windowed_slots, np.full_like(self._windowed_slots, -1)))
        pages = num_bytes = 0
        for memory, number in wanted:
            missing = max(0, number - len(memory.free))
            if memory is self._memory or memory is self._windowed:
                pages = max(pages, missing)
            else:
                num_bytes += missing * memory.slot_bytes
        return pages, num_bytes

    def _copy(self, source: int, target: int, num_bytes: int) -> None:
        if self._device is not None:
            self._device.copy(source, target, num_bytes)
        else:
            ctypes.memmove(target, source, num_bytes)

    def _out_of_memory(self, wanted: Sequence[tuple[SlabAllocator, int]]) -> OutOfMemoryError:
        num_bytes = self.held_bytes + sum(memory.slot_bytes * count for memory, count in wanted)
        if self.max_bytes is not None and num_bytes > self.max_bytes:
            return OutOfMemoryError(
                f"the key-value cache needs {num_bytes:,} bytes and may use {self.max_bytes:,}; shorten the text, or "
                "allow it more with kv_memory or memory_limit"
            )
        return OutOfMemoryError(
            f"the key-value cache needs {num_bytes:,} bytes, and the machine gave it {self.allocated_bytes:,}; shorten "
            "the text, or load a smaller model"
        )


def host_bytes(address: int, count: int) -> NDArray[np.uint8]:
    """Memory of this process as uint8[count], valid as long as it is."""
    if not count:
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))
