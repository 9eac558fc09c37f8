"""Thousands of random steps of a cache whose model has a recurrent state, with pages and without: no state is ever of
another text, no slot is lost, and nothing is written while another reads it."""

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from localinfer.engine.cache.prefix_cache import PrefixCache
from localinfer.engine.cache.sequence import SequenceCache, forward
from localinfer.engine.cache.sequence_state import NO_SLOT, SequenceState, SnapshotPolicy
from localinfer.errors import OutOfMemoryError
from localinfer.kernels.cpu import guard
from localinfer.storage import prompt_cache as disk_cache
from localinfer.storage.prompt_cache import DiskCache, DiskOptions
from tests.engine.cache.test_cache_fuzz import CONTEXT, DISK_BYTES, SALTS, CacheOwner, Life
from tests.engine.cache.test_sequence import interrupt
from tests.engine.fake_recurrent import (
    LOG_BYTES,
    STATE_BYTES,
    FakeRecurrentProgram,
    read_state,
    recurrent_layout,
    repeated,
    state_of,
    words,
    write_state,
)
from tests.storage.test_prompt_cache import FakeIdentity

ROWS = 12
BUDGET = 90 * 64
POLICY = SnapshotPolicy(grid_tokens=8, grid_share=0.15, near_tokens=2)
NO_ROWS = np.zeros(0, np.int32)


class RecurrentLife(Life):
    """Random actions on the cache of a recurrent model; texts are computed by the scripted program."""

    def __init__(self, seed: int, page_bytes: int, disk_folder: Path | None = None) -> None:
        super().__init__(seed)
        self.page_bytes = page_bytes
        self.program = FakeRecurrentProgram(260, max_batch_rows=ROWS, has_pages=page_bytes > 0)
        self.cache = PrefixCache(
            recurrent_layout(page_bytes),
            max_bytes=BUDGET,
            context_length=CONTEXT,
            batch_tokens=ROWS,
            policy=POLICY,
            settle=self.program.settle,
        )
        self.counts |= dict.fromkeys(["verify", "fail", "keep"], 0)
        self.num_exact = 0
        if disk_folder is not None:
            options, owner = DiskOptions(disk_folder, DISK_BYTES), CacheOwner(self.cache)
            self.disk = DiskCache(owner, FakeIdentity(), options, idle_seconds=1e6)  # type: ignore[arg-type]

    def step(self) -> None:
        weights = dict(admit=8, extend=20, verify=16, fork=4, truncate=6, cancel=7, evict=1, insert=1, restore=1)
        weights |= dict(fail=3, keep=3)
        name = self.chooser.choices(list(weights), weights=list(weights.values()))[0]
        if len(self.running) > 6:
            name = "cancel"
        if not self.running and name not in ("admit", "insert", "restore", "evict"):
            return
        self.counts[name] += 1
        try:
            getattr(self, name)()
        except OutOfMemoryError:
            tree = self.cache.tree
            assert tree._oldest_leaf() is None and tree._least_place(None) is None, "something could be evicted"

    def write(self, index: int, token_ids: list[int], num_droppable: int = 0) -> None:
        sequence, ids, _ = self.running[index]
        token_ids = token_ids[: CONTEXT - len(ids)]
        ids += token_ids
        try:
            while sequence.length < len(ids):
                rows = np.array(ids[sequence.length :][:ROWS], np.int32)
                forward(self.program.run, (sequence,), (rows,), NO_ROWS, (num_droppable,))
        except (OutOfMemoryError, MemoryError):
            del ids[sequence.length :]
            raise

    def verify(self) -> None:
        """Compute drafts, and drop some of them."""
        index = self.chooser.randrange(len(self.running))
        sequence, ids, _ = self.running[index]
        count = self.chooser.randrange(1, 7)
        self.write(index, [self.chooser.randrange(3) for _ in range(count)], num_droppable=count)
        if len(ids) == sequence.length and self.chooser.random() < 0.9:
            length = len(ids) - self.chooser.randrange(min(count, len(ids)) + 1)
            if length >= sequence._state.now.position:
                assert sequence.truncate(length) == length, "what was logged can be dropped"
                del ids[length:]

    def fail(self) -> None:
        """A step that fails leaves everything as it was."""
        index = self.chooser.randrange(len(self.running))
        sequence, ids, _ = self.running[index]
        before = sequence.length
        if before + 3 > CONTEXT:
            return
        self.program.fails_at = {before + self.chooser.randrange(3)}
        try:
            self.write(index, [1, 1, 1], num_droppable=self.chooser.choice([0, 2]))
        except OutOfMemoryError:
            raise
        except MemoryError:
            pass
        finally:
            self.program.fails_at = set()
        assert sequence.length == before == len(ids)

    def keep(self) -> None:
        self.chooser.choice(self.running)[0].keep_state()

    def truncate(self) -> None:
        sequence, ids, _ = self.chooser.choice(self.running)
        length = self.chooser.randrange(len(ids) + 1)
        state = sequence._state
        held = [place.position for place in (state.now, state.before, state._kept) if place is not None]
        deepest = max((place for place in [0, *held, *state.taken] if place <= length), default=0)
        left = sequence.truncate(length)
        assert deepest <= left <= length, "a state was held that is deeper"
        self.num_exact += left == length
        del ids[left:]

    def insert(self) -> None:
        ids = np.array([self.chooser.randrange(3) for _ in range(self.chooser.randrange(1, 30))], np.int32)
        pool = self.cache.pool
        pages = pool.acquire(pool.num_pages_for(ids.size))
        try:
            slot = pool.take_slot(pool.states)
        except OutOfMemoryError:
            pool.release(pages)
            raise
        write_state(pool.states.address(slot), state_of(ids.tolist()))
        if self.page_bytes:
            for position, token_id in enumerate(ids):
                self.slots(pages[position // 4])[position % 4] = token_id
        self.cache.tree.insert(ids, pages, snapshots={ids.size: slot}, salt=self.chooser.choice(SALTS))
        pool.release(pages)
        pool.release_state(slot)
        self.known.append(ids.tolist())

    def check(self) -> None:
        pool = self.cache.pool
        pages = np.zeros(pool.counts.size, np.int64)
        states: Counter[int] = Counter()
        logs: Counter[int] = Counter()
        users: set[tuple[str, int, bytes]] = set()
        for sequence, ids, salt in self.running:
            assert sequence.length == len(ids) == sequence._state.now.length
            pages[sequence.pages] += 1
            count_slots(sequence._state, states, logs)
            users.update(("page", page, salt) for page in sequence.pages.tolist())
            users.update(("state", slot, salt) for slot in sequence.state_slots)
        of_tree: Counter[int] = Counter()
        for node in self.cache.tree.roots.nodes():
            pages[node.pages] += 1
            users.update(("page", page, node.salt) for page in node.pages.tolist())
            users.update(("state", snapshot.slot, node.salt) for snapshot in node.snapshots.values())
            assert all(0 < offset <= node.token_ids.size for offset in node.snapshots)
            of_tree.update(snapshot.slot for snapshot in node.snapshots.values())
        states += of_tree
        assert len({(kind, number) for kind, number, _ in users}) == len(users), "two salts share a page or a state"
        assert (pool.counts == pages).all(), "a page is held too often or too rarely"
        assert self.cache.tree._nodes_of_slot == of_tree
        assert pool.states._counts == dict(states), "a state is held too often or too rarely"
        assert pool.logs._counts == dict(logs), "a log is held too often or too rarely"
        assert pool.grid <= pool.states.held and pool.allocated_bytes <= BUDGET
        self.check_contents()
        if guard.IS_ON:
            # They are protected.
            return
        for slot in pool.states.memory.free:
            words(pool.states.address(slot), STATE_BYTES)[:] = 7
        for slot in pool.logs.memory.free:
            words(pool.logs.address(slot), LOG_BYTES)[:] = 7

    def check_contents(self) -> None:
        address = self.cache.pool.states.address
        for path in self.cache.tree.paths():
            ids = path.token_ids.tolist()
            for position, slot in path.snapshots.items():
                assert read_state(address(slot)) == state_of(ids[:position]), "a snapshot is of another text"
            if self.page_bytes:
                held = [int(self.slots(path.pages[p // 4])[p % 4]) for p in range(len(ids))]
                assert held == ids, "a page was lost or overwritten"
        for sequence, ids, _ in self.running:
            step = sequence._state.step(1, is_logged=False) if sequence._state.next_state != NO_SLOT else None
            if step is not None and sequence.length == len(ids):
                assert repeated(step) == state_of(ids), "a sequence's states are of another text"
            for position, slot in sequence._state.taken.items():
                assert read_state(address(slot)) == state_of(ids[:position])


def count_slots(state: SequenceState, states: Counter[int], logs: Counter[int]) -> None:
    places = [place for place in (state.now, state.before, state._kept) if place is not None]
    slots = [place.slot for place in places] + [state.next_state, *state.taken.values()]
    slots += [slot for _, slot in state._planned.snapshots]
    states.update(slot for slot in slots if slot != NO_SLOT)
    logs.update(slot for slot in [*(place.log for place in places), state.next_log] if slot != NO_SLOT)


def test_snapshots_after_a_place_are_gone_before_the_sequence_is_there(monkeypatch: pytest.MonkeyPatch):
    life = RecurrentLife(7, 64)
    while not any(max(sequence._state.taken, default=0) > 3 for sequence, _, _ in life.running):
        life.step()
    sequence = next(one for one, _, _ in life.running if max(one._state.taken, default=0) > 3)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sequence._state, "release", interrupt)
        sequence.truncate(3)
    assert sequence.length <= 3 and max(sequence._state.taken, default=0) <= 3


@pytest.mark.skipif(sys.gettrace() is not None, reason="another tracer is at work")
@pytest.mark.parametrize("page_bytes", [64, 0])
def test_interrupt_at_any_line_never_leaves_a_wrong_state(page_bytes: int):
    num_interrupted = 0
    for seed in range(40):
        life = RecurrentLife(seed, page_bytes)
        for _ in range(20):
            life.step()
        num_interrupted += life.interrupted_step(life.chooser.randrange(1, 160))
        life.program.fails_at = set()
        for sequence, ids, _ in life.running:
            del ids[sequence.length :]
        for _ in range(10):
            life.step()
            life.check_contents()
        life.give_up()
        for _ in range(15):
            life.step()
            life.check_contents()
    assert num_interrupted > 14


@pytest.mark.parametrize("page_bytes", [64, 0])
def test_recurrent_cache_survives_thousands_of_random_steps_without_a_leak(
    page_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(disk_cache, "num_io_threads", lambda: 1)
    life = RecurrentLife(20, page_bytes, tmp_path)
    for number in range(1500):
        life.step()
        if number % 20 == 0 or number < 200:
            life.check()
    tree = life.cache.tree
    assert min(life.counts.values()) > 10 and life.num_cached_tokens > 300 and life.num_exact > 20
    assert tree.evicted_snapshots > 40 and tree.taken_snapshots > 100 and life.program.num_settled > 12
    assert life.disk is not None
    disk = life.disk.counters
    assert disk.pages_read > 30 and disk.pages_written > 30
    assert not disk.rejected and not disk.failed_saves
    life.disk.close()
    for sequence, _, _ in life.running:
        sequence.close()
    life.running.clear()
    life.cache.clear()
    life.check()
    assert life.cache.pool.held_bytes == 0 and not life.cache.pool.grid


def test_sequence_goes_back_to_what_it_holds():
    program = FakeRecurrentProgram(260, max_batch_rows=ROWS)
    cache = PrefixCache(recurrent_layout(), max_bytes=None, context_length=CONTEXT, settle=program.settle)
    sequence: SequenceCache = cache.open()

    def run(count: int, num_droppable: int = 0) -> None:
        rows = np.arange(sequence.length, sequence.length + count, dtype=np.int32)
        forward(program.run, (sequence,), (rows,), NO_ROWS, (num_droppable,))

    run(10)
    assert sequence.truncate(9) == 0, "inside a step that logged nothing"
    run(10)
    run(1)
    assert sequence.truncate(10) == 10, "before the last step"
    run(8, num_droppable=7)
    assert sequence.truncate(15) == 15 and sequence.truncate(12) == 12
    run(5, num_droppable=4)
    assert sequence.truncate(13) == 13 and sequence.log_slots
    run(1)
    assert sequence.truncate(13) == 13, "before the last step, whose states had a log"
    run(1)
    run(1)
    sequence.keep_state()
    for _ in range(3):
        run(1)
    assert sequence.truncate(16) == 15 and sequence.length == 15
    assert sequence.truncate(0) == 0
    sequence.close()
    assert cache.pool.held_bytes == 0
