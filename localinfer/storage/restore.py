"""Bringing a prompt's pages, sliding-window blocks and recurrent states from the disk into the prefix tree."""

import numpy as np

from localinfer.engine.cache.prefix_cache import PrefixCache
from localinfer.engine.cache.prefix_node import Match
from localinfer.engine.cache.sequence_state import NO_SLOT
from localinfer.storage.snapshot_store import FoundSnapshot, SnapshotTier
from localinfer.storage.store import DiskTier, Found
from localinfer.types import TokenIds


def restore_prompt(
    cache: PrefixCache,
    tier: DiskTier,
    parts_tier: DiskTier | None,
    states_tier: SnapshotTier | None,
    token_ids: TokenIds,
    found: Found,
) -> str | None:
    """Read found pages into the tree, as far as a sequence can continue from them; return why it ended early, or None.

    tier: of the text's salt, as the others. parts_tier, states_tier: of sliding-window blocks and of recurrent states,
    for a model that has them.
    Raises: OutOfMemoryError.
    """
    pool, match = cache.pool, cache.tree.match(token_ids, tier.salt)
    before, before_windowed = match.pages[: found.first_page].copy(), match.windowed[: found.first_page].copy()
    # Retained, since allocating the others, or a slot for states, could evict them.
    pool.retain(before, before_windowed)
    try:
        if states_tier is None:
            return _restore_pages(cache, tier, parts_tier, token_ids, found, match, {})
        # A few positions are computed as fast as their states are read.
        least = match.usable + cache.near_tokens - 1
        candidates = list(states_tier.find_snapshots(token_ids[: found.num_tokens], after=least))
        # Retained, since what is allocated below could evict it.
        slot, snapshot = _read_deepest(cache, states_tier, candidates)
        if snapshot is None:
            return None
        try:
            wanted = _shortened(found, snapshot.position, pool.num_pages_for(snapshot.position))
            return _restore_pages(cache, tier, parts_tier, token_ids, wanted, match, {snapshot.position: slot})
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
    cache: PrefixCache,
    tier: DiskTier,
    parts_tier: DiskTier | None,
    token_ids: TokenIds,
    found: Found,
    match: Match,
    snapshots: dict[int, int],
) -> str | None:
    """As `restore_prompt`, where the caller holds the pages before the first that was found."""
    pool, first = cache.pool, found.first_page
    before, before_windowed = match.pages[:first].copy(), match.windowed[:first].copy()
    parts = () if parts_tier is None else parts_tier.of_same_pages(found)
    stored = np.array([part is not None for part in parts], np.bool_) if parts else np.ones(len(found.pages), np.bool_)
    usable = pool.sliding.usable_length(np.concatenate((before_windowed, stored)), found.num_tokens)
    num_pages = pool.num_pages_for(usable)
    if usable <= match.usable or num_pages <= first or (snapshots and usable not in snapshots):
        return None
    if usable < found.num_tokens:
        found = _shortened(found, usable, num_pages)
    windowed = stored[: num_pages - first] & pool.sliding.kept(num_pages, usable)[first:]
    fresh = pool.acquire(len(found.pages), windowed)
    try:
        buffers = [pool.buffer(page) for page in fresh.tolist()]
        restored = tier.restore(found, [buffer.data for buffer in buffers])
        for page, buffer in zip(fresh.tolist(), buffers, strict=True):
            pool.fill(page, buffer)
        has_part = windowed.copy()
        if parts_tier is not None:
            places = np.flatnonzero(windowed)
            some = Found(0, 0, tuple(part for place in places if (part := parts[place]) is not None))
            views = [pool.windowed_view(page).data for page in fresh[places].tolist()]
            has_part[places[pool.num_pages_for(parts_tier.restore(some, views).num_tokens) :]] = False
            parts_tier.mark_used(some)
        # Of a page that was found to share a beginning with the prompt, no more than that counts.
        length = min(restored.num_tokens, found.num_tokens)
        num_pages = pool.num_pages_for(length)
        if num_pages > first:
            pages, held = np.concatenate((before, fresh)), np.concatenate((before_windowed, has_part))
            whole = {position: slot for position, slot in snapshots.items() if position <= length}
            cache.tree.insert(token_ids[:length], pages[:num_pages], held[:num_pages], snapshots=whole, salt=tier.salt)
            tier.mark_used(found)
    finally:
        pool.release(fresh, windowed)
    return None if restored.problem is None else f"a file on disk {restored.problem.value}, and was deleted"
