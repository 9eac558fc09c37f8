"""Pages are aligned, distinct, reused and counted; a sequence grows, shrinks and gives everything back."""

import random

import numpy as np
import pytest

from localinfer.errors import ClosedError, ContextLengthError, OutOfMemoryError
from localinfer.kv_cache import ALIGNMENT, KVCache, PagePool
from tests.engine.fakes import FakeLayout


def pool_of(max_pages: int | None = None, page_bytes: int = 64) -> PagePool:
    layout = FakeLayout(page_tokens=4, page_bytes=page_bytes)
    return PagePool(layout, max_bytes=None if max_pages is None else max_pages * page_bytes)


def test_pages_are_aligned_and_do_not_overlap():
    pool = pool_of(page_bytes=12 << 20)
    addresses = sorted(pool.acquire(1) + pool.acquire(3) + pool.acquire(2))
    assert all(address % ALIGNMENT == 0 for address in addresses)
    assert min(np.diff(addresses)) >= 12 << 20


def test_pool_grows_by_demand_and_reuses_freed_pages():
    pool = pool_of(page_bytes=12 << 20)
    assert pool.allocated_bytes == 0
    first = pool.acquire(2)
    pool.release(first)
    assert set(pool.acquire(2)) == set(first)
    assert pool.num_pages == 2


def test_pool_refuses_to_exceed_its_budget_and_changes_nothing():
    pool = pool_of(max_pages=3)
    held = pool.acquire(2)
    with pytest.raises(OutOfMemoryError, match="needs 256 bytes and may use 192"):
        pool.acquire(2)
    assert pool.num_free_pages == 1
    assert len(set(held + pool.acquire(1))) == 3


def test_closed_pool_hands_nothing_out():
    pool = pool_of()
    cache = KVCache(pool, max_length=8)
    cache.reserve(3)
    pool.close()
    with pytest.raises(ClosedError):
        pool.acquire(1)
    cache.close()
    assert pool.allocated_bytes == 0 and pool.num_free_pages == 0


def test_cache_reserves_whole_pages_and_keeps_them_in_order():
    cache = KVCache(pool_of(), max_length=64)
    cache.reserve(1)
    first = cache.page_addresses
    cache.reserve(4)
    assert cache.page_addresses is first
    cache.reserve(5)
    assert cache.page_addresses.dtype == np.int64
    assert cache.page_addresses.size == 2 and cache.page_addresses[0] == first[0]
    assert cache.length == 0
    cache.commit(5)
    assert cache.length == 5


def test_truncate_frees_pages_that_hold_nothing_else():
    pool = pool_of(max_pages=4)
    cache = KVCache(pool, max_length=64)
    cache.reserve(16)
    cache.commit(14)
    kept = cache.page_addresses[:2].tolist()
    cache.truncate(15)
    assert (cache.length, cache.page_addresses.size) == (14, 4)
    cache.truncate(5)
    assert (cache.length, cache.page_addresses.tolist(), pool.num_free_pages) == (5, kept, 2)
    cache.truncate(4)
    assert (cache.length, cache.page_addresses.size) == (4, 1)
    cache.truncate(0)
    assert (cache.length, pool.num_free_pages) == (0, 4)


def test_cache_refuses_positions_past_the_context():
    cache = KVCache(pool_of(), max_length=6)
    cache.reserve(6)
    with pytest.raises(ContextLengthError, match="position 7 is past the context of 6"):
        cache.reserve(7)


def test_cache_is_unchanged_when_memory_runs_out():
    pool = pool_of(max_pages=2)
    cache = KVCache(pool, max_length=64)
    cache.reserve(4)
    cache.commit(4)
    before = cache.page_addresses.tolist()
    with pytest.raises(OutOfMemoryError):
        cache.reserve(12)
    assert (cache.length, cache.page_addresses.tolist(), pool.num_free_pages) == (4, before, 1)


def test_closed_cache_gives_everything_back_once():
    pool = pool_of(max_pages=4)
    cache = KVCache(pool, max_length=64)
    cache.reserve(9)
    cache.close()
    cache.close()
    assert pool.num_free_pages == 4
    with pytest.raises(ClosedError):
        cache.reserve(1)


def test_random_lives_of_sequences_never_share_or_lose_a_page():
    chooser = random.Random(5)
    pool = pool_of(max_pages=40)
    caches: list[KVCache] = []
    for _ in range(3000):
        action = chooser.random()
        if action < 0.2 or not caches:
            caches.append(KVCache(pool, max_length=40))
        cache = chooser.choice(caches)
        if action < 0.7:
            length = min(40, cache.length + chooser.randrange(1, 9))
            try:
                cache.reserve(length)
                cache.commit(length)
            except OutOfMemoryError:
                assert pool.num_free_pages < 10
        elif action < 0.9:
            cache.truncate(chooser.randrange(cache.length + 1))
        else:
            cache.close()
            caches.remove(cache)
        held = [address for cache in caches for address in cache.page_addresses.tolist()]
        assert len(held) == len(set(held))
        assert len(held) + pool.num_free_pages == pool.num_pages
        assert all(cache.page_addresses.size * 4 >= cache.length for cache in caches)
