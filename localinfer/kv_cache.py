"""The positions of one sequence: a table of pages, some of them shared with other sequences or the prefix tree."""

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ClosedError, ContextLengthError
from localinfer.kernels.ops import Segment
from localinfer.kv_window import PageWindow
from localinfer.page_pool import PageNumbers, PagePool

_NO_PAGES = np.zeros(0, np.int64)


class KVCache:
    """Which pages hold the positions of one sequence, and how many positions are valid.

    First `reserve` room, then compute, then `commit`: a computation that fails leaves the cache as it was. `truncate`
    is the one way back, for rejected drafts, edits and new attempts. A page that others hold too is never written:
    `reserve` puts a copy in its place if the next position lies in it.

    window: bounds how many pages are held; `reserve` lets the others go. From then on the sequence is not exact: what
    is computed is not what the model says to all of its text.
    """

    def __init__(self, pool: PagePool, *, max_length: int, window: PageWindow | None = None) -> None:
        self._pool = pool
        self._max_length = max_length
        self._window = window
        self._dropped = 0
        self._last_drop = 0
        self._mass = np.zeros(0 if window is None else pool.num_pages_for(window.max_tokens), np.float32)
        self._pages: PageNumbers = _NO_PAGES
        self._addresses: NDArray[np.int64] = _NO_PAGES
        self._length = 0
        self._closed = False

    @property
    def length(self) -> int:
        """Positions that hold what was computed."""
        return self._length

    @property
    def is_exact(self) -> bool:
        """Whether everything was computed from all positions before it."""
        return not self._dropped

    @property
    def pages(self) -> PageNumbers:
        """int64, one number per page, covering every reserved position that was not dropped; replaced, not changed,
        when they change."""
        return self._pages

    @property
    def page_addresses(self) -> NDArray[np.int64]:
        """int64, where each of `pages` lies in memory; replaced, not changed, when they change."""
        return self._addresses

    def segment(self, num_rows: int) -> Segment:
        """The next `num_rows` positions, which must be reserved, as a batch names them."""
        if self._window is None:
            return Segment(self._length, num_rows, self._addresses)
        return Segment(self._length, num_rows, self._addresses, self._dropped, self._mass[: self._pages.size])

    def reserve(self, length: int) -> None:
        """Make room for positions 0 to length - 1, and the positions after the valid ones writable.

        Raises: ContextLengthError beyond `max_length`; OutOfMemoryError, and then nothing has changed.
        """
        if self._closed:
            raise ClosedError("this sequence was closed; start a new one")
        if length > self._max_length:
            raise ContextLengthError(
                f"position {length} is past the context of {self._max_length} tokens; load the model with a larger "
                "context_length, or shorten the text"
            )
        if self._window is not None and length > self._length:
            self._drop_surplus(self._window)
        pool = self._pool
        tail, offset = divmod(self._length - self._dropped, pool.page_tokens)
        copies_tail = bool(offset) and length > self._length and pool.is_shared(self._pages[tail])
        missing = max(0, pool.num_pages_for(length - self._dropped) - self._pages.size)
        if not missing and not copies_tail:
            return
        fresh = pool.acquire(missing + copies_tail)
        pages = np.concatenate((self._pages, fresh[int(copies_tail) :]))
        if copies_tail:
            pool.copy(int(pages[tail]), int(fresh[0]))
            pages[tail] = fresh[0]
        replaced = self._pages[tail : tail + 1]
        self._set_pages(pages)
        if copies_tail:
            pool.release(replaced)

    def commit(self, length: int) -> None:
        """Declare positions 0 to length - 1 computed; they must be reserved."""
        room = self._dropped + self._pages.size * self._pool.page_tokens
        assert self._length <= length <= room, "commit outside what was reserved"
        self._length = length

    def truncate(self, length: int) -> None:
        """Forget every position from `length` on and let go of pages that hold nothing else."""
        assert length >= 0, "a sequence has no negative length"
        assert length == 0 or length >= self._last_drop, "the way back ends where pages were dropped"
        self._length = min(self._length, length)
        if length == 0:
            self._dropped = self._last_drop = 0
        num_pages = self._pool.num_pages_for(length - self._dropped)
        if num_pages < self._pages.size:
            surplus = self._pages[num_pages:]
            self._mass[num_pages:] = 0
            self._set_pages(self._pages[:num_pages].copy())
            self._pool.release(surplus)

    def adopt(self, pages: PageNumbers, length: int) -> None:
        """Hold these pages, whose first `length` positions are valid for this sequence, in place of its own."""
        assert self._pool.num_pages_for(length) == pages.size, "as many pages as the positions take"
        self._pool.retain(pages)
        former = self._pages
        self._length = self._dropped = self._last_drop = 0
        self._mass[:] = 0
        self._set_pages(pages.copy())
        self._length = length
        self._pool.release(former)

    def fork(self) -> "KVCache":
        """Return a second sequence with the same valid positions; it shares their pages until either writes."""
        twin = KVCache(self._pool, max_length=self._max_length, window=self._window)
        held = self._length - self._dropped
        twin.adopt(self._pages[: self._pool.num_pages_for(held)], held)
        twin._length, twin._dropped, twin._last_drop = self._length, self._dropped, self._last_drop
        twin._mass[:] = self._mass
        return twin

    def close(self) -> None:
        """Let go of every page; may be called again."""
        if not self._closed:
            self.truncate(0)
            self._closed = True

    def _drop_surplus(self, window: PageWindow) -> None:
        """Let go of pages that the window does not keep; the last one, which may not be full, is always kept."""
        num_used = self._pool.num_pages_for(self._length - self._dropped)
        indices = window.surplus(self._mass[:num_used])
        if not indices.size:
            return
        dropped = self._pages[indices]
        mass = np.delete(self._mass, indices)
        self._mass[:] = 0
        self._mass[: mass.size] = mass
        self._last_drop = max(self._last_drop, (int(indices[-1]) + 1) * self._pool.page_tokens + self._dropped)
        self._dropped += indices.size * self._pool.page_tokens
        self._set_pages(np.delete(self._pages, indices))
        self._pool.release(dropped)

    def _set_pages(self, pages: PageNumbers) -> None:
        self._pages = pages
        self._addresses = self._pool.addresses(pages)
