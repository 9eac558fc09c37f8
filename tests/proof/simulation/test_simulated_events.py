"""KV cache events, replayed: after every simulated operation they tell exactly what the prefix tree holds."""

import random
import sys

import pytest

from tests.proof.simulation import campaign
from tests.proof.simulation.campaign import Report, run_seed
from tests.proof.simulation.checks import require
from tests.proof.simulation.operations import Operation
from tests.proof.simulation.world import World
from tests.storage.kv_events.known_blocks import KnownBlocks, blocks_of

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the simulated disk has the calls of other systems")
STEPS = 700


class ObservedWorld(World):
    """A world whose caches are observed. Where Ctrl-C came within a change of the tree, less may be known."""

    known: KnownBlocks | None = None

    def _begin(self, number: int) -> None:
        if self.known is not None:
            require(self.known.is_closed and not self.known.blocks, "a cache has ended, and its blocks are still known")
            self._count_events(self.known)
        super()._begin(number)
        require(not self.cache.tree.num_pages, "a new cache holds something")
        self.known = KnownBlocks(self.cache.pool.page_tokens)
        self.cache.observe(self.known)

    def apply(self, operation: Operation) -> None:
        super().apply(operation)
        if not self.is_closed:
            self.compare()

    def _interrupt(self, operation: Operation, chooser: random.Random) -> None:
        assert self.known is not None
        self.known.may_lack = True
        super()._interrupt(operation, chooser)

    def compare(self) -> None:
        assert self.known is not None
        known, there = set(self.known.blocks.values()), blocks_of(self.cache)
        if self.known.may_lack and known != there:
            require(known < there, "after Ctrl-C a block is known that is not there")
            self.count(lacking=1)
            return
        require(known == there, f"{len(known)} blocks are known by events, and {len(there)} are there")
        self.count(compared=1)

    def _count_events(self, known: KnownBlocks) -> None:
        self.count(stored=known.num_stored, removed=known.num_removed, cleared=known.num_cleared)


@pytest.mark.parametrize(("model", "seed"), [("dense", 1), ("window", 7), ("hybrid", 1)])
def test_events_tell_what_the_cache_holds_after_every_operation(
    monkeypatch: pytest.MonkeyPatch, model: str, seed: int
) -> None:
    """From seeds whose runs have everything that is counted below."""
    monkeypatch.setattr(campaign, "World", ObservedWorld)
    report = Report()
    run_seed(model, seed, STEPS, report)
    assert report.failure is None, report.failure.describe()
    counts = report.counts
    for name in ("stored", "removed", "cleared", "preemptions", "evicted_tokens", "read_pages", "restart", "interrupt"):
        assert counts[name] > 0, name
    assert counts["compared"] > STEPS // 2 and counts["compared"] > 9 * counts["lacking"]
