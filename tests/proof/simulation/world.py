"""The simulated world: one engine after the other, its callers, and what goes wrong; one operation at a time.

An operation is a name and numbers, and does the same whatever operations were left out before it: it names callers by
the operation that they began with, and draws what else it needs from its own number.
"""

import gc
import random
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from localinfer.engine.admission import EngineLimits
from localinfer.engine.cache.prefix_cache import PrefixCache
from localinfer.engine.cache.sequence_state import SnapshotPolicy
from localinfer.engine.engine import Engine
from localinfer.engine.request import Waiter
from localinfer.engine.speculation.costs import VerificationCosts
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.engine.speculation.verify import Speculation
from localinfer.errors import OutOfMemoryError
from localinfer.generation.beam_search import search_beams
from localinfer.generation.pooling import PooledText, TextPooler
from localinfer.models.decoder.block_config import Pooling
from tests.proof.simulation.callers import Caller, Scores, draw_wish
from tests.proof.simulation.checks import Accounts, check_contents, check_salts, poison, require
from tests.proof.simulation.clock import Clock
from tests.proof.simulation.cold import Oracle
from tests.proof.simulation.disk import Disk, Killed
from tests.proof.simulation.faults import Faults, LineInterrupt, SimulatedError, Violation
from tests.proof.simulation.kept import Kept
from tests.proof.simulation.models import SIZES, SimulatedModel, SimulatedProgram, TinyModel, tiny_model
from tests.proof.simulation.operations import Operation
from tests.proof.simulation.universe import TokenIds, Universe
from tests.proof.simulation.watching import watch_choices, watch_ends, watch_eviction, watch_priorities, watch_steps

MOST_CALLERS = 9
_MOST_TEXTS = 24
_GRID_TOKENS, _NEAR_TOKENS = 48, 6
_DRAWS = ("random", "randrange", "randint", "choice", "choices", "sample", "getrandbits", "shuffle")
ACCOUNTS_EVERY, CONTENTS_EVERY = 24, 160


class World:
    """Everything that a run is about. `apply` does one operation; whatever it raises is a violation."""

    def __init__(self, model: str, number: int) -> None:
        _freeze(model)
        self.name, self.weights = model, 1
        self.tiny: TinyModel = tiny_model(model)
        self.oracle = oracle_of(model, 1)
        self.universe = Universe.of(self.tiny.vocab_size, [run.ids for run in self.tiny.gallery.runs])
        self.clock = Clock()
        self.disk = Disk(random.Random(number), self.clock)
        self.kept = Kept(self, self.disk)
        self.callers: dict[int, Caller | Scores] = {}
        self.texts: dict[int, tuple[TokenIds, int]] = {}
        self.plans: dict[Any, Caller] = {}
        self.counts: dict[str, int] = {}
        self.outcomes: dict[str, int] = {}
        self.is_closed = True
        self.num_steps = 0
        self._number = number

    @contextmanager
    def installed(self) -> Generator[None]:
        """Begin with the first engine, which has the simulated clock and disk, and takes snapshots close together."""
        keywords: Any = PrefixCache.__init__.__kwdefaults__
        policy = keywords["policy"]

        def wait(waiter: Waiter) -> None:
            raise Violation("the lock of steps is held by nobody who would release it")

        wait_before = Waiter.wait
        Waiter.wait = wait  # type: ignore[method-assign]
        keywords["policy"] = SnapshotPolicy(grid_tokens=_GRID_TOKENS, near_tokens=_NEAR_TOKENS)
        gc.disable()
        try:
            with self.disk.installed():
                self._begin(self._number)
                yield
        finally:
            gc.enable()
            Waiter.wait = wait_before  # type: ignore[method-assign]
            keywords["policy"] = policy

    @property
    def cache(self) -> PrefixCache:
        """The engine's."""
        return self.engine._cache

    def apply(self, operation: Operation) -> None:
        """Do one operation, where it has a meaning."""
        self.counts[operation.name] = self.counts.get(operation.name, 0) + 1
        chooser: Any = _Drawn(operation.number)
        self.disk.random = chooser
        try:
            getattr(self, f"_{operation.name}")(operation, chooser)
        except BaseException as error:
            # What a dead process does on its way out means nothing.
            if not isinstance(error, Killed) and not self.disk.process.is_dead:
                raise
        if self.disk.process.is_dead:
            self._die(chooser)
        callers = self.callers
        if (
            self.faults.took_memory
            or self.accounts.has_lost
            or any(isinstance(one, Scores) for one in callers.values())
        ):
            # Pages that others hold are not taken from them for requests.
            self.faults.took_memory = False
            for caller in callers.values():
                caller.may_lack_memory = True
        self._leave_over()
        if operation.index % ACCOUNTS_EVERY == 0:
            self.check_accounts()
        if operation.index % CONTENTS_EVERY == 0:
            self.check_contents()

    def _leave_over(self) -> None:
        for number in [number for number, caller in self.callers.items() if caller.is_over]:
            self._leave(number)

    def finish(self) -> None:
        """End the run: everything is checked, all leave, and nothing may be left."""
        self.check_contents()
        self.kept.mend()
        self._close_engine(random.Random(0))

    def check_accounts(self, *, may_lose: bool = False) -> None:
        """See `Accounts`."""
        pool = self.engine.pool
        # One that Ctrl-C kept from being closed holds its pages while drafts name it, and then waits in the pool.
        self.accounts.check(self.cache, {*pool.sequences, *pool.abandoned}, may_lose=may_lose)
        check_salts(self.cache, self.engine.scheduler.requests())

    def check_contents(self) -> None:
        """See `check_contents`; what is free is overwritten first."""
        self.check_accounts()
        self.kept.check()
        poison(self.engine.pool)
        held = [
            (request.sequence, request.context_ids())
            for request in self.engine.scheduler.requests()
            if request.sequence is not None
        ]
        check_contents(self.cache, held, self.oracle)

    # Operations.

    def _begin(self, number: int) -> None:
        """A new engine: how much memory it has, its batches, its limits, and whether it drafts, by the number."""
        chooser = random.Random(number)
        self.faults = Faults()
        # Another model may find the files of this one.
        self.weights = 2 if chooser.random() < 0.2 else 1
        self.tiny, self.oracle = tiny_model(self.name, self.weights), oracle_of(self.name, self.weights)
        rows = chooser.randrange(len(SIZES))
        self.batch_rows = SIZES[rows][0]
        layout = self.tiny.layout
        program = SimulatedProgram(self.tiny.programs[rows], self._hook)
        self.model = SimulatedModel(self.tiny, program)
        page = layout.page_bytes + layout.windowed_bytes
        num_pages = chooser.choice((5, 7, 8, 10, 14, 20, 40))
        kv_memory = num_pages * page + chooser.choice((2, 4, 6, 9)) * (layout.state_bytes + layout.log_bytes)
        self.limits = EngineLimits(
            max_running=chooser.choice((1, 2, 3, 5, 8)),
            max_queued=chooser.choice((None, None, 0, 2)),
            aging_seconds=chooser.choice((30.0, 0.01, 0.0, None)),
        )
        self.speculation = None
        if chooser.random() < 0.5:
            costs = VerificationCosts([1e-3 * (1 + rows / 50) for rows in range(16)])
            self.speculation = Speculation(costs, ngram=NgramDrafter(), model=None, clock=self.clock.perf_counter)
        self.threads = threading.active_count()
        self.engine = Engine(
            self.model,  # type: ignore[arg-type]
            kv_memory=kv_memory,
            speculation=self.speculation,
            limits=self.limits,
        )
        self.is_closed = False
        self.pooler = TextPooler(self.engine, self.model)  # type: ignore[arg-type]
        self.faults.install(self.engine.pool)
        self.accounts = Accounts(self.engine.pool)
        watch_choices(self)
        watch_steps(self)
        watch_priorities(self)
        watch_ends(self)
        watch_eviction(self.cache.tree)
        self.kept.open(chooser)

    def _die(self, chooser: random.Random) -> None:
        """The process was killed, or the power cut; another one begins, with what is left on the disk."""
        self.count(died=1)
        self._count_life()
        self.kept.forget()
        self.is_closed = True
        for caller in self.callers.values():
            if isinstance(caller, Caller):
                caller.generation = None
        self.callers.clear()
        self.plans.clear()
        # The memory of the process.
        self.cache._tier = None
        self.engine.close()
        self.disk.restart(power_cut=self.kept.has_lost_power(chooser))
        self._begin(chooser.getrandbits(32))

    def _restart(self, operation: Operation, chooser: random.Random) -> None:
        self._close_engine(chooser)
        self._begin(operation.number)

    def _close_engine(self, chooser: random.Random) -> None:
        """Close the engine, with or without callers, who must notice, and see that nothing is left."""
        if chooser.random() < 0.5:
            for number in list(self.callers):
                self._leave(number)
            self._sweep()
        engine = self.engine
        self._count_life()
        self.kept.close()
        engine.close()
        self.is_closed = True
        for caller in list(self.callers.values()):
            for _ in range(8):
                if not caller.is_over:
                    caller.read()
            require(caller.is_over or isinstance(caller, Caller), "a text goes on after its model was closed")
        for number in list(self.callers):
            self._leave(number)
        engine.close()
        pool = engine.pool
        require(pool.allocated_bytes == 0, f"{pool.allocated_bytes} bytes are left after the model was closed")
        require(self.model.times_closed == 1, f"the model was closed {self.model.times_closed} times")
        require(threading.active_count() == self.threads, "a thread is left after the model was closed")
        self.plans.clear()
        self._num_runs = 0

    def count(self, **numbers: int) -> None:
        """Add to the outcomes."""
        for name, number in numbers.items():
            self.outcomes[name] = self.outcomes.get(name, 0) + number

    def _count_life(self) -> None:
        """Note what an engine has met, to see that a simulation does not pass it by."""
        counters, tier = self.cache.counters, self.kept.tier
        self.count(
            preemptions=self.engine.scheduler.admission.preemptions,
            prompt_tokens=counters.prompt_tokens,
            cached_tokens=counters.cached_tokens,
            evicted_tokens=self.cache.tree.evicted_tokens,
            snapshot_hits=counters.snapshot_hits,
            faults=self.faults.num_fired,
            lost=self.accounts.has_lost,
        )
        if tier is not None:
            self.count(read_pages=tier.counters.pages_read, written_pages=tier.counters.pages_written)
            self.count(rejected_files=tier.counters.rejected.total() + tier.snapshot_counters.rejected.total())
            self.count(read_states=tier.snapshot_counters.pages_read)

    def _sweep(self) -> None:
        """With nobody left: no sequence holds anything, and the tree can be emptied."""
        self.faults.clear()
        with self.engine.exclusive_cache() as cache:
            cache.clear()
        require(not self.engine.scheduler.requests(), "a request is left that nobody reads")
        require(not self.engine.scheduler.running, "a request runs that nobody reads")
        self.check_accounts()
        left = [one for one in self.engine.pool.sequences if one.pages.size]
        require(not left or self.accounts.has_lost, f"{len(left)} sequences are left that nobody reads")
        require(not self.engine.pool.held_bytes or self.accounts.has_lost, "memory is held that nobody uses")

    def _leave(self, number: int) -> None:
        caller = self.callers.pop(number, None)
        if caller is None:
            return
        if isinstance(caller, Caller):
            self.plans.pop(caller.plan, None)
            self.count(finished=caller.is_finished, tokens=caller.count, drafted=caller.num_drafted)
        caller.end()
        if isinstance(caller, Caller):
            self.texts[number] = caller.text(), caller.wish.prompt.size
            while len(self.texts) > _MOST_TEXTS:
                del self.texts[next(iter(self.texts))]

    def _complete(self, operation: Operation, chooser: random.Random) -> None:
        """A caller with a prompt of the universe."""
        prompt, system = self.universe.prompt(chooser)
        self._add_caller(operation, chooser, prompt, system)

    def _branch(self, operation: Operation, chooser: random.Random) -> None:
        """A caller who goes on from a former text, its end or an earlier place, or edits it."""
        found = self.texts.get(operation.target)
        if found is None:
            return
        text, start = found
        # Where the reply ends, after some of it, where its prompt ends, or an edit of what came before.
        cut = chooser.choice((start, start + 2, start + 8, start + 8, start // 2, 32, 33))
        parts = [text[: max(1, min(cut, 150))]]
        if chooser.random() < 0.9:
            parts.append(self.universe.turn(chooser))
        system = chooser.choice((0, 0, 20, 45))
        prompt = np.concatenate(parts)
        self._add_caller(operation, chooser, prompt, min(system, prompt.size))

    def _add_caller(self, operation: Operation, chooser: random.Random, prompt: TokenIds, system: int) -> None:
        if len(self.callers) >= MOST_CALLERS:
            return
        wish = draw_wish(self, chooser, prompt, system)
        caller = Caller(self, wish, is_slow=chooser.random() < 0.25)
        if caller.begin():
            self.callers[operation.index] = caller
            self.plans[caller.plan] = caller

    def _score(self, operation: Operation, chooser: random.Random) -> None:
        """A caller who wants the logits of a whole text."""
        token_ids = self.tiny.gallery.mended(self.universe.prompt(chooser)[0][:150])
        if len(self.callers) < MOST_CALLERS and self.engine.pool.peak_bytes(token_ids.size, self.batch_rows) <= (
            self.engine.pool.max_bytes or 0
        ):
            self.callers[operation.index] = Scores(self, token_ids)

    def _read(self, operation: Operation, chooser: random.Random) -> None:
        caller = self.callers.get(operation.target)
        if caller is not None and not caller.is_over:
            self.num_steps = 0
            caller.read()

    def _cancel(self, operation: Operation, chooser: random.Random) -> None:
        caller = self.callers.get(operation.target)
        if caller is not None:
            caller.cancel()

    def _close(self, operation: Operation, chooser: random.Random) -> None:
        """A caller closes its text, or just forgets it."""
        caller = self.callers.get(operation.target)
        if caller is None:
            return
        if isinstance(caller, Caller) and chooser.random() < 0.5:
            caller.generation = None
            caller.is_over = True
        else:
            caller.end()

    def _beams(self, operation: Operation, chooser: random.Random) -> None:
        prompt = self.tiny.gallery.mended(self.universe.prompt(chooser)[0][:120])
        media = self.tiny.gallery.media(prompt)
        num_beams, most = chooser.choice((2, 3)), chooser.choice((2, 4))
        key: Any = (prompt.tobytes(), num_beams, most)
        wanted = self.oracle.known(key)
        if wanted is None:
            model = SimulatedModel(self.tiny, SimulatedProgram(self.tiny.cold, lambda place, rows: None))
            cold = Engine(model, kv_memory=1 << 24)  # type: ignore[arg-type]
            wanted = self.oracle.remember(
                key, search_beams(cold, prompt, num_beams=num_beams, max_tokens=most, media=media)
            )
            cold.close()
        try:
            found = search_beams(self.engine, prompt, num_beams=num_beams, max_tokens=most, media=media)
        except (OutOfMemoryError, SimulatedError):
            # Pages of running texts are not taken from them for it.
            return
        require(found == wanted, "beams are not those of a cold search")

    def _embed(self, operation: Operation, chooser: random.Random) -> None:
        texts = [self.universe.prompt(chooser)[0][:100] for _ in range(chooser.choice((1, 2, 3)))]
        # Vectors are of words.
        texts = [np.append(text[text >= 0], np.int32(5)) for text in texts]
        pooling = chooser.choice((Pooling.MEAN, Pooling.LAST))
        try:
            vectors = self.pooler.pool([PooledText(text) for text in texts], pooling)
        except (OutOfMemoryError, SimulatedError):
            return
        for text, vector in zip(texts, vectors, strict=True):
            wanted = self.oracle.remember((text.tobytes(), pooling), vector.tobytes())
            require(vector.tobytes() == wanted, "a vector is not what it was before")

    def _clear(self, operation: Operation, chooser: random.Random) -> None:
        with self.engine.exclusive_cache() as cache:
            cache.clear()

    def _forget(self, operation: Operation, chooser: random.Random) -> None:
        found = self.texts.get(operation.target)
        if found is None:
            return
        text = found[0]
        with self.engine.exclusive_cache() as cache:
            others = [(path.token_ids, path.salt) for path in cache.tree.paths()]
            cache.forget(text)
            for other, salt in others:
                is_part = not salt and np.array_equal(other, text[: other.size])
                is_there = cache.tree.match(other, salt).length == other.size
                require(is_part or is_there, "a text is gone with another one's end")

    def _evict(self, operation: Operation, chooser: random.Random) -> None:
        with self.engine.exclusive_cache() as cache:
            before = cache.tree.num_pages
            freed = cache.tree.evict(chooser.randrange(1, 6))
            require(cache.tree.num_pages == before - freed, "the tree says that it freed what it did not")

    def _jump(self, operation: Operation, chooser: random.Random) -> None:
        """Time passes, or the clock is set; time that passes may come from a machine that slept."""
        self.clock.advance(chooser.choice((0.001, 0.5, 7.0, 100_000.0)))
        self.clock.jump(chooser.choice((0.0, -3600.0, 1e6)))

    def _fault(self, operation: Operation, chooser: random.Random) -> None:
        """Something will go wrong soon, and no further than this many times."""
        kind = chooser.choice(("program", "memory", "system"))
        setattr(self.faults, kind, chooser.choice((1, 1, 2, 3)))

    def _mend(self, operation: Operation, chooser: random.Random) -> None:
        """Nothing more goes wrong."""
        self.faults.clear()

    def _interrupt(self, operation: Operation, chooser: random.Random) -> None:
        """Ctrl-C in the midst of a caller's step: at a place of it, or at any line."""
        caller = self.callers.get(operation.target)
        if not isinstance(caller, Caller) or caller.is_over:
            return
        self.num_steps = 0
        is_at_line = chooser.random() < 0.4
        lines = LineInterrupt(chooser.randrange(1, chooser.choice((40, 400, 1500))))
        try:
            if is_at_line:
                with lines:
                    caller.read()
            else:
                self.faults.interrupt = chooser.choice((1, 1, 2, 3, 5))
                caller.read()
        except KeyboardInterrupt:
            caller.is_over = True
            # Without a traceback, which holds frames, and they what was interrupted.
            caller.end()
        finally:
            self.faults.interrupt = 0
        if lines.has_fired:
            self._leave_over()
            gc.collect()
            self.cache.pool.recover()
            self.check_accounts(may_lose=True)

    def _write(self, operation: Operation, chooser: random.Random) -> None:
        """The writer of the prompt cache takes some steps."""
        self.kept.write(chooser)

    def _save(self, operation: Operation, chooser: random.Random) -> None:
        """A text is saved as a session."""
        found = self.texts.get(operation.target)
        self.kept.save(chooser, None if found is None else found[0])

    def _load(self, operation: Operation, chooser: random.Random) -> None:
        """A session is loaded."""
        self.kept.load(chooser)

    def _spoil(self, operation: Operation, chooser: random.Random) -> None:
        """The disk goes wrong for some operations, or the process will be killed at one of them."""
        self.kept.spoil(chooser)

    # What the product calls.

    def tell_encoding(self) -> None:
        """An encoder runs, and may fail."""
        self.faults.at("before a pass")

    def _hook(self, place: str, rows: int) -> None:
        if rows:
            self.clock.advance(1e-4 * (8 + rows))
        self.faults.at(place)


class _Drawn:
    """`random.Random` of a number, made when something is drawn: most operations draw nothing, and it takes as long."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __getattr__(self, name: str) -> Any:
        assert name in _DRAWS, "else it would begin again each time"
        chooser = random.Random(self._number)
        self.__dict__.update((known, getattr(chooser, known)) for known in _DRAWS)
        return self.__dict__[name]


@cache
def _freeze(model: str) -> None:
    """Load what a model's runs share, and spare the garbage collector all of it, once per process."""
    for weights in (1, 2):
        oracle_of(model, weights)
    gc.collect()
    gc.freeze()


@cache
def oracle_of(model: str, seed: int) -> Oracle:
    """The oracle of a model, one per process."""
    return Oracle(tiny_model(model, seed))
