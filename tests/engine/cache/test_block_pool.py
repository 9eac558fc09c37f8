"""Pages are aligned, distinct, counted, and reused when nobody holds them; budgets hold, and little is wasted."""

import numpy as np
import pytest

from localinfer.engine.cache.block_pool import ALIGNMENT, PagePool, default_kv_memory
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.errors import ClosedError, OutOfMemoryError
from tests.engine.fakes import FakeLayout


def pool_of(max_pages: int | None = None, page_bytes: int = 64) -> PagePool:
    layout = FakeLayout(page_tokens=4, page_bytes=page_bytes)
    return PagePool(layout, max_bytes=None if max_pages is None else max_pages * page_bytes)


def test_pages_are_aligned_and_do_not_overlap():
    pool = pool_of(page_bytes=12 << 20)
    pages = np.concatenate((pool.acquire(1), pool.acquire(3), pool.acquire(2)))
    addresses = np.sort(pool.addresses(pages))
    assert (addresses % ALIGNMENT == 0).all() and np.diff(addresses).min() >= 12 << 20
    assert np.unique(pages).size == 6


def test_pool_grows_by_demand_and_reuses_freed_pages():
    pool = pool_of(page_bytes=12 << 20)
    assert pool.allocated_bytes == 0
    first = pool.acquire(2)
    pool.release(first)
    assert set(pool.acquire(2)) == set(first)
    assert pool.num_pages == 2


def test_page_is_free_when_its_last_holder_lets_go():
    pool = pool_of()
    pages = pool.acquire(3)
    pool.retain(pages[:2])
    pool.release(pages)
    assert pool.counts[pages].tolist() == [1, 1, 0] and pool.num_free_pages == 1
    pool.release(pages[:2])
    assert pool.num_free_pages == 3


def test_pages_hold_what_is_written_and_copied():
    pool = pool_of()
    first, second = pool.acquire(2).tolist()
    pool.view(first)[:] = np.arange(64)
    pool.copy(first, second)
    pool.view(first)[:] = 0
    assert pool.view(second).tolist() == list(range(64))


def test_pool_refuses_to_exceed_its_budget_and_changes_nothing():
    pool = pool_of(max_pages=3)
    held = pool.acquire(2)
    with pytest.raises(OutOfMemoryError, match="needs 256 bytes and may use 192"):
        pool.acquire(2)
    assert np.unique(np.concatenate((held, pool.acquire(1)))).size == 3


def test_pool_asks_for_pages_back_only_when_its_budget_is_spent():
    pool = pool_of(max_pages=3)
    kept = pool.acquire(2)
    asked: list[int] = []

    def give_up(count: int, num_bytes: int) -> None:
        assert num_bytes == 0
        asked.append(count)
        pool.release(kept[:count])

    pool.reclaim = give_up
    pool.acquire(1)
    assert asked == []
    assert pool.acquire(1).tolist() == kept[:1].tolist() and asked == [1]


def test_closed_pool_hands_nothing_out():
    pool = pool_of()
    cache = SequenceCache(pool, max_length=8)
    cache.reserve(3)
    pool.close()
    with pytest.raises(ClosedError):
        pool.acquire(1)
    cache.close()
    assert pool.allocated_bytes == 0 and pool.num_free_pages == 0


@pytest.mark.parametrize("page_bytes", [20 << 10, 704 << 10])
def test_eight_sequences_of_mixed_length_waste_under_four_percent(page_bytes: int):
    pool = PagePool(FakeLayout(page_tokens=32, page_bytes=page_bytes))
    lengths = [187, 342, 605, 811, 1290, 1977, 2604, 3901]
    caches = [SequenceCache(pool, max_length=4096) for _ in lengths]
    for step in range(0, 4096, 64):
        for cache, length in zip(caches, lengths, strict=True):
            cache.reserve(max(cache.length, min(step, length)))
            cache.commit(max(cache.length, min(step, length)))
    used = sum(cache.length for cache in caches) / 32 * page_bytes
    assert sum(cache.length for cache in caches) == sum(lengths)
    assert 1 - used / pool.allocated_bytes < 0.04


def test_default_budget_is_bounded_by_free_memory_and_holds_a_context_where_it_can():
    small = default_kv_memory(FakeLayout(page_tokens=32, page_bytes=64), 4096)
    large = default_kv_memory(FakeLayout(page_tokens=1, page_bytes=1 << 30), 1 << 20)
    assert 0 < small <= 8 << 30
    assert small <= large < 1 << 50
