"""From files to the tree: pages that continue a prompt, and of their windowed parts what going on from there needs."""

import numpy as np

from localinfer.cache.block_pool import PagePool
from localinfer.cache.prefix_cache import PrefixCache
from localinfer.cache.prefix_tree import TokenIds
from localinfer.persistence.store import DiskTier, Found


def restore_pages(
    cache: PrefixCache, tier: DiskTier, parts_tier: DiskTier | None, token_ids: TokenIds, found: Found
) -> str | None:
    """Read what was found into the tree, as far as a sequence can go on from it; return what was wrong, if anything.

    parts_tier: where the windowed parts of pages are, for a model that has them. Raises: OutOfMemoryError.
    """
    pool, first = cache.pool, found.first_page
    match = cache.tree.match(token_ids)
    before, before_windowed = match.pages[:first].copy(), match.windowed[:first].copy()
    parts = () if parts_tier is None else parts_tier.of_same_pages(found)
    stored = np.array([part is not None for part in parts], np.bool_) if parts else np.ones(len(found.pages), np.bool_)
    usable = pool.sliding.usable_length(np.concatenate((before_windowed, stored)), found.num_tokens)
    num_pages = pool.num_pages_for(usable)
    if usable <= match.usable or num_pages <= first:
        return None
    if usable < found.num_tokens:
        found = Found(first, usable, found.pages[: num_pages - first])
    windowed = stored[: num_pages - first] & pool.sliding.kept(num_pages, usable)[first:]
    # Held, for making room for the others could evict them.
    pool.retain(before, before_windowed)
    try:
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
            num_pages = pool.num_pages_for(restored.num_tokens)
            if num_pages > first:
                pages, held = np.concatenate((before, fresh)), np.concatenate((before_windowed, has_part))
                cache.tree.insert(token_ids[: restored.num_tokens], pages[:num_pages], held[:num_pages])
                tier.mark_used(found)
        finally:
            pool.release(fresh, windowed)
    finally:
        pool.release(before, before_windowed)
    return None if restored.problem is None else f"a file on disk {restored.problem.value}, and was deleted"


def part_view(pool: PagePool, page: int, is_windowed: bool) -> memoryview:
    """The bytes of a page, or of its windowed part."""
    return (pool.windowed_view(page) if is_windowed else pool.view(page)).data
