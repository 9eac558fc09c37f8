"""Thousands of random steps of everything a cache can go through, beside a plain dictionary that cannot be wrong.

Every page carries what was written into it, so a page that was lost, shared while written or freed too early shows, and
so does one that a text took from another salt, as each writes its ids in another way. A cache of a model with sliding
windows carries it in the windowed parts too, looks at them as such layers would, and at what nobody holds any more it
finds ids that no text has.
"""

import ctypes
import random
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import NO_SALT, salt_of
from localinfer.engine.cache.block_pool import PagePool
from localinfer.engine.cache.prefix_cache import CacheHints, PrefixCache
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.media import EmbeddingStore
from localinfer.errors import OutOfMemoryError
from localinfer.kernels.cpu import guard
from localinfer.storage import prompt_cache as disk_cache
from localinfer.storage.prompt_cache import DiskCache, DiskOptions
from tests.engine.fakes import FakeLayout
from tests.storage.test_prompt_cache import FakeIdentity

PAGE_TOKENS = 4
CONTEXT = 60
BUDGET_PAGES = 60
DISK_BYTES = 30_000
STEPS = 1_800
WINDOW = 7
SALTS = (NO_SALT, salt_of("one"), salt_of("two"))
TRACED = (
    "cache/radix_tree.py",
    "cache/prefix_tree.py",
    "cache/prefix_cache.py",
    "cache/sequence.py",
    "cache/sequence_state.py",
    "cache/block_pool.py",
)


class CacheOwner:
    """What the disk asks of an engine."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self.embeddings = EmbeddingStore()

    @property
    def pool(self) -> PagePool:
        return self._cache.pool

    @contextmanager
    def exclusive_cache(self) -> Generator[PrefixCache]:
        yield self._cache


class Life:
    """Random actions on a PrefixCache; `running` is the model: each sequence, the ids it must hold, and its salt."""

    def __init__(self, seed: int, disk_folder: Path | None = None, window: int = 0) -> None:
        self.chooser = random.Random(seed)
        layout = FakeLayout(page_tokens=PAGE_TOKENS, page_bytes=64, window=window, windowed_bytes=64 if window else 0)
        self.window = window
        self.cache = PrefixCache(layout, max_bytes=BUDGET_PAGES * 64, context_length=CONTEXT, batch_tokens=12)
        self.running: list[tuple[SequenceCache, list[int], bytes]] = []
        self.known: list[list[int]] = [[1, 2, 3]]
        self.counts = dict.fromkeys(["admit", "extend", "fork", "truncate", "cancel", "evict", "insert", "restore"], 0)
        self.num_cached_tokens = self.num_unusable = self.num_explained = 0
        self.disk: DiskCache | None = None
        if disk_folder is not None:
            options, owner = DiskOptions(disk_folder, DISK_BYTES), CacheOwner(self.cache)
            # Written when the life says so, never by itself.
            self.disk = DiskCache(owner, FakeIdentity(), options, idle_seconds=1e6)  # type: ignore[arg-type]

    def step(self) -> None:
        """Do one thing, if memory allows; a refusal must change nothing that matters."""
        name = self.chooser.choices(list(self.counts), weights=[8, 24, 4, 6, 6, 2, 2, 1])[0]
        if len(self.running) > 6:
            name = "cancel"
        if not self.running and name not in ("admit", "insert", "restore", "evict"):
            return
        self.counts[name] += 1
        try:
            getattr(self, name)()
        except OutOfMemoryError:
            assert self.cache.tree.evict(1) == 0, "memory ended although something could be evicted"

    def admit(self) -> None:
        base = self.chooser.choice(self.known)
        prompt = base[: self.chooser.randrange(len(base) + 1)]
        prompt = (prompt + [self.chooser.randrange(3) for _ in range(self.chooser.randrange(1, 12))])[:CONTEXT]
        salt = self.chooser.choice(SALTS)
        admission = self.cache.admit(np.array(prompt, np.int32), CacheHints(salt=salt))
        assert admission.cached_tokens == admission.sequence.length < len(prompt)
        if (miss := admission.miss) is not None and miss.cached:
            told = np.array([*prompt[: miss.position], *miss.cached], np.int32)
            owners = {
                path.salt for path in self.cache.tree.paths() if np.array_equal(path.token_ids[: told.size], told)
            }
            assert salt in owners or not owners, "a miss was explained by a text of another salt"
            self.num_explained += len(owners) > 0
        self.num_cached_tokens += admission.cached_tokens
        self.num_unusable += admission.miss is not None and admission.miss.cause == "windowed"
        self.running.append((admission.sequence, prompt[: admission.cached_tokens], salt))
        self.write(len(self.running) - 1, prompt[admission.cached_tokens :])
        self.publish(len(self.running) - 1)

    def extend(self) -> None:
        index = self.chooser.randrange(len(self.running))
        self.write(index, [self.chooser.randrange(3) for _ in range(self.chooser.randrange(1, 6))])
        if self.chooser.random() < 0.3:
            self.publish(index)

    def fork(self) -> None:
        sequence, ids, salt = self.chooser.choice(self.running)
        self.running.append((sequence.fork(), list(ids), salt))

    def truncate(self) -> None:
        sequence, ids, _ = self.chooser.choice(self.running)
        length = self.chooser.randrange(len(ids) + 1)
        if sequence.can_truncate(length):
            sequence.truncate(length)
            del ids[length:]

    def cancel(self) -> None:
        sequence, ids, salt = self.running.pop(self.chooser.randrange(len(self.running)))
        self.cache.retire(sequence, np.array(ids, np.int32), self.use(salt))
        self.known.append(ids)
        del self.known[:-20]

    def evict(self) -> None:
        before = self.cache.tree.num_pages
        freed = self.cache.tree.evict(self.chooser.randrange(1, 8))
        assert self.cache.tree.num_pages == before - freed

    def restore(self) -> None:
        """Have what ended written, forget what nobody uses, and take a former text up again, from the disk."""
        if self.disk is None:
            return
        self.disk.flush()
        self.cache.clear()
        self.admit()

    def insert(self) -> None:
        """Bring pages in from elsewhere, as a session file does."""
        ids = np.array([self.chooser.randrange(3) for _ in range(self.chooser.randrange(1, 30))], np.int32)
        pages, salt = self.cache.pool.acquire(self.cache.pool.num_pages_for(ids.size)), self.chooser.choice(SALTS)
        for position, token_id in enumerate(ids):
            for part in self.parts(pages[position // PAGE_TOKENS]):
                part[position % PAGE_TOKENS] = written(int(token_id), salt)
        self.cache.tree.insert(ids, pages, salt=salt)
        self.cache.pool.release(pages)
        self.known.append(ids.tolist())

    def write(self, index: int, token_ids: list[int]) -> None:
        sequence, ids, salt = self.running[index]
        token_ids = token_ids[: CONTEXT - len(ids)]
        sequence.reserve(len(ids) + len(token_ids))
        segment = sequence.segment(len(token_ids))
        for token_id in token_ids:
            page = int(sequence.pages[len(ids) // PAGE_TOKENS])
            assert self.cache.pool.counts[page] <= 1, "a shared page would be written"
            for part in self.parts(page):
                part[len(ids) % PAGE_TOKENS] = written(token_id, salt)
            ids.append(token_id)
            if segment.windowed_addresses is not None:
                self.look_back(segment.windowed_addresses, ids, salt)
        sequence.commit(len(ids))

    def look_back(self, addresses: NDArray[np.int64], ids: list[int], salt: bytes) -> None:
        """See what a windowed layer sees from the last position."""
        for position in range(max(0, len(ids) - self.window), len(ids)):
            address = int(addresses[position // PAGE_TOKENS])
            assert address, "a windowed part that was given back would be read"
            part = (ctypes.c_int32 * PAGE_TOKENS).from_address(address)
            wanted = written(ids[position], salt)
            assert part[position % PAGE_TOKENS] == wanted, "a windowed part was lost or overwritten"

    def publish(self, index: int) -> None:
        sequence, ids, salt = self.running[index]
        self.cache.publish(sequence, np.array(ids, np.int32), self.use(salt))

    def use(self, salt: bytes) -> CacheHints:
        system_tokens, is_pinned = self.chooser.choice([0, 0, 5, 9]), self.chooser.random() < 0.1
        return CacheHints(system_tokens=system_tokens, is_pinned=is_pinned, salt=salt)

    def slots(self, page: int) -> NDArray[np.int32]:
        return self.cache.pool.view(page)[: 4 * PAGE_TOKENS].view(np.int32)

    def windowed_slots(self, page: int) -> NDArray[np.int32]:
        return self.cache.pool.windowed_view(page)[: 4 * PAGE_TOKENS].view(np.int32)

    def parts(self, page: int) -> list[NDArray[np.int32]]:
        """All that is to be written of a page."""
        return [self.slots(page), self.windowed_slots(page)] if self.window else [self.slots(page)]

    def check(self) -> None:
        """Every page is held as often as it should be, and holds what it should."""
        pool = self.cache.pool
        # There are more numbers than pages.
        expected, expected_windowed = np.zeros((2, pool.counts.size), np.int64)
        for sequence, ids, _ in self.running:
            assert sequence.length == len(ids)
            expected[sequence.pages] += 1
            expected_windowed[sequence.pages[sequence.windowed]] += 1
        num_tree_pages = 0
        assert all(root.children for root in self.cache.tree.roots if root.salt), "the root of an unused salt was kept"
        for node in self.cache.tree.roots.nodes():
            assert node.parent is not None and node.salt == node.parent.salt
            assert node.pages.size == pool.num_pages_for(node.token_ids.size) > 0
            assert not node.children or node.token_ids.size % PAGE_TOKENS == 0
            expected[node.pages] += 1
            expected_windowed[node.pages[node.windowed]] += 1
            num_tree_pages += node.pages.size
        assert num_tree_pages == self.cache.tree.num_pages
        self.check_contents()
        pages = np.arange(expected.size)
        assert (pool.counts[pages] == expected).all(), "a page is held too often or too rarely"
        assert pool.num_pages - pool.num_free_pages == (expected > 0).sum()
        assert pool.allocated_bytes <= BUDGET_PAGES * 64
        if self.window:
            assert (pool.windowed_counts[pages] == expected_windowed).all(), "a windowed part is held wrongly often"
            assert pool.num_windowed == (expected_windowed > 0).sum()
            # In guard mode they are protected.
            for slot in () if guard.IS_ON else pool._windowed.free:
                address = int(pool._windowed.addresses[slot])
                (ctypes.c_int32 * PAGE_TOKENS).from_address(address)[:] = [-1] * PAGE_TOKENS

    def check_contents(self) -> None:
        """Every page holds what its sequence and its path in the tree say."""
        contents = [(sequence.pages, sequence.windowed, ids, salt) for sequence, ids, salt in self.running]
        for path in self.cache.tree.paths():
            windowed = self.cache.tree.match(path.token_ids, path.salt).windowed
            contents.append((path.pages, windowed, path.token_ids.tolist(), path.salt))
        for pages, windowed, token_ids, salt in contents:
            ids = [written(token_id, salt) for token_id in token_ids]
            held = [int(self.slots(pages[p // PAGE_TOKENS])[p % PAGE_TOKENS]) for p in range(len(ids))]
            assert held == ids, "a page was lost or overwritten"
            for index in np.flatnonzero(windowed).tolist() if self.window else ():
                part = ids[index * PAGE_TOKENS : (index + 1) * PAGE_TOKENS]
                held = self.windowed_slots(int(pages[index]))[: len(part)].tolist()
                assert held == part, "a windowed part was lost or overwritten"

    def interrupted_step(self, lines: int) -> bool:
        """Do one thing that Ctrl-C ends after so many lines of the cache; return whether it came to that."""
        left = lines

        def trace(frame: FrameType, event: str, argument: object) -> object:
            nonlocal left
            if not frame.f_code.co_filename.endswith(TRACED):
                return trace if event == "call" else None
            left -= event == "line"
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            self.step()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(None)
        return False

    def give_up(self) -> None:
        """Close what runs, as the engine does after Ctrl-C, leaving to the tree what was computed."""
        for sequence, ids, salt in self.running:
            self.cache.retire(sequence, np.array(ids[: sequence.length], np.int32), self.use(salt))
        self.running.clear()


def written(token_id: int, salt: bytes) -> int:
    """What stands in a page for an id of a text."""
    return token_id + 10 * SALTS.index(salt)


@pytest.mark.skipif(sys.gettrace() is not None, reason="another tracer is at work")
@pytest.mark.parametrize(("window", "num_lives"), [(0, 24), (WINDOW, 24)])
def test_interrupt_at_any_line_never_leaves_a_wrong_page(window: int, num_lives: int):
    num_interrupted = 0
    for seed in range(num_lives):
        life = Life(seed, window=window)
        for _ in range(25):
            life.step()
        num_interrupted += life.interrupted_step(life.chooser.randrange(1, 120))
        life.give_up()
        life.check_contents()
        for _ in range(25):
            life.step()
            life.check_contents()
    assert num_interrupted > 0.4 * num_lives


@pytest.mark.parametrize("window", [0, WINDOW])
def test_cache_survives_thousands_of_random_steps_without_a_leak(
    window: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Starting threads for pages of 64 bytes would take most of the time; other tests have them.
    monkeypatch.setattr(disk_cache, "num_io_threads", lambda: 1)
    life = Life(20, tmp_path, window)
    assert life.disk is not None
    for number in range(STEPS):
        life.step()
        if number % 25 == 0 or number < 150:
            life.check()
    assert min(life.counts.values()) > 20 and life.num_cached_tokens > 900
    assert not window or life.num_unusable > 5
    assert life.cache.tree.evicted_tokens > 180 and life.num_explained > 18
    disk = life.disk.counters
    assert disk.pages_read > 90 and disk.pages_written > 90 and disk.bytes_deleted > 0
    assert not disk.rejected and not disk.failed_saves
    life.disk.close()
    for sequence, _, _ in life.running:
        sequence.close()
    life.running.clear()
    life.cache.clear()
    life.check()
    assert life.cache.pool.num_free_pages == life.cache.pool.num_pages
