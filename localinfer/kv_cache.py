"""Memory of past positions: a pool of fixed-size pages, and the pages of one sequence.

A page holds `page_tokens` positions of all layers (its inside is the device's business) and is known by its address.
The pool is mechanism only: it hands pages out and takes them back. Which sequence owns which page, and what may be
reused, is decided above it.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ClosedError, ContextLengthError, OutOfMemoryError

ALIGNMENT = 64
_SLAB_BYTES = 16 << 20


class KVLayout(Protocol):
    """Size of a page: `page_bytes`, a multiple of 64, for `page_tokens` positions."""

    @property
    def page_tokens(self) -> int: ...

    @property
    def page_bytes(self) -> int: ...


class PagePool:
    """Pages of one size, allocated in slabs as they are asked for and reused after they are freed.

    `max_bytes` bounds what is ever allocated; None leaves it to the machine. Slabs are zeroed memory that the system
    hands out on first touch, so a page costs nothing before it is written.
    """

    def __init__(self, layout: KVLayout, *, max_bytes: int | None = None) -> None:
        self.page_tokens = layout.page_tokens
        self.page_bytes = layout.page_bytes
        self._max_bytes = max_bytes
        self._slabs: list[NDArray[np.uint8]] = []
        self._free: list[int] = []
        self._num_pages = 0
        self._closed = False

    @property
    def num_pages(self) -> int:
        """Pages allocated, in use or not."""
        return self._num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages allocated and not in use."""
        return len(self._free)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all pages allocated."""
        return self._num_pages * self.page_bytes

    def acquire(self, count: int) -> list[int]:
        """Hand out `count` page addresses, all or none. What a page holds is left from its last use, or zero.

        Raises: OutOfMemoryError if the budget or the machine's memory is exceeded; ClosedError after `close`.
        """
        if self._closed:
            raise ClosedError("the key-value cache was closed with its model; load the model again")
        while len(self._free) < count:
            self._grow(count - len(self._free))
        return [self._free.pop() for _ in range(count)]

    def release(self, addresses: list[int]) -> None:
        """Take pages back; each must have come from `acquire` and be released once."""
        if not self._closed:
            self._free.extend(reversed(addresses))

    def close(self) -> None:
        """Give all memory back; addresses handed out before are invalid from now on."""
        self._closed = True
        self._slabs.clear()
        self._free.clear()
        self._num_pages = 0

    def _grow(self, missing: int) -> None:
        count = max(missing, _SLAB_BYTES // self.page_bytes, 1)
        if self._max_bytes is not None:
            left = self._max_bytes // self.page_bytes - self._num_pages
            if left < missing:
                raise OutOfMemoryError(
                    f"the key-value cache needs {(self._num_pages + missing) * self.page_bytes:,} bytes and may use "
                    f"{self._max_bytes:,}; shorten the text, or allow it more memory"
                )
            count = min(count, left)
        try:
            slab = np.zeros(count * self.page_bytes + ALIGNMENT, np.uint8)
        except MemoryError:
            raise OutOfMemoryError(
                f"the machine has no {count * self.page_bytes:,} bytes for more of the key-value cache, which holds "
                f"{self.allocated_bytes:,}; shorten the text, or load a smaller model"
            ) from None
        first = -(-slab.ctypes.data // ALIGNMENT) * ALIGNMENT
        self._slabs.append(slab)
        self._free.extend(first + index * self.page_bytes for index in reversed(range(count)))
        self._num_pages += count


class KVCache:
    """The positions of one sequence: which pages hold them, and how many are valid.

    First `reserve` room, then compute, then `commit`: a computation that fails leaves the cache as it was. `truncate`
    is the one way back, for rejected drafts, edits and new attempts.
    """

    def __init__(self, pool: PagePool, *, max_length: int) -> None:
        self._pool = pool
        self._max_length = max_length
        self._addresses: NDArray[np.int64] = np.zeros(0, np.int64)
        self._num_pages = 0
        self._length = 0
        self._closed = False

    @property
    def length(self) -> int:
        """Positions that hold what was computed."""
        return self._length

    @property
    def page_addresses(self) -> NDArray[np.int64]:
        """int64, one address per page, covering every reserved position; replaced, not changed, when it grows."""
        return self._addresses

    def reserve(self, length: int) -> None:
        """Make room for positions 0 to length - 1.

        Raises: ContextLengthError beyond `max_length`; OutOfMemoryError, and then nothing has changed.
        """
        if self._closed:
            raise ClosedError("this sequence was closed; start a new one")
        if length <= self._num_pages * self._pool.page_tokens and length <= self._max_length:
            return
        if length > self._max_length:
            raise ContextLengthError(
                f"position {length} is past the context of {self._max_length} tokens; load the model with a larger "
                "context_length, or shorten the text"
            )
        num_pages = -(-length // self._pool.page_tokens)
        fresh = self._pool.acquire(num_pages - self._num_pages)
        self._addresses = np.concatenate((self._addresses, np.array(fresh, np.int64)))
        self._num_pages = num_pages

    def commit(self, length: int) -> None:
        """Declare positions 0 to length - 1 computed; they must be reserved."""
        assert self._length <= length <= self._num_pages * self._pool.page_tokens, "commit outside what was reserved"
        self._length = length

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on and free pages that hold nothing else."""
        assert length >= 0, "a sequence has no negative length"
        self._length = min(self._length, length)
        num_pages = -(-length // self._pool.page_tokens)
        if num_pages < self._num_pages:
            surplus = self._addresses[num_pages:].tolist()
            self._addresses = self._addresses[:num_pages].copy()
            self._num_pages = num_pages
            self._pool.release(surplus)

    def close(self) -> None:
        """Give every page back; may be called again."""
        if not self._closed:
            self.truncate(0)
            self._closed = True
