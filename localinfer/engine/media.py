"""Pictures and sounds in a prompt: runs of token ids that no vocabulary has, with the embeddings they stand for.

The ids of a run are negative numbers made of its content and its encoder, so that the prefix tree, pages on disk and
session files treat a picture as they do words: equal ids are equal pictures, now and after a restart.

A prompt is its ids and its runs in order. `PlacedMedia` knows where the runs stand in a text, and so what a batch is
told of any of its rows: embeddings, positions for rotation, and which later rows a row sees; and where the text may be
cut. Embeddings are computed where rows have to be, and kept by `EmbeddingStore`, within bytes, over an `EmbeddingTier`.
"""

import hashlib
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.errors import RequestError, TokenIdError
from localinfer.kernels.ops import NUM_AXES
from localinfer.kernels.program import MediaRows, Segment
from localinfer.types import FloatArray, TokenIds

Check = Callable[[], None]
"""Raises an exception if what calls it now and then is to end."""

FEWEST_ROWS = 5
"""Rows of a run from which on its ids tell it from every other: 31 bits a row, so 155. Of shorter ones `ShortRuns` says
what their ids stand for."""
_SHORT_IDS = 1 << 24
"""Ids of short runs: those from -2^31 on. No other run begins with one of them."""
_MOST_SHORT_IDS = 1 << 16
"""Ids whose contents are kept, some 20 MB; of more, short runs are not taken from the cache."""


@dataclass(frozen=True, eq=False)
class MediaRun:
    """Rows of one encoder input in a prompt."""

    ids: NDArray[np.int32]
    """int32[rows], see `media_ids`."""
    embed: Callable[[Check], FloatArray]
    """Computes the embeddings, float32[rows, width], an array that is never written again; called only where rows have
    to be computed. What it is given is called now and then meanwhile, and ends it by raising."""
    grid: tuple[int, int] | None
    """Rows and columns of the embeddings, for rotary positions in several dimensions; None elsewhere."""
    num_positions: int
    """Positions that it takes."""
    sees_itself: bool
    """True if its rows see each other in both directions, so that they are computed in one batch."""
    name: str = ""
    """Its name in reasons of cache misses, such as "picture 2"; empty for its number among all."""
    passes_windows: bool = False
    """True if its rows see each other in layers with a sliding window too, however far they lie apart."""
    content: bytes = b""
    """Its `media_content`, which a short run needs to be taken from the cache; empty if it is not known."""

    @property
    def is_short(self) -> bool:
        """True if its ids alone do not tell it from others."""
        return self.ids.size < FEWEST_ROWS


def media_content(identity: bytes, digest: bytes) -> bytes:
    """The SHA-256 of an encoder's identity and of the digest of its input, from which the ids of its rows are made."""
    return hashlib.sha256(len(identity).to_bytes(8, "little") + identity + digest).digest()


def media_ids(identity: bytes, digest: bytes, num_rows: int) -> NDArray[np.int32]:
    """The ids int32[num_rows] of the rows of an encoder input: 31 bits of a SHA-256 each, less 2^31, and never -1,
    which stands for no token; of a short run 24 bits each.

    identity: of the encoder. digest: of its input.
    """
    key = media_content(identity, digest)
    blocks = (hashlib.sha256(key + index.to_bytes(8, "little")).digest() for index in range(-(-num_rows // 8)))
    words = np.frombuffer(b"".join(blocks), "<u4")[:num_rows] | np.uint32(1 << 31)
    if num_rows < FEWEST_ROWS:
        words &= np.uint32(1 << 31 | _SHORT_IDS - 1)
    elif words[0] < (1 << 31) + _SHORT_IDS:
        words[0] |= np.uint32(1 << 30)
    return np.minimum(words.view(np.int32), -2)


class ShortRuns:
    """The contents that the ids of short runs stand for; any thread may ask.

    An id stands for one row of one content as long as the process lives, for each salt by itself, so that equal ids in
    memory are equal pictures although their bits are few. A run one of whose ids is another's is not taken from the
    cache. Where ids leave the process, as in the keys of pages on disk and in session files, the contents go with them.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[bytes, int], tuple[bytes, int] | None] = {}
        self._lock = threading.Lock()

    def bind(self, ids: TokenIds, content: bytes, salt: bytes) -> bool:
        """Let ids stand for the rows of a content; False where one stands for another, or too many stand for some."""
        if not content:
            return False
        rows = {(salt, token_id): (content, row) for row, token_id in enumerate(ids.tolist())}
        with self._lock:
            known = [self._rows.get(key, row) for key, row in rows.items()]
            has_room = len(self._rows) + len(rows) <= _MOST_SHORT_IDS or all(key in self._rows for key in rows)
            if not has_room or len(rows) < ids.size or known != list(rows.values()):
                return False
            self._rows.update(rows)
        return True

    def contents(self, token_ids: TokenIds, salt: bytes) -> bytes:
        """The places in a part of a text that ids of short runs have, and what they stand for; empty without any."""
        parts = []
        for place, token_id in zip(*(one.tolist() for one in _short_ids(token_ids)), strict=True):
            known = self._rows.get((salt, token_id))
            if known is not None:
                parts.append(place.to_bytes(8, "little") + known[1].to_bytes(8, "little") + known[0])
        return b"".join(parts)

    def named(self, token_ids: TokenIds, salt: bytes) -> dict[int, tuple[bytes, int]]:
        """The ids of short runs in a text, with the content and row that each stands for."""
        found = {token_id: self._rows.get((salt, token_id)) for token_id in _short_ids(token_ids)[1].tolist()}
        return {token_id: row for token_id, row in found.items() if row is not None}

    def learn(self, token_ids: TokenIds, names: Mapping[int, tuple[bytes, int]], salt: bytes) -> int:
        """Let ids of a text stand for what another process says they do, as `named`, and keep its other ids from short
        runs; returns how many ids there are up to the first that stands for something else here."""
        places, short = _short_ids(token_ids)
        with self._lock:
            for place, token_id in zip(places.tolist(), short.tolist(), strict=True):
                row = names.get(token_id)
                if self._rows.setdefault((salt, token_id), row) != row:
                    return int(place)
        return token_ids.size


def _short_ids(token_ids: TokenIds) -> tuple[NDArray[np.int64], TokenIds]:
    """The places in a text whose ids may be those of short runs, and those ids."""
    places = np.flatnonzero(token_ids < _SHORT_IDS - (1 << 31))
    return places, token_ids[places]


def join_pieces(pieces: Sequence[Sequence[int] | NDArray[np.integer] | MediaRun]) -> tuple[TokenIds, list[MediaRun]]:
    """The ids of a prompt, int32[T], and its runs in order, from ids of words and runs as they follow each other."""
    arrays = [piece.ids if isinstance(piece, MediaRun) else np.asarray(piece, np.int32) for piece in pieces]
    return np.concatenate([np.zeros(0, np.int32), *arrays]), [one for one in pieces if isinstance(one, MediaRun)]


DEFAULT_EMBEDDING_BYTES = 256 << 20
"""Embeddings that are kept: of some 70 pictures of 256 rows, for a model 3,584 wide."""


class _Stopped(Exception):
    """The request that wanted embeddings has ended."""


def _never() -> None:
    """The check of what nothing ends."""


_WAIT_SECONDS = 0.05
"""Between two checks of what waits."""


@contextmanager
def checked_lock(lock: threading.Lock, check: Check | None) -> Generator[None]:
    """Hold a lock that others hold for long. Raises: while waiting, what `check` does."""
    while not lock.acquire(timeout=-1 if check is None else _WAIT_SECONDS):
        if check is not None:
            check()
    try:
        yield
    finally:
        lock.release()


@dataclass(eq=False)
class _Turn:
    """The embeddings of a run that one thread computes, and others may wait for."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the one."""
    num_threads: int = 0
    """All of them."""


class EmbeddingTier(Protocol):
    """A slower memory under the store, such as the disk. Any thread may ask."""

    def find(self, ids: TokenIds, salt: bytes) -> FloatArray | None:
        """The embeddings of a run by its ids, if they are there for this salt."""

    def on_computed(self, ids: TokenIds, salt: bytes) -> None:
        """Called when embeddings that were not there are in the store."""


class EmbeddingStore:
    """Embeddings of the runs used last, within `max_bytes`; any thread may ask.

    Each run is computed by one thread, for which others that want the same wait; where that one is stopped, the next
    computes it. Texts of other salts share none. Runs that nothing tells apart are not kept. num_bytes: of those kept.
    held_bytes: of those that texts hold until their rows are computed, which leave as much less to be kept. tier: is
    asked before anything is computed. short_runs: what the ids of short runs stand for.
    """

    def __init__(self, max_bytes: int = DEFAULT_EMBEDDING_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = self.held_bytes = 0
        self.tier: EmbeddingTier | None = None
        self.short_runs = ShortRuns()
        self._kept: OrderedDict[tuple[bytes, bytes], FloatArray] = OrderedDict()
        self._turns: dict[tuple[bytes, bytes], _Turn] = {}
        self._lock = threading.Lock()

    def find(self, run: MediaRun, salt: bytes = NO_SALT, check: Check = _never) -> FloatArray:
        """The embeddings of a run, computed if they are not kept. Raises: what `embed` and `check` do; RequestError."""
        if not self.tells_apart(run, salt):
            return _computed(run, check)
        key = salt, run.ids.tobytes()
        with self._lock:
            turn = self._turns.setdefault(key, _Turn())
            turn.num_threads += 1
        try:
            with checked_lock(turn.lock, check):
                with self._lock:
                    rows = self._kept.get(key)
                    if rows is not None:
                        self._kept.move_to_end(key)
                        return rows
                tier = self.tier
                stored = None if tier is None else tier.find(run.ids, salt)
                rows = _computed(run, check) if stored is None else stored
                self._keep(key, rows)
                if tier is not None and stored is None:
                    tier.on_computed(run.ids, salt)
                return rows
        finally:
            with self._lock:
                turn.num_threads -= 1
                if not turn.num_threads:
                    del self._turns[key]

    def tells_apart(self, run: MediaRun, salt: bytes) -> bool:
        """True if a run's ids stand for its content alone."""
        return not run.is_short or self.short_runs.bind(run.ids, run.content, salt)

    def kept(self, ids: TokenIds, salt: bytes) -> FloatArray | None:
        """The embeddings of a run by its ids, if they are kept in memory."""
        with self._lock:
            return self._kept.get((salt, ids.tobytes()))

    @property
    def may_hold_ahead(self) -> bool:
        """True if a text may hold embeddings before their rows are due: half of the bytes are for that."""
        return 2 * self.held_bytes < self.max_bytes

    def note_held(self, num_bytes: int) -> None:
        """Note that a text holds so many bytes more, or less."""
        with self._lock:
            self.held_bytes += num_bytes
            self._evict()

    def clear(self) -> None:
        """Drop all of them."""
        with self._lock:
            self._kept.clear()
            self.num_bytes = 0

    def _keep(self, key: tuple[bytes, bytes], rows: FloatArray) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = rows
                self.num_bytes += rows.nbytes
                self._evict()

    def _evict(self) -> None:
        while self._kept and self.num_bytes + self.held_bytes > self.max_bytes:
            self.num_bytes -= self._kept.popitem(last=False)[1].nbytes


def _computed(run: MediaRun, check: Check) -> FloatArray:
    rows = np.ascontiguousarray(run.embed(check), np.float32)
    if rows.ndim != 2 or len(rows) != run.ids.size:
        raise RequestError(f"an encoder made embeddings of shape {rows.shape}; wanted {run.ids.size} rows")
    return rows


@dataclass(frozen=True, eq=False)
class _Place:
    """A run in a text."""

    start: int
    run: MediaRun
    number: int
    """Of the prompt's runs, from 1."""
    shift: int
    """Rows without a position of their own, of all runs up to this one."""

    @property
    def end(self) -> int:
        """The position in the text after its last row."""
        return self.start + self.run.ids.size

    @property
    def first_position(self) -> int:
        """For rotation, the position of its first row."""
        return self.start - self.shift + self.run.ids.size - self.run.num_positions


class PlacedMedia:
    """The runs of one text, at least one, and what follows for its positions.

    Texts that share a prefix up to a position share all that is told of the rows before it.
    """

    def __init__(self, runs: Sequence[tuple[int, int, MediaRun]], store: EmbeddingStore, salt: bytes = NO_SALT) -> None:
        """Take runs in order: the position of the first row, the number among the prompt's runs, and the run. salt: of
        the text."""
        places, shift = [], 0
        for start, number, run in runs:
            shift += run.ids.size - run.num_positions
            places.append(_Place(start, run, number, shift))
        self._places = tuple(places)
        self._starts = [place.start for place in places]
        self._store, self._salt = store, salt
        self._held: dict[int, FloatArray] = {}
        self.end = places[-1].end
        """Position after the last run."""
        self.cached_length = next((one.start for one in places if not store.tells_apart(one.run, salt)), None)
        """Positions of the longest prefix that its ids tell from every other; None for any."""

    @classmethod
    def locate(
        cls, token_ids: TokenIds, runs: Sequence[MediaRun], store: EmbeddingStore, salt: bytes = NO_SALT
    ) -> "PlacedMedia | None":
        """Place the runs of a prompt, which has their ids in this order; None if it has none.

        Raises: TokenIdError for negative ids that are of no run, RequestError for a run that is not there.
        """
        negative = np.flatnonzero(token_ids < 0)
        found: list[tuple[int, int, MediaRun]] = []
        after = 0
        for number, run in enumerate(runs, 1):
            size = run.ids.size
            start = int(negative[after]) if after < negative.size else token_ids.size
            if not size or not np.array_equal(token_ids[start : start + size], run.ids) or run.ids.max() >= 0:
                raise RequestError(
                    f"picture or sound {number} of {len(runs)} has {size} rows whose ids are not the next ones in the "
                    "prompt; join ids and runs with join_pieces"
                )
            found.append((start, number, run))
            after += size
        if after < negative.size:
            index = int(negative[after])
            raise TokenIdError(
                f"token id {token_ids[index]} at index {index} is not in the vocabulary, and no picture or sound was "
                "given for it"
            )
        return cls(found, store, salt) if found else None

    def shifted(self, kept: int, first: int) -> "PlacedMedia | None":
        """The runs of a text of which the first `kept` ids stay, and then those from `first` on; neither cuts a run."""
        moved = [(one.start, one.number, one.run) for one in self._places if one.end <= kept]
        moved += [(one.start - first + kept, one.number, one.run) for one in self._places if one.start >= first]
        return PlacedMedia(moved, self._store, self._salt) if moved else None

    def run_at(self, position: int) -> tuple[int, int] | None:
        """First position and end of the run that a cut before `position` would part; None if it would part none."""
        place = self._before(position)
        return None if place is None or place.end <= position or place.start == position else (place.start, place.end)

    def whole_run_at(self, position: int) -> tuple[int, int] | None:
        """Do as `run_at`, for runs that are computed in one batch only."""
        place = self._before(position)
        return self.run_at(position) if place is not None and place.run.sees_itself else None

    def reusable(self, length: int) -> int:
        """The longest prefix within `length` positions that a text may continue from."""
        length = length if self.cached_length is None else min(length, self.cached_length)
        parted = self.whole_run_at(length)
        return length if parted is None else parted[0]

    def largest_batch(self) -> int:
        """Rows of the largest run that is computed in one batch; 0 without one."""
        return max((one.run.ids.size for one in self._places if one.run.sees_itself), default=0)

    def name_at(self, position: int) -> str:
        """The name of the run that a position is in; empty if it is in none."""
        place = self._before(position)
        if place is None or place.end <= position:
            return ""
        return place.run.name or f"picture or sound {place.number}"

    def hold(self, length: int, should_stop: Callable[[], bool]) -> None:
        """Compute embeddings of the runs that end after `length` positions, and hold them until `release`, as many as
        texts may hold ahead.

        should_stop: asked before each, and while it is computed. Raises: what `embed` does.
        """

        self._hold((one for one in self._places if one.end > length and self._store.may_hold_ahead), should_stop)

    def prepare(self, first: int, count: int, should_stop: Callable[[], bool]) -> bool:
        """Compute the embeddings of `count` rows from position `first` on, before a step that computes the rows, and
        hold them until `release`; False if `should_stop` ended it. Raises: what `embed` does."""
        places = self._places if first < self.end else ()
        return self._hold((one for one in places if one.end > first and one.start < first + count), should_stop)

    def release(self, length: int) -> None:
        """Let go of the embeddings of what ends within `length` positions."""
        for place in self._places if self._held else ():
            rows = self._held.pop(place.number, None) if place.end <= length else None
            if rows is not None:
                self._store.note_held(-rows.nbytes)

    def on_rows(self, segment: Segment) -> Segment:
        """A segment of this text with what a batch is told of its rows."""
        first, count = segment.start_position, segment.num_rows
        media, ends = self.rows(first, count), self.key_ends(first, count)
        if media is None and ends is None:
            return segment
        return replace(segment, media=media, key_ends=ends, window_starts=self.window_starts(first, count))

    def rows(self, first: int, count: int) -> MediaRows | None:
        """Embeddings and positions of `count` rows from position `first` on; None for words at their own positions."""
        if first >= self.end:
            shift = self._places[-1].shift
            return MediaRows(positions=_line(first - shift, count)) if shift else None
        embeddings: list[tuple[int, FloatArray]] = []
        positions = np.empty((count, NUM_AXES), np.int64)
        row = 0
        while row < count:
            here = first + row
            place, following = self._before(here), self._following(here)
            if place is not None and here < place.end:
                stop = min(count, place.end - first)
                part = slice(here - place.start, first + stop - place.start)
                embeddings.append((row, self._embeddings_of(place)[part]))
                positions[row:stop] = _positions_of(place.run, place.first_position)[part]
            else:
                stop = count if following is None else min(count, following.start - first)
                positions[row:stop] = _line(here - (0 if place is None else place.shift), stop - row)
            row = stop
        is_moved = bool((positions != _line(first, count)).any())
        if not embeddings and not is_moved:
            return None
        return MediaRows(embeddings, positions if is_moved else None)

    def key_ends(self, first: int, count: int) -> NDArray[np.int64] | None:
        """The position after the last that each of these rows sees, int64[count]; None if all see up to their own."""
        ends: NDArray[np.int64] | None = None
        for place in self._places if first < self.end else ():
            start, stop = max(place.start, first), min(place.end, first + count)
            if place.run.sees_itself and start < stop:
                ends = np.arange(first + 1, first + count + 1) if ends is None else ends
                ends[start - first : stop - first] = place.end
        return ends

    def window_starts(self, first: int, count: int) -> NDArray[np.int64] | None:
        """The position from which on each of these rows sees what its window no longer holds, int64[count]; None if
        none sees any."""
        starts: NDArray[np.int64] | None = None
        for place in self._places if first < self.end else ():
            start, stop = max(place.start, first), min(place.end, first + count)
            if place.run.passes_windows and start < stop:
                starts = np.arange(first, first + count) if starts is None else starts
                starts[start - first : stop - first] = place.start
        return starts

    def _before(self, position: int) -> _Place | None:
        """The last run that begins at or before a position."""
        index = bisect_right(self._starts, position)
        return self._places[index - 1] if index else None

    def _following(self, position: int) -> _Place | None:
        """The first run that begins at or after a position."""
        index = bisect_right(self._starts, position - 1)
        return self._places[index] if index < len(self._places) else None

    def _hold(self, places: Iterable[_Place], should_stop: Callable[[], bool]) -> bool:
        """Compute and hold the embeddings of some runs; False if `should_stop` ended it."""

        def check() -> None:
            if should_stop():
                raise _Stopped

        try:
            for place in places:
                check()
                self._embeddings_of(place, check)
        except _Stopped:
            return False
        return True

    def _embeddings_of(self, place: _Place, check: Check = _never) -> FloatArray:
        """Those of a run, held until its rows are computed, so that the parts of a long one take one encoding."""
        rows = self._held.get(place.number)
        if rows is None:
            rows = self._held[place.number] = self._store.find(place.run, self._salt, check)
            self._store.note_held(rows.nbytes)
        return rows


def _line(start: int, count: int) -> NDArray[np.int64]:
    """Positions of words, the same on each axis."""
    if count == 1:
        # Of every token that is decoded behind a picture.
        return np.full((1, NUM_AXES), start, np.int64)
    return np.repeat(np.arange(start, start + count)[:, None], NUM_AXES, axis=1)


def _positions_of(run: MediaRun, base: int) -> NDArray[np.int64]:
    """Positions of a run's rows from `base` on: of a picture one time, and its rows and columns (Qwen2-VL, arXiv
    2409.12191, section 2.1)."""
    if run.grid is None:
        return _line(base, run.ids.size)
    rows, columns = np.divmod(np.arange(run.ids.size), run.grid[1])
    return base + np.stack((np.zeros_like(rows), rows, columns), axis=1)
