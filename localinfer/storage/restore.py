"""A prompt's pages, sliding-window blocks and recurrent states, read from the disk into the prefix tree.

Where a prompt is admitted, all of its files are read at once, and every stream waits for that. A caller that knows of a
long prompt before, as of one that another process computed, prefetches it: the disk is read while steps are taken, and
a step waits for a copy of few pages only.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_pool import BoolArray, PageNumbers, PagePool
from localinfer.engine.cache.prefix_cache import PrefixCache
from localinfer.engine.cache.prefix_tree import Match
from localinfer.engine.cache.sequence_state import NO_SLOT
from localinfer.engine.engine import Engine
from localinfer.errors import OutOfMemoryError
from localinfer.storage.page_store import DiskTier, Found, FoundPage, FoundSnapshot, Rejection, SnapshotTier
from localinfer.types import TokenIds

_Bytes = NDArray[np.uint8]


class Tiers(NamedTuple):
    """The files of one fingerprint and salt."""

    pages: DiskTier
    windows: DiskTier | None = None
    """Sliding-window blocks, for models that have them."""
    states: SnapshotTier | None = None
    """Recurrent states, likewise."""

    def of_salt(self, salt: bytes) -> "Tiers":
        """The same files as texts of a salt see them."""
        windows, states = self.windows, self.states
        return Tiers(self.pages.of_salt(salt), windows and windows.of_salt(salt), states and states.of_salt(salt))


def restore_prompt(cache: PrefixCache, tiers: Tiers, token_ids: TokenIds, found: Found) -> str | None:
    """Read found pages into the tree, as far as a sequence can continue from them; return why it ended early, or None.

    tiers: of the text's salt. Raises: OutOfMemoryError.
    """
    pool, match = cache.pool, cache.tree.match(token_ids, tiers.pages.salt)
    before, before_windowed = match.pages[: found.first_page].copy(), match.windowed[: found.first_page].copy()
    # Retained, since allocating the others, or a slot for states, could evict them.
    pool.retain(before, before_windowed)
    try:
        if tiers.states is None:
            return _restore_pages(cache, tiers, token_ids, found, match, {})
        # A few positions are computed as fast as their states are read.
        least = match.usable + cache.near_tokens - 1
        candidates = list(tiers.states.find_snapshots(token_ids[: found.num_tokens], after=least))
        # Retained, since what is allocated below could evict it.
        slot, snapshot = _read_deepest(cache, tiers.states, candidates)
        if snapshot is None:
            return None
        try:
            wanted = _shortened(found, snapshot.position, pool.num_pages_for(snapshot.position))
            return _restore_pages(cache, tiers, token_ids, wanted, match, {snapshot.position: slot})
        finally:
            pool.release_state(slot)
    finally:
        pool.release(before, before_windowed)


def _read_deepest(
    cache: PrefixCache, tier: SnapshotTier, candidates: list[FoundSnapshot]
) -> tuple[int, FoundSnapshot | None]:
    """Read the deepest snapshot that is intact into a slot. Raises: OutOfMemoryError."""
    pool = cache.pool
    if not candidates:
        return NO_SLOT, None
    slot = pool.take_slot(pool.states)
    try:
        for candidate in candidates:
            if tier.read_snapshot(candidate, pool.state_view(slot).data):
                return slot, candidate
    except BaseException:
        pool.release_state(slot)
        raise
    pool.release_state(slot)
    return NO_SLOT, None


def _shortened(found: Found, length: int, num_pages: int) -> Found:
    return Found(found.first_page, length, found.pages[: num_pages - found.first_page])


def _restore_pages(
    cache: PrefixCache, tiers: Tiers, token_ids: TokenIds, found: Found, match: Match, snapshots: dict[int, int]
) -> str | None:
    """As `restore_prompt`, where the caller holds the pages before the first that was found."""
    pool, tier, first = cache.pool, tiers.pages, found.first_page
    before_windowed = match.windowed[:first]
    parts = _windows_of(tiers, found)
    stored = np.array([part is not None for part in parts], np.bool_) if parts else np.ones(len(found.pages), np.bool_)
    usable = _usable(pool, before_windowed, parts, found.num_tokens)
    num_pages = pool.num_pages_for(usable)
    if usable <= match.usable or num_pages <= first or (snapshots and usable not in snapshots):
        return None
    if usable < found.num_tokens:
        found = _shortened(found, usable, num_pages)
    windowed = stored[: num_pages - first] & pool.sliding.kept(num_pages, usable)[first:]
    problem: Rejection | None = None

    def read(fresh: PageNumbers) -> tuple[int, BoolArray]:
        nonlocal problem
        buffers = [pool.buffer(page) for page in fresh.tolist()]
        restored = tier.restore(found, [buffer.data for buffer in buffers])
        problem = restored.problem
        for page, buffer in zip(fresh.tolist(), buffers, strict=True):
            pool.fill(page, buffer)
        has_part = windowed.copy()
        if tiers.windows is not None:
            places = np.flatnonzero(windowed)
            some = Found(0, 0, tuple(part for place in places if (part := parts[place]) is not None))
            views = [pool.windowed_view(page).data for page in fresh[places].tolist()]
            has_part[places[pool.num_pages_for(tiers.windows.restore(some, views).num_tokens) :]] = False
            tiers.windows.mark_used(some)
        # Of a page that was found to share a beginning with the prompt, no more than that counts.
        return min(restored.num_tokens, found.num_tokens), has_part

    if _insert(cache, token_ids, tier.salt, first, windowed, read, snapshots):
        tier.mark_used(found)
    return None if problem is None else f"a file on disk {problem.value}, and was deleted"


def _insert(
    cache: PrefixCache,
    token_ids: TokenIds,
    salt: bytes,
    first: int,
    windowed: BoolArray,
    write: Callable[[PageNumbers], tuple[int, BoolArray]],
    snapshots: Mapping[int, int],
) -> bool:
    """Put new pages of a prompt into the tree behind its first ones; False if those were evicted, or nothing is new.

    windowed: which of the new pages get a sliding-window block. write: writes pages of these numbers, and returns how
    many ids there are up to their end, and which have their block. snapshots: slots of states by position, which
    `write` may add to; those within these ids are kept. Raises: OutOfMemoryError.
    """
    pool, tree = cache.pool, cache.tree
    start = first * pool.page_tokens
    match = tree.match(token_ids[:start], salt)
    if match.length < start:
        return False
    before, before_windowed = match.pages[:first].copy(), match.windowed[:first].copy()
    # Retained, since allocating the others could evict them.
    pool.retain(before, before_windowed)
    try:
        fresh = pool.acquire(windowed.size, windowed)
        try:
            length, has_part = write(fresh)
            num_pages = pool.num_pages_for(length)
            if num_pages > first:
                pages, held = np.concatenate((before, fresh)), np.concatenate((before_windowed, has_part))
                whole = {position: slot for position, slot in snapshots.items() if position <= length}
                tree.insert(token_ids[:length], pages[:num_pages], held[:num_pages], snapshots=whole, salt=salt)
        finally:
            pool.release(fresh, windowed)
    finally:
        pool.release(before, before_windowed)
    return num_pages > first


class _Stored(NamedTuple):
    """The files that a sequence can continue from."""

    length: int
    """Number of ids."""
    found: Found
    """Their pages."""
    windows: list[FoundPage | None]
    """Of each page the file of its sliding-window block."""
    states: _Bytes | None = None
    """The states after the last id."""


def stored_tokens(pool: PagePool, tiers: Tiers, token_ids: TokenIds) -> int:
    """Number of leading ids that a sequence could continue from by files alone; names and lengths are checked only."""
    found = tiers.pages.find(token_ids)
    windows = _windows_of(tiers, found)
    if tiers.states is None:
        return _usable(pool, np.zeros(0, np.bool_), windows, found.num_tokens)
    positions = (one.position for one in tiers.states.find_snapshots(token_ids[: found.num_tokens], after=0))
    return next((at for at in positions if _goes_on(pool, np.zeros(0, np.bool_), windows, at)), 0)


def prefetch(engine: Engine, tiers: Tiers, token_ids: TokenIds) -> int:
    """Read what continues a prompt's cached prefix into the tree, as far as a sequence can continue from it.

    token_ids: of the prompt but its last, whose logits are wanted. Nothing is read where memory has no room for the
    text beside those that run: it is read when it is admitted. A file that is damaged ends it, and is deleted.
    Returns how many leading ids a sequence can continue from then. Raises: ClosedError.
    """
    salt = tiers.pages.salt
    with engine.exclusive_cache() as cache:
        match = cache.tree.match(token_ids, salt)
        usable, near = match.usable, cache.near_tokens
        before = match.windowed[: usable // cache.pool.page_tokens].copy()
        if usable == token_ids.size or not cache.has_room(token_ids, salt):
            return usable
    stored = _find(engine.pool, tiers, token_ids, before, usable + near - 1)
    if stored.length <= usable:
        return usable
    try:
        for piece in _pieces(tiers, engine.pool, stored):
            with engine.exclusive_cache() as cache:
                if not _insert_piece(cache, piece, token_ids, salt):
                    break
    except OutOfMemoryError:
        pass
    tiers.pages.mark_used(stored.found)
    with engine.exclusive_cache() as cache:
        return cache.tree.match(token_ids, salt).usable


class _Piece(NamedTuple):
    """Some pages that were read: the first of them, how many ids there are up to their end, and their bytes. windows:
    the bytes of their sliding-window blocks, None for those that have none; states: those after the last id."""

    first: int
    length: int
    pages: list[_Bytes]
    windows: list[_Bytes | None]
    states: _Bytes | None = None


def _find(pool: PagePool, tiers: Tiers, token_ids: TokenIds, before: BoolArray, least: int) -> _Stored:
    """The files that continue a cached prefix. before: which of its pages have a sliding-window block. least: states
    after no more ids are as soon computed as read."""
    found = tiers.pages.find(token_ids, before.size)
    windows = _windows_of(tiers, found)
    states: _Bytes | None = None
    if tiers.states is None:
        length = _usable(pool, before, windows, found.num_tokens)
    else:
        length, states = 0, np.empty(tiers.states.form.page_bytes, np.uint8)
        for one in tiers.states.find_snapshots(token_ids[: found.num_tokens], after=least):
            goes_on = _goes_on(pool, before, windows, one.position)
            if goes_on and tiers.states.read_snapshot(one, states.data):
                length = one.position
                break
    pages = found.pages[: max(0, pool.num_pages_for(length) - before.size)]
    # Of the blocks only those are read that the text continues with.
    kept = pool.sliding.kept(before.size + len(pages), length)[before.size :]
    windows = [one if is_kept else None for one, is_kept in zip(windows, kept, strict=False)]
    return _Stored(length, Found(before.size, length, pages), windows, states)


def _windows_of(tiers: Tiers, found: Found) -> list[FoundPage | None]:
    return [] if tiers.windows is None else tiers.windows.of_same_pages(found)


def _usable(pool: PagePool, before: BoolArray, windows: list[FoundPage | None], length: int) -> int:
    """The longest prefix of a length that can be continued."""
    if not pool.sliding.tokens:
        return length
    has_block = np.concatenate((before, np.array([one is not None for one in windows], np.bool_)))
    return pool.sliding.usable_length(has_block[: pool.num_pages_for(length)], length)


def _goes_on(pool: PagePool, before: BoolArray, windows: list[FoundPage | None], position: int) -> bool:
    return _usable(pool, before, windows, position) == position


def _pieces(tiers: Tiers, pool: PagePool, stored: _Stored) -> Iterator[_Piece]:
    """Read the files, few at a time, to the first that is damaged; the bytes are valid until the next piece."""
    found, step = stored.found, tiers.pages.pages_at_once
    buffers = [np.empty(pool.page_bytes, np.uint8) for _ in range(min(step, len(found.pages)))]
    for start in range(0, len(found.pages), step):
        some = found.pages[start : start + step]
        first = found.first_page + start
        read = tiers.pages.restore(Found(first, 0, some), [buffer.data for buffer in buffers[: len(some)]])
        length = min(read.num_tokens, stored.length)
        count = pool.num_pages_for(length) - first
        if count <= 0:
            return
        found_windows = stored.windows[start : start + count] or [None for _ in range(count)]
        windows = [_block(tiers, one) for one in found_windows]
        is_last = length == stored.length
        yield _Piece(first, length, buffers[:count], windows, stored.states if is_last else None)
        if read.problem is not None:
            return


def _block(tiers: Tiers, page: FoundPage | None) -> _Bytes | None:
    """The bytes of a sliding-window block; None if its file is damaged, or was not found."""
    if tiers.windows is None or page is None:
        return None
    block = np.empty(tiers.windows.form.page_bytes, np.uint8)
    if tiers.windows.restore(Found(0, 0, (page,)), [block.data]).problem is not None:
        return None
    tiers.windows.mark_used(Found(0, 0, (page,)))
    return block


def _insert_piece(cache: PrefixCache, piece: _Piece, token_ids: TokenIds, salt: bytes) -> bool:
    """Put pages that were read into the tree; False if those before them were evicted. Raises: OutOfMemoryError."""
    pool = cache.pool
    has_block = np.array([block is not None for block in piece.windows], np.bool_)
    if not pool.sliding.tokens:
        has_block[:] = True
    snapshots: dict[int, int] = {}

    def copy(fresh: PageNumbers) -> tuple[int, BoolArray]:
        for page, data, block in zip(fresh.tolist(), piece.pages, piece.windows, strict=True):
            target = pool.buffer(page)
            target[:] = data
            pool.fill(page, target)
            if block is not None:
                pool.windowed_view(page)[:] = block
        if piece.states is not None:
            snapshots[piece.length] = slot = pool.take_slot(pool.states)
            pool.state_view(slot)[:] = piece.states
        return piece.length, has_block

    try:
        return _insert(cache, token_ids, salt, piece.first, has_block, copy, snapshots)
    finally:
        for slot in snapshots.values():
            pool.release_state(slot)
