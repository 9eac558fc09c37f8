"""Ctrl-C at any line of what takes and gives back memory leaves no slot that is neither free nor held."""

import numpy as np
import pytest

from localinfer.engine.cache.block_pool import PagePool, SharedSlots
from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.engine.cache.prefix_tree import PrefixTree
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.cache.sequence_state import SequenceState, SnapshotPolicy
from tests.engine.fakes import FakeLayout
from tests.proof.simulation import faults
from tests.proof.simulation.faults import LineInterrupt

LAYOUT = FakeLayout(page_tokens=4, page_bytes=64, windowed_bytes=64, window=8, state_bytes=64, log_bytes=64)
NUM_SLOTS = 12


def use(pool: PagePool) -> None:
    """Take and give back some of every kind, so that each takes over what another returns to the system."""
    pages = pool.acquire(4)
    states = [pool.take_slot(pool.states) for _ in range(3)]
    log = pool.take_slot(pool.logs)
    pool.release(pages[:3])
    pool.release_log(log)
    states.append(pool.take_slot(pool.states))
    for slot in states:
        pool.release_state(slot)
    pool.release(pages[3:])
    pool.release(pool.acquire(6))


def give_back(pool: PagePool) -> None:
    """Drop the references of what was interrupted."""
    pages = np.flatnonzero(pool.counts)
    pool.release(pages, pool.windowed_counts[pages] > 0)
    for slot in pool.states.held:
        pool.release_state(slot)
    for slot in pool.logs.held:
        pool.release_log(slot)


def use_text(cache: PrefixCache, token_ids: np.ndarray) -> None:
    """Admit a text, compute it, and let it end."""
    sequence = cache.admit(token_ids, CacheHints()).sequence
    sequence.reserve(token_ids.size)
    sequence.commit(token_ids.size)
    cache.retire(sequence, token_ids, CacheHints())


def held_slots(pool: PagePool) -> list[set[int]]:
    blocks = pool._windowed_slots[np.flatnonzero(pool.windowed_counts)]
    pages = np.flatnonzero(pool.counts)
    return [set(pages.tolist()), set(blocks.tolist()), set(pool.states.held), set(pool.logs.held)]


@pytest.mark.parametrize("max_bytes", [None, NUM_SLOTS * 64])
def test_no_slot_is_lost_wherever_an_interrupt_comes(max_bytes: int | None):
    num_lines = num_lost = 0
    while True:
        pool = PagePool(LAYOUT, max_bytes=max_bytes)
        # Where nothing bounds it, less goes on: every other line.
        num_lines += 2 if max_bytes is None else 1
        interrupt = LineInterrupt(num_lines)
        try:
            with interrupt:
                use(pool)
        except KeyboardInterrupt:
            pass
        if not interrupt.has_fired:
            break
        kinds = list(zip(pool._kinds, held_slots(pool), strict=True))
        num_lost += any(len(memory.free) + len(held) < memory.num_slots for memory, held in kinds)
        pool.recover()
        for memory, held in kinds:
            assert sorted([*memory.free, *held]) == sorted(set(range(memory._next)) - set(memory._vacant)), num_lines
            assert len(memory.free) + len(held) == memory.num_slots
            lying = memory.addresses[[*memory.free, *held]]
            assert lying.all() and np.unique(lying).size == lying.size
        give_back(pool)
        use(pool)
        assert max_bytes is None or pool.allocated_bytes <= max_bytes
    assert num_lines > 200 and num_lost > 5


def test_slots_of_planned_snapshots_are_freed_after_an_interrupt(monkeypatch: pytest.MonkeyPatch):
    pool = PagePool(LAYOUT)
    state = SequenceState(pool, SnapshotPolicy(grid_tokens=1000, near_tokens=1))
    state.want_snapshots((3, 6, 9))
    state.reserve(is_logged=False)
    take_slot, num_taken = pool.take_slot, 0

    def interrupted(slots: SharedSlots) -> int:
        nonlocal num_taken
        num_taken += 1
        if num_taken == 3:
            raise KeyboardInterrupt
        return take_slot(slots)

    monkeypatch.setattr(pool, "take_slot", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.step(12, is_logged=False)
    assert len(pool.states.held) == 3
    state.release_reserved()
    assert not pool.states.held


def test_sequence_gives_all_back_wherever_an_interrupt_ends_its_closing():
    num_lines = num_unfinished = 0
    while True:
        pool = PagePool(LAYOUT)
        sequence = SequenceCache(pool, max_length=1000)
        pages, state = pool.acquire(3), pool.take_slot(pool.states)
        sequence.adopt(pages, 10, state=state)
        pool.release(pages)
        pool.release_state(state)
        num_lines += 1
        interrupt = LineInterrupt(num_lines)
        try:
            with interrupt:
                sequence.close()
        except KeyboardInterrupt:
            pass
        if not interrupt.has_fired:
            break
        del sequence
        num_unfinished += bool(pool.abandoned)
        pool.recover()
        assert not pool.abandoned and not pool.sequences
        # What was being released when it came may stay, and nothing else.
        assert not pool.held_bytes or (bool(pool.counts.any()) != bool(pool.states.held)), num_lines
    assert num_unfinished > 10


@pytest.mark.parametrize("is_cached", [False, True], ids=["new", "cached"])
def test_no_page_is_lost_where_an_interrupt_comes_between_the_operations_of_a_text(
    is_cached: bool, monkeypatch: pytest.MonkeyPatch
):
    """From its admission to its end, at the lines that hand its sequence on."""
    monkeypatch.setattr(faults, "_TRACED", ("localinfer/engine/cache/prefix_cache.py",))
    token_ids = np.arange(1, 24, dtype=np.int32)
    num_lines = num_abandoned = 0
    while True:
        cache = PrefixCache(FakeLayout(page_tokens=4, page_bytes=64), max_bytes=None, context_length=1000)
        if is_cached:
            use_text(cache, token_ids[:10])
        num_lines += 1
        interrupt = LineInterrupt(num_lines)
        try:
            with interrupt:
                use_text(cache, token_ids)
        except KeyboardInterrupt:
            pass
        if not interrupt.has_fired:
            break
        num_abandoned += any(sequence.pages.size for sequence in cache.pool.abandoned)
        cache.clear()
        assert not cache.pool.abandoned and not cache.pool.sequences
        assert not cache.pool.held_bytes, num_lines
    assert num_lines > 50 and num_abandoned


def test_closed_pool_keeps_no_sequence():
    pool = PagePool(LAYOUT)
    sequence = SequenceCache(pool, max_length=1000)
    pool.close()
    del sequence
    assert not pool.abandoned


def test_pages_of_the_tree_are_counted_right_wherever_an_interrupt_comes():
    """A text that ends with a page is continued by a longer one, then its end is evicted."""
    layout = FakeLayout(page_tokens=4, page_bytes=64)
    num_lines = 0
    while True:
        pool = PagePool(layout)
        tree = PrefixTree(pool)
        first, more = pool.acquire(2), pool.acquire(2)
        tree.insert(np.arange(8, dtype=np.int32), first)
        num_lines += 1
        interrupt = LineInterrupt(num_lines)
        try:
            with interrupt:
                tree.insert(np.arange(16, dtype=np.int32), np.concatenate((first, more)))
                pool.release(np.concatenate((first, more)))
                tree.evict(1)
        except KeyboardInterrupt:
            pass
        if not interrupt.has_fired:
            break
        linked = sum(node.pages.size for node in tree.roots.nodes())
        assert tree.num_pages == linked, num_lines
    assert num_lines > 50
