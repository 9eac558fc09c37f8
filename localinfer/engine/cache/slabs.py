"""Memory in slots of equal size: a slab allocator, and slots of it with reference counts."""

import mmap
import sys
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import OutOfMemoryError
from localinfer.kernels.cpu import guard
from localinfer.kernels.kv_layout import DevicePages

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
        """Make free again what Ctrl-C left neither free nor held, between two lines of who takes or gives back.

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
        """Where a slot lies, aligned to 64 bytes."""
        return int(self.memory.addresses[slot])

    def close(self) -> None:
        """Release all memory."""
        self.memory.close()
        self._counts.clear()
