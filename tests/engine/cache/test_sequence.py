"""A sequence grows, shrinks, shares and copies pages, and gives every one back; nobody writes to a shared page."""

import pytest

from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.errors import ClosedError, ContextLengthError, OutOfMemoryError
from tests.engine.fakes import FakeLayout


def pool_of(max_pages: int | None = None) -> PagePool:
    return PagePool(FakeLayout(page_tokens=4, page_bytes=64), max_bytes=None if max_pages is None else max_pages * 64)


def sequence_of(pool: PagePool, length: int, max_length: int = 64) -> SequenceCache:
    sequence = SequenceCache(pool, max_length=max_length)
    sequence.reserve(length)
    sequence.commit(length)
    return sequence


def test_sequence_reserves_whole_pages_and_keeps_them_in_order():
    pool = pool_of()
    sequence = SequenceCache(pool, max_length=64)
    sequence.reserve(1)
    first = sequence.page_addresses
    sequence.reserve(4)
    assert sequence.page_addresses is first
    sequence.reserve(5)
    assert sequence.page_addresses.tolist() == pool.addresses(sequence.pages).tolist()
    assert sequence.pages.size == 2 and sequence.page_addresses[0] == first[0]
    assert sequence.length == 0
    sequence.commit(5)
    assert sequence.length == 5


def test_truncate_frees_pages_that_hold_nothing_else():
    pool = pool_of(max_pages=4)
    sequence = sequence_of(pool, 16)
    kept = sequence.pages[:2].tolist()
    sequence.truncate(14)
    sequence.truncate(15)
    assert (sequence.length, sequence.pages.size) == (14, 4)
    sequence.truncate(5)
    assert (sequence.length, sequence.pages.tolist(), pool.num_free_pages) == (5, kept, 2)
    sequence.truncate(4)
    assert (sequence.length, sequence.pages.size) == (4, 1)
    sequence.truncate(0)
    assert (sequence.length, pool.num_free_pages) == (0, 4)


def test_sequence_refuses_positions_past_the_context():
    sequence = SequenceCache(pool_of(), max_length=6)
    sequence.reserve(6)
    with pytest.raises(ContextLengthError, match="position 7 is past the context of 6"):
        sequence.reserve(7)


def test_sequence_is_unchanged_when_memory_runs_out():
    pool = pool_of(max_pages=2)
    sequence = sequence_of(pool, 4)
    before = sequence.pages.tolist()
    with pytest.raises(OutOfMemoryError):
        sequence.reserve(12)
    assert (sequence.length, sequence.pages.tolist()) == (4, before)
    assert pool.num_pages - pool.num_free_pages == 1


def test_closed_sequence_gives_everything_back_once():
    pool = pool_of(max_pages=4)
    sequence = sequence_of(pool, 9)
    sequence.close()
    sequence.close()
    assert pool.num_free_pages == pool.num_pages == 3
    with pytest.raises(ClosedError):
        sequence.reserve(1)


def test_fork_shares_every_page_and_the_writer_copies_only_the_last():
    pool = pool_of()
    sequence = sequence_of(pool, 10)
    for index, page in enumerate(sequence.pages.tolist()):
        pool.view(page)[:] = index + 1
    twin = sequence.fork()
    assert twin.length == 10 and twin.pages.tolist() == sequence.pages.tolist() and pool.num_pages == 3
    twin.reserve(11)
    assert twin.pages[:2].tolist() == sequence.pages[:2].tolist() and twin.pages[2] != sequence.pages[2]
    assert (pool.view(int(twin.pages[2])) == 3).all()
    held = sequence.pages.tolist()
    sequence.reserve(11)
    assert sequence.pages.tolist() == held
    twin.close()
    assert pool.counts[sequence.pages].tolist() == [1, 1, 1]


def test_fork_leaves_reserved_but_unused_pages_to_the_first():
    pool = pool_of()
    sequence = sequence_of(pool, 6)
    sequence.reserve(16)
    twin = sequence.fork()
    assert twin.pages.tolist() == sequence.pages[:2].tolist()
    assert pool.counts[sequence.pages].tolist() == [2, 2, 1, 1]


def test_interrupted_truncate_leaves_no_shared_page_to_be_written(monkeypatch: pytest.MonkeyPatch):
    pool = pool_of()
    sequence = sequence_of(pool, 12)
    twin = sequence.fork()
    shared = twin.pages.tolist()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sequence, "_free_pages_after", interrupt)
        sequence.truncate(4)
    assert sequence.length == 4
    sequence.reserve(9)
    assert sequence.pages[0] == shared[0] and not set(sequence.pages[1:].tolist()) & set(shared)
    twin.close()
    sequence.close()
    assert pool.num_free_pages == pool.num_pages


def interrupt(*_: object) -> int:
    raise KeyboardInterrupt


def test_position_inside_a_shared_page_is_written_to_a_copy_after_truncate():
    pool = pool_of()
    sequence = sequence_of(pool, 12)
    twin = sequence.fork()
    twin.truncate(6)
    twin.reserve(12)
    assert twin.pages[0] == sequence.pages[0] and twin.pages[1] != sequence.pages[1]
    assert pool.counts[sequence.pages].tolist() == [2, 1, 1]


def test_fork_at_the_end_of_memory_leaves_both_as_they_were():
    pool = pool_of(max_pages=2)
    sequence = sequence_of(pool, 6)
    twin = sequence.fork()
    with pytest.raises(OutOfMemoryError):
        twin.reserve(7)
    assert twin.pages.tolist() == sequence.pages.tolist() and twin.length == 6
