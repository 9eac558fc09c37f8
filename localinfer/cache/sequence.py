"""The positions of one sequence: a table of pages, some of them shared with other sequences or the prefix tree."""

import numpy as np
from numpy.typing import NDArray

from localinfer.cache.block_pool import PageNumbers, PagePool
from localinfer.cache.eviction import KVEviction
from localinfer.cache.sliding_window import BoolArray
from localinfer.errors import ClosedError, ContextLengthError
from localinfer.kernels.program import Segment

_NO_PAGES = np.zeros(0, np.int64)
_NONE_WINDOWED = np.zeros(0, np.bool_)


class SequenceCache:
    """Which pages hold the positions of one sequence, and how many positions are valid.

    First `reserve` room, then compute, then `commit`: a computation that fails leaves the cache as it was. `truncate`
    is the one way back, for rejected drafts, edits and new attempts. A page that others hold too is never written:
    `reserve` puts a copy in its place if the next position lies in it.

    Of pages that layers with a sliding window see no more, `reserve` lets those layers' part go, except before places
    that `pin_window` was told of. So the way back ends at most a page before what was reserved from last.

    window: bounds how many pages are held; `reserve` lets the others go. From then on the sequence is not exact: what
    is computed is not what the model says to all of its text. keeps_unseen: nothing is let go of, and every way back is
    open, as measuring needs it.
    """

    def __init__(
        self, pool: PagePool, *, max_length: int, window: KVEviction | None = None, keeps_unseen: bool = False
    ) -> None:
        self._pool = pool
        self._keeps_unseen = keeps_unseen
        self._max_length = max_length
        self._window = window
        self._dropped = 0
        self._last_drop = 0
        self._mass = np.zeros(0 if window is None else pool.num_pages_for(window.max_tokens), np.float32)
        self._pages: PageNumbers = _NO_PAGES
        self._windowed: BoolArray = _NONE_WINDOWED
        self._addresses: NDArray[np.int64] = _NO_PAGES
        self._windowed_addresses: NDArray[np.int64] | None = None
        self._first_windowed = 0
        self._places: tuple[int, ...] = ()
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
    def windowed(self) -> BoolArray:
        """bool, which of `pages` are held with their windowed part: all, for a model without such layers."""
        return self._windowed

    @property
    def page_addresses(self) -> NDArray[np.int64]:
        """int64, where each of `pages` lies in memory; replaced, not changed, when they change."""
        return self._addresses

    @property
    def windowed_addresses(self) -> NDArray[np.int64] | None:
        """int64, where the windowed part of each of `pages` lies, 0 where it is not held; None without such layers."""
        return self._windowed_addresses

    def segment(self, num_rows: int) -> Segment:
        """The next `num_rows` positions, which must be reserved, as a batch names them."""
        mass = None if self._window is None else self._mass[: self._pages.size]
        return Segment(self._length, num_rows, self._addresses, self._dropped, mass, self._windowed_addresses)

    def pin_window(self, parting: int, *ends: int) -> None:
        """Keep what is needed to go on from these lengths too, for others that may.

        parting: where the text parts from others. ends: of what it may share with more; those told before, if none are.
        """
        self._places = (parting, *(ends or self._places[1:]))

    def free_out_of_window(self) -> None:
        """Let go of the windowed part of pages that the next position does not see."""
        sliding = self._pool.sliding
        first = sliding.first_page(self._length - self._dropped)
        if first <= self._first_windowed or self._keeps_unseen:
            return
        self._first_windowed = first
        # Positions and pages part ways once pages were dropped, and nobody goes on from such a text.
        places = () if self._dropped else self._places
        unseen = self._windowed & ~sliding.kept(self._pages.size, self._length - self._dropped, *places)
        if unseen.any():
            pages = self._pages[unseen]
            self._set_pages(self._pages, self._windowed & ~unseen)
            self._pool.release_windowed(pages)

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
        if length > self._length:
            self.free_out_of_window()
        pool = self._pool
        tail, offset = divmod(self._length - self._dropped, pool.page_tokens)
        copies_tail = bool(offset) and length > self._length and pool.is_shared(self._pages[tail])
        missing = max(0, pool.num_pages_for(length - self._dropped) - self._pages.size)
        if not missing and not copies_tail:
            return
        fresh = pool.acquire(missing + copies_tail)
        pages = np.concatenate((self._pages, fresh[int(copies_tail) :]))
        windowed = np.concatenate((self._windowed, np.ones(missing, np.bool_)))
        if copies_tail:
            pool.copy(int(pages[tail]), int(fresh[0]))
            pages[tail] = fresh[0]
        replaced = self._pages[tail : tail + 1]
        self._set_pages(pages, windowed)
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
        assert self.can_truncate(length), "the way back ends where windowed layers let go"
        self._length = min(self._length, length)
        if length == 0:
            self._dropped = self._last_drop = 0
        num_pages = self._pool.num_pages_for(length - self._dropped)
        if num_pages < self._pages.size:
            surplus, windowed = self._pages[num_pages:], self._windowed[num_pages:]
            self._mass[num_pages:] = 0
            self._first_windowed = 0
            self._set_pages(self._pages[:num_pages].copy(), self._windowed[:num_pages].copy())
            self._pool.release(surplus, windowed)

    def can_truncate(self, length: int) -> bool:
        """Whether the windowed layers still have what a way back to `length` needs."""
        if length == 0:
            return True
        held, num_pages = length - self._dropped, self._pool.num_pages_for(length - self._dropped)
        return self._pool.sliding.usable_length(self._windowed[:num_pages], held) == held

    def adopt(self, pages: PageNumbers, length: int, windowed: BoolArray | None = None) -> None:
        """Hold these pages, whose first `length` positions are valid for this sequence, in place of its own.

        windowed: bool[pages], which of them have their windowed part; None for all. What is not needed is not held.
        """
        assert self._pool.num_pages_for(length) == pages.size, "as many pages as the positions take"
        windowed = np.ones(pages.size, np.bool_) if windowed is None else windowed
        windowed = windowed & self._pool.sliding.kept(pages.size, length, *self._places)
        self._hold(pages.copy(), length, windowed)

    def _hold(self, pages: PageNumbers, length: int, windowed: BoolArray) -> None:
        self._pool.retain(pages, windowed)
        former, former_windowed = self._pages, self._windowed
        self._length = self._dropped = self._last_drop = self._first_windowed = 0
        self._mass[:] = 0
        self._set_pages(pages, windowed)
        self._length = length
        self._pool.release(former, former_windowed)

    def fork(self) -> "SequenceCache":
        """Return a second sequence with the same valid positions; it shares their pages until either writes."""
        twin = SequenceCache(self._pool, max_length=self._max_length, window=self._window)
        held = self._length - self._dropped
        num_pages = self._pool.num_pages_for(held)
        twin._hold(self._pages[:num_pages].copy(), held, self._windowed[:num_pages].copy())
        twin._places = self._places
        twin._length, twin._dropped, twin._last_drop = self._length, self._dropped, self._last_drop
        twin._mass[:] = self._mass
        return twin

    def close(self) -> None:
        """Let go of every page; may be called again."""
        if not self._closed:
            self.truncate(0)
            self._closed = True

    def _drop_surplus(self, window: KVEviction) -> None:
        """Let go of pages that the window does not keep; the last one, which may not be full, is always kept."""
        num_used = self._pool.num_pages_for(self._length - self._dropped)
        indices = window.surplus(self._mass[:num_used])
        if not indices.size:
            return
        dropped, windowed = self._pages[indices], self._windowed[indices]
        mass = np.delete(self._mass, indices)
        self._mass[:] = 0
        self._mass[: mass.size] = mass
        self._last_drop = max(self._last_drop, (int(indices[-1]) + 1) * self._pool.page_tokens + self._dropped)
        self._dropped += indices.size * self._pool.page_tokens
        self._first_windowed = 0
        self._set_pages(np.delete(self._pages, indices), np.delete(self._windowed, indices))
        self._pool.release(dropped, windowed)

    def _set_pages(self, pages: PageNumbers, windowed: BoolArray) -> None:
        addresses = self._pool.addresses(pages)
        windowed_addresses = self._pool.windowed_addresses(pages, windowed)
        # In one line, for Ctrl-C must not part them.
        self._pages, self._windowed = pages, windowed
        self._addresses, self._windowed_addresses = addresses, windowed_addresses
