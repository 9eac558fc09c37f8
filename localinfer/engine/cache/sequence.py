"""The cache of one sequence: a block table of pages, some shared with other sequences or the prefix tree; and the one
way a forward pass goes through it.

Where its memory is bounded (`KVEviction`), it keeps attention sinks, recent pages and heavy hitters. The first page
holds the attention sinks (StreamingLLM, arXiv 2309.17453); of the pages between it and the recent half, those stay that
got most attention so far (heavy hitters as in H2O, arXiv 2306.14048, for all heads and layers together and by whole
pages). Kept pages keep their positions, so nothing is rotated again, and the context's end is unchanged. This is an
approximation: what is computed after a page was dropped is not what the model says to the whole text.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_pool import BoolArray, PageNumbers, PagePool
from localinfer.engine.cache.sequence_state import BEGINNING, NO_SLOT, SequenceState, Settle, SnapshotPolicy, StatePlace
from localinfer.engine.media import PlacedMedia
from localinfer.errors import ClosedError, ContextLengthError, OutOfMemoryError, RequestError
from localinfer.kernels.program import Batch, Segment
from localinfer.types import Record

_NO_PAGES = np.zeros(0, np.int64)
Results = TypeVar("Results")

LEAST_KV_WINDOW = 128
"""Below this there is no page between the first and the recent ones."""


class KVEviction(Record):
    """Bound of the positions that a sequence holds between two batches: at most `tokens`, in whole pages."""

    tokens: int
    page_tokens: int
    batch_tokens: int
    """The most that one batch adds, so that `max_tokens` is what a sequence ever holds."""
    sink_pages: int = 1
    """Pages kept at the beginning."""
    recent_share: float = 0.5
    """Share of all pages that are kept at the end; the others are for heavy hitters."""

    def __post_init__(self) -> None:
        if self.tokens < LEAST_KV_WINDOW:
            raise RequestError(
                f"kv_window is {self.tokens} tokens; it must be at least {LEAST_KV_WINDOW}: a page at the start, "
                "recent ones, and one between"
            )

    @property
    def num_pages(self) -> int:
        """Pages kept between two batches."""
        return self.tokens // self.page_tokens

    @property
    def recent_pages(self) -> int:
        """Pages at the end that are always kept."""
        return min(math.ceil(self.recent_share * self.num_pages), self.num_pages - self.sink_pages)

    @property
    def max_tokens(self) -> int:
        """Positions that a sequence ever holds memory for."""
        return (self.num_pages + 1) * self.page_tokens + self.batch_tokens

    @property
    def most_tokens(self) -> int:
        """Positions that memory is held for while a text runs: its own, and at most as many of its beginning, which the
        prefix cache keeps."""
        return 2 * self.max_tokens

    def surplus(self, attention_sums: NDArray[np.float32]) -> NDArray[np.int64]:
        """Indices, in order, of the pages to drop of a sequence whose pages got this much attention, float32[n]."""
        count = attention_sums.size - self.num_pages
        if count <= 0:
            return np.zeros(0, np.int64)
        between = attention_sums[self.sink_pages : attention_sums.size - self.recent_pages]
        # Of pages without attention, the oldest goes first.
        lightest = np.argsort(between, kind="stable")[:count]
        return np.sort(lightest) + self.sink_pages


class SequenceCache:
    """Block table of one sequence: pages with its positions, and the number of valid ones.

    First `reserve`, then compute, then `commit` (`forward` does all three): a computation that fails leaves the cache
    as it was. `truncate` is the rollback, for rejected drafts, edits and retries. A shared page is never written:
    `reserve` replaces it by a copy if the next position lies in it (copy on write).

    Recurrent layers have states of one position only, so a rollback ends at the deepest length whose states are held:
    exactly where it was asked to, among the rows that the last step may drop, at the length before the
    last step, and at lengths given to `keep_state`; else before.

    `reserve` frees the sliding-window blocks that the next position no longer sees, except before positions given to
    `pin_window`, so a rollback ends at most a page before the length last reserved from.

    length: positions that hold what was computed. pages: int64, one number per page, covering every reserved position
    that was not dropped. windowed: bool[pages], which are held with their sliding-window block; all, for a model
    without such layers. page_addresses: int64[pages], windowed_addresses: the same of the sliding-window blocks, 0
    where one is not held, None without such layers. These arrays are replaced, never changed.

    window: bounds how many pages are held; `reserve` drops the others. From then on the sequence is not exact: it is
    an approximation of what the model says to the whole text. keeps_unseen: nothing is freed and every rollback is
    possible, as measuring needs it. policy: which snapshots are taken, once `want_snapshots` was called. num_turns: how
    often the text that it continues was continued. has_shared_prefix: whether another text has its system prefix.
    media: the pictures and sounds of its text, computed or not; None if it has none. row_type: token type of its rows.

    For models with draft layers it carries the hidden states of the last position, which only decide how well is
    drafted. They are unknown where it resumes from a cached prefix, and after a rollback that `carry` does not follow:
    `forward` then computes the last position once more beside the next ones, and stores it aside. Where it cannot (no
    memory or room, sliding-window blocks that are gone), they are zeros.
    """

    _closed = True

    def __init__(
        self,
        pool: PagePool,
        *,
        max_length: int,
        window: KVEviction | None = None,
        keeps_unseen: bool = False,
        policy: SnapshotPolicy | None = None,
    ) -> None:
        self.length = 0
        self.num_turns = 0
        self.has_shared_prefix = False
        self.media: PlacedMedia | None = None
        self.row_type = 0
        self.pages: PageNumbers = _NO_PAGES
        self.windowed: BoolArray = np.zeros(0, np.bool_)
        self.page_addresses: NDArray[np.int64] = _NO_PAGES
        self.windowed_addresses: NDArray[np.int64] | None = None
        self._pool = pool
        self._page_tokens = pool.page_tokens
        self._frees_unseen = pool.sliding.tokens > 0 and not keeps_unseen
        self._max_length = max_length
        self._window = window
        self._dropped = 0
        self._last_drop = 0
        self._attention_sums = np.zeros(0 if window is None else pool.num_pages_for(window.max_tokens), np.float32)
        self._first_windowed = 0
        self._pinned: tuple[int, ...] = ()
        self._has_states = pool.has_states
        self._carried = _carried_rows(pool.carried_size) if pool.carried_size else None
        self._carries = False
        self._aside = _NO_PAGES
        self._policy = policy
        self._state = SequenceState(pool, policy)
        self._closed = False
        pool.sequences.add(self)

    def __del__(self) -> None:
        # Ctrl-C may come between any two lines of what hands a sequence on or closes it. Any thread may run this, so it
        # is closed later, under the step lock.
        if not self._closed and not self._pool.is_closed:
            self._pool.abandoned.add(self)

    @property
    def is_exact(self) -> bool:
        """True if everything was computed from all positions before it."""
        return not self._dropped

    @property
    def state_slots(self) -> set[int]:
        """Slots of recurrent states that it holds."""
        return self._state.slots() if self._has_states else set()

    @property
    def log_slots(self) -> set[int]:
        """Slots of logs that it holds."""
        return self._state.logs() if self._has_states else set()

    @property
    def snapshots(self) -> dict[int, int]:
        """Slots of snapshots by position that were taken, and not handed over by `forget_snapshots` yet."""
        return dict(self._state.taken)

    def segment(self, num_rows: int, num_droppable: int = 0, *, repeats_last: bool = False) -> Segment:
        """The next `num_rows` positions, which must be reserved, as a batch names them.

        repeats_last: and the one before them first; only after `repeat_last` said so.
        """
        attention_sums = None if self._window is None else self._attention_sums[: self.pages.size]
        step = self._state.step(num_rows, is_logged=num_droppable > 0) if self._has_states else None
        carried = (0, 0)
        if self._carried is not None:
            before, after = self._carried.ctypes.data, self._carried[1].ctypes.data
            carried = (before if self._carries else 0, after)
        if repeats_last:
            segment = Segment(
                self.length - 1,
                num_rows + 1,
                self.page_addresses,
                windowed_addresses=self.windowed_addresses,
                carried=(0, carried[1]),
                aside=self._tables_aside(),
            )
        else:
            segment = Segment(
                self.length,
                num_rows,
                self.page_addresses,
                self._dropped,
                attention_sums,
                self.windowed_addresses,
                step,
                carried=carried,
            )
        return segment if self.media is None else self.media.on_rows(segment)

    @property
    def lacks_carried(self) -> bool:
        """True if draft layers would read zeros for hidden states that could be computed; see `repeat_last`."""
        return self._carried is not None and not (self._carries or self._has_states or self._dropped or not self.length)

    def repeat_last(self) -> bool:
        """Prepare to compute the last position once more, for its hidden states, if they are wanted and it can be.

        What it stores goes to a copy of its page, which is dropped with the next `commit`.
        """
        length = self.length
        tail = (length - 1) // self._page_tokens
        if not self.lacks_carried or not self.windowed[tail] or not self.can_truncate(length - 1):
            return False
        try:
            self._aside = self._aside if self._aside.size else self._pool.acquire(1)
        except OutOfMemoryError:
            return False
        self._pool.copy(int(self.pages[tail]), int(self._aside[0]))
        return True

    def _tables_aside(self) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
        pages, windowed = self.pages.copy(), self.windowed.copy()
        tail = (self.length - 1) // self._page_tokens
        pages[tail] = self._aside[0]
        return self._pool.addresses(pages), self._pool.windowed_addresses(pages, windowed)

    def _drop_aside(self) -> None:
        aside, self._aside = self._aside, _NO_PAGES
        if aside.size:
            self._pool.release(aside)

    def draft_segment(self, index: int, hidden: NDArray[np.float32] | None) -> Segment:
        """One row of a draft layer, `index` positions after the last valid one, whose page must be reserved.

        hidden: hidden states of the position before it, in memory of whole vectors; None for those that are carried.
        """
        carried = self._carried[0] if hidden is None and self._carried is not None and self._carries else hidden
        place = 0 if carried is None else carried.ctypes.data
        segment = Segment(
            self.length + index, 1, self.page_addresses, windowed_addresses=self.windowed_addresses, carried=(place, 0)
        )
        return segment if self.media is None else self.media.on_rows(segment)

    def carry(self, hidden: NDArray[np.float32]) -> None:
        """Carry these hidden states of the last valid position, float32[hidden_size].

        After some positions were dropped, or where the model's steps leave none with the sequence.
        """
        if self._carried is None:
            self._carried = _carried_rows(hidden.size)
        self._carried[0, : hidden.size] = hidden
        self._carries = True

    def want_snapshots(self, *places: int, parting: int | None = None, needed: int | None = None) -> None:
        """Take snapshots of recurrent states at these positions too, for other sequences, and on a sparse grid.

        parting: where the text parts from others, in place of where it did before. needed: where a text continues in
        any case.
        """
        if self._has_states:
            self._state.want_snapshots(places, parting, needed)

    def forget_snapshots(self, positions: Sequence[int]) -> None:
        """Release snapshots that the prefix tree holds now."""
        self._state.forget_taken(positions)

    def snapshot_end(self, settle: Settle | None) -> None:
        """Take a snapshot at the end, or, without memory for it, where the log before the end begins."""
        if self._has_states and self.is_exact:
            self._state.take_end(settle)

    def keep_state(self) -> None:
        """Let `truncate` come back to the present length, in place of the one this was last called at."""
        if self._has_states:
            self._state.keep_present()

    def pin_window(self, parting: int, *ends: int) -> None:
        """Keep the sliding-window blocks that continuing from these lengths needs, for other sequences.

        parting: where the text parts from others. ends: of what it may share with more; those given before, if none.
        """
        self._pinned = (parting, *(ends or self._pinned[1:]))

    def free_out_of_window(self) -> None:
        """Free the sliding-window blocks that the next position does not see."""
        if not self._frees_unseen:
            return
        sliding = self._pool.sliding
        first = sliding.first_page(self.length - self._dropped)
        if first <= self._first_windowed:
            return
        self._first_windowed = first
        # Once pages were dropped, positions are not page offsets any more, and no other sequence continues from here.
        pinned = () if self._dropped else self._pinned
        unseen = self.windowed & ~sliding.kept(self.pages.size, self.length - self._dropped, *pinned)
        if unseen.any():
            pages = self.pages[unseen]
            self._set_pages(self.pages, self.windowed & ~unseen)
            self._pool.release_windowed(pages)

    def reserve(self, length: int, num_droppable: int = 0) -> None:
        """Allocate positions 0 to length - 1, and make the positions after the valid ones writable.

        num_droppable: how many of the last positions of the next step `truncate` may drop.
        Raises: ContextLengthError beyond `max_length`; OutOfMemoryError, and then nothing has changed.
        """
        if self._closed:
            raise ClosedError("this sequence was closed; start a new one")
        if length > self._max_length:
            raise ContextLengthError(
                f"position {length} is past the context of {self._max_length} tokens; load the model with a larger "
                "context_length, or shorten the text"
            )
        if length > self.length:
            if self._window is not None:
                self._drop_surplus(self._window)
            if self._frees_unseen:
                self.free_out_of_window()
            if self._has_states:
                self._state.reserve(is_logged=num_droppable > 0)
        self.reserve_pages(length)

    def reserve_pages(self, length: int) -> None:
        """Reserve as `reserve` does, for what has no states and drops nothing, such as rows of draft layers."""
        if length > self._max_length:
            raise ContextLengthError(f"position {length} is past the context of {self._max_length} tokens")
        # Every decoded token passes here: no calls where nothing has to be done.
        pool, page_tokens = self._pool, self._page_tokens
        tail, offset = divmod(self.length - self._dropped, page_tokens)
        first_free = tail + (offset > 0)
        if self.pages.size > first_free and length > self.length and (pool.counts[self.pages[first_free:]] > 1).any():
            # Ctrl-C came between going back and giving up these pages, which others share.
            self._free_pages_after(self.length)
        copies_tail = offset > 0 and length > self.length and pool.counts[self.pages[tail]] > 1
        missing = -(-(length - self._dropped) // page_tokens) - self.pages.size
        if missing <= 0 and not copies_tail:
            return
        missing = max(0, missing)
        fresh = pool.acquire(missing + bool(copies_tail))
        pages = np.concatenate((self.pages, fresh[int(copies_tail) :]))
        windowed = np.concatenate((self.windowed, np.ones(missing, np.bool_)))
        if copies_tail:
            pool.copy(int(pages[tail]), int(fresh[0]))
            pages[tail] = fresh[0]
        replaced = self.pages[tail : tail + 1]
        self._set_pages(pages, windowed)
        if copies_tail:
            pool.release(replaced)

    def commit(self, length: int) -> None:
        """Declare positions 0 to length - 1 computed; they must be reserved."""
        reserved = self._dropped + self.pages.size * self._page_tokens
        assert self.length <= length <= reserved, "commit outside what was reserved"
        state = self._state
        if self._carried is not None and length > self.length:
            self._carried[0] = self._carried[1]
            self._carries = True
            self._drop_aside()
        if not self._has_states or length == self.length:
            self.length = length
            return
        after = state.after_step(length)
        # In one line, which Ctrl-C cannot part; so below.
        self.length, (state.now, state.before, state.next_state, state.next_log) = length, after
        state.finish_step()

    def truncate(self, length: int) -> int:
        """Forget every position from `length` on, or from before it where recurrent states are not held for it, and
        free pages that hold nothing else; return the length that is left."""
        assert length >= 0, "a sequence has no negative length"
        self._carries = self._carries and length >= self.length
        self._drop_aside()
        if self._has_states and length < self.length:
            return self._truncate_to_states(length)
        assert length == 0 or length >= self._last_drop, "no rollback to before where pages were dropped"
        assert self.can_truncate(length), "no rollback to where sliding-window blocks were freed"
        self.length = min(self.length, length)
        self._free_pages_after(length)
        return self.length

    def can_truncate(self, length: int) -> bool:
        """True if the sliding-window blocks that continuing from `length` needs are still held."""
        if length == 0:
            return True
        held = length - self._dropped
        return self._pool.sliding.usable_length(self.windowed[: self._pool.num_pages_for(held)], held) == held

    def _truncate_to_states(self, length: int) -> int:
        state = self._state
        place = state.place_at(length, lambda there: there >= self._last_drop and self.can_truncate(there))
        state.retain(place)
        left, former, before = place.length, state.now, state.before
        state.forget_after(left)
        self.length, state.now, state.before = left, place, None
        state.release(former, before)
        self._free_pages_after(left)
        return left

    def _free_pages_after(self, length: int) -> None:
        if length == 0:
            self._dropped = self._last_drop = 0
        num_pages = self._pool.num_pages_for(length - self._dropped)
        if num_pages < self.pages.size:
            surplus, windowed = self.pages[num_pages:], self.windowed[num_pages:]
            self._attention_sums[num_pages:] = 0
            self._first_windowed = 0
            self._set_pages(self.pages[:num_pages].copy(), self.windowed[:num_pages].copy())
            self._pool.release(surplus, windowed)

    def adopt(self, pages: PageNumbers, length: int, windowed: BoolArray | None = None, state: int = NO_SLOT) -> None:
        """Share these pages, whose first `length` positions are valid for this sequence, in place of its own.

        windowed: bool[pages], which of them have their sliding-window block; None for all. Unneeded ones
        are not held. state: slot of the recurrent states after these positions.
        """
        assert not self._has_states or state != NO_SLOT, "a sequence continues from states"
        assert self._pool.num_pages_for(length) == pages.size, "as many pages as the positions take"
        windowed = np.ones(pages.size, np.bool_) if windowed is None else windowed
        windowed = windowed & self._pool.sliding.kept(pages.size, length, *self._pinned)
        self._carries = False
        self._drop_aside()
        self._hold(pages.copy(), length, windowed, StatePlace(state, length) if self._has_states else BEGINNING)
        if self._has_states:
            self._state.share_snapshot(state, length, is_inside_page=length % self._page_tokens != 0)

    def fork(self) -> "SequenceCache":
        """Return a second sequence with the same valid positions; it shares their pages until either writes."""
        twin = SequenceCache(self._pool, max_length=self._max_length, window=self._window, policy=self._policy)
        held = self.length - self._dropped
        num_pages = self._pool.num_pages_for(held)
        twin._hold(self.pages[:num_pages].copy(), held, self.windowed[:num_pages].copy(), BEGINNING)
        twin._state.fork_from(self._state)
        twin._pinned, twin.media, twin.row_type = self._pinned, self.media, self.row_type
        twin.length, twin._dropped, twin._last_drop = self.length, self._dropped, self._last_drop
        twin._attention_sums[:] = self._attention_sums
        if self._carried is not None and twin._carried is not None:
            twin._carried[:], twin._carries = self._carried, self._carries
        return twin

    def close(self) -> None:
        """Release every page; may be called again, as `PagePool.recover` does where Ctrl-C ended it."""
        if not self._closed:
            self.truncate(0)
            self._state.release_reserved()
            self._pool.sequences.discard(self)
            self._closed = True

    def _hold(self, pages: PageNumbers, length: int, windowed: BoolArray, place: StatePlace) -> None:
        self._pool.retain(pages, windowed)
        state = self._state
        state.retain(place)
        state.forget_after(length)
        former, former_windowed, former_places = self.pages, self.windowed, (state.now, state.before)
        self.length, state.now, state.before = 0, BEGINNING, None
        self._dropped = self._last_drop = self._first_windowed = 0
        self._attention_sums[:] = 0
        self._set_pages(pages, windowed)
        self.length, state.now = length, place
        self._pool.release(former, former_windowed)
        state.release(*former_places)

    def _drop_surplus(self, window: KVEviction) -> None:
        """Drop the pages that the window does not keep; the last one, which may not be full, is always kept."""
        num_used = self._pool.num_pages_for(self.length - self._dropped)
        indices = window.surplus(self._attention_sums[:num_used])
        if not indices.size:
            return
        dropped, windowed = self.pages[indices], self.windowed[indices]
        attention_sums = np.delete(self._attention_sums, indices)
        self._attention_sums[:] = 0
        self._attention_sums[: attention_sums.size] = attention_sums
        self._last_drop = max(self._last_drop, (int(indices[-1]) + 1) * self._page_tokens + self._dropped)
        self._dropped += indices.size * self._page_tokens
        self._first_windowed = 0
        self._set_pages(np.delete(self.pages, indices), np.delete(self.windowed, indices))
        self._pool.release(dropped, windowed)

    def _set_pages(self, pages: PageNumbers, windowed: BoolArray) -> None:
        addresses = self._pool.addresses(pages)
        windowed_addresses = self._pool.windowed_addresses(pages, windowed)
        # On consecutive lines without a call between them, which Ctrl-C cannot part.
        self.pages, self.windowed = pages, windowed
        self.page_addresses, self.windowed_addresses = addresses, windowed_addresses


def _carried_rows(size: int) -> NDArray[np.float32]:
    """Two rows of hidden states, whole vectors each: those before the next position, and where a step puts the next."""
    return np.zeros((2, -(-size // 16) * 16), np.float32)


def forward(
    run: Callable[[Batch], Results],
    sequences: Sequence[SequenceCache],
    token_ids: Sequence[NDArray[np.int32]],
    output_rows: NDArray[np.int32],
    num_droppable: Sequence[int] | None = None,
    tokens_before: Sequence[int | None] | None = None,
    token_types: NDArray[np.int32] | None = None,
) -> Results:
    """Compute the next positions of some sequences in one batch: reserve them, run, commit.

    run: a program's `run`, or what else computes a batch; where it answers None, nothing is committed. token_ids:
    int32[n], one array per sequence. output_rows: int32, rows of the batch whose results are wanted. num_droppable: per
    sequence, how many of its last rows may be dropped by `truncate` afterwards, such as a draft's; None for none.
    tokens_before: per sequence the token at its last position, if there is room for a row more in the batch; see
    `SequenceCache.repeat_last`. token_types: of all rows, for models that have some and repeat none; None for those of
    the sequences.
    Returns: what `run` does, valid until its next call. Raises: as `SequenceCache.reserve` and `run`.
    """
    segments: list[Segment] = []
    repeated: list[int] = []
    num_rows, given, is_typed = 0, list(token_ids), False
    for index, (sequence, ids) in enumerate(zip(sequences, token_ids, strict=True)):
        droppable = 0 if num_droppable is None else num_droppable[index]
        sequence.reserve(sequence.length + ids.size, droppable)
        before = None if tokens_before is None else tokens_before[index]
        repeats_last = before is not None and sequence.repeat_last()
        if repeats_last:
            given[index] = np.concatenate((np.array([before], np.int32), ids))
            repeated.append(num_rows)
        num_rows += ids.size
        is_typed |= sequence.row_type > 0
        segments.append(sequence.segment(ids.size, droppable, repeats_last=repeats_last))
    if repeated:
        # Each row has those before it that are computed once more.
        output_rows = output_rows + np.searchsorted(repeated, output_rows, "right").astype(np.int32)
    if is_typed:
        types = [sequence.row_type for sequence in sequences]
        token_types = np.repeat(np.array(types, np.int32), [segment.num_rows for segment in segments])
    joined = given[0] if len(given) == 1 else np.concatenate(given)
    results = run(Batch(joined, segments, output_rows, token_types))
    if results is not None:
        for sequence, segment in zip(sequences, segments, strict=True):
            sequence.commit(segment.start_position + segment.num_rows)
    return results
