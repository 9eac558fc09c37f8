"""Priorities: the urgent go first, the least urgent gives way, nobody waits for ever, and no token changes."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from localinfer.engine import scheduler
from localinfer.engine.admission import EngineLimits
from localinfer.engine.engine import Engine
from localinfer.engine.request import Request, TokenEvent
from localinfer.engine.scheduler import Generation
from localinfer.errors import RequestError
from tests.engine.fakes import PAGE_BYTES
from tests.engine.generations import GREEDY, SEEDED, alone, numbers, wide_model
from tests.engine.test_engine import all_pages_are_free


class Readers:
    """Readers that wait, without threads: `step` takes a step of all, and each takes what has come for it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.texts: dict[Generation, list[TokenEvent]] = {}
        self.ended: list[Generation] = []

    def begin(self, prompt: list[int], **options: Any) -> Generation:
        generation = self.engine.generate(prompt, options.pop("sampling", GREEDY), **options)
        generation.request.is_started = True
        self.engine.scheduler.running.append(generation.request)
        self.texts[generation] = []
        return generation

    def step(self) -> None:
        with self.engine.scheduler.exclusive():
            self.engine.scheduler._step()
        for generation, text in self.texts.items():
            events = generation.request.events
            while events:
                text.append(events.popleft())
            if generation.request.is_over and generation not in self.ended:
                self.ended.append(generation)

    def finish(self, most: int = 1000) -> None:
        for _ in range(most):
            if len(self.ended) == len(self.texts):
                return
            self.step()
        raise AssertionError("somebody waits for ever")


def test_who_waits_for_a_place_is_admitted_by_priority() -> None:
    readers = Readers(Engine(wide_model(), limits=EngineLimits(max_running=1)))
    first = readers.begin(numbers(3), max_tokens=4, priority=-9)
    readers.step()
    by_priority = {
        priority: readers.begin(numbers(3, priority + 9), max_tokens=4, priority=priority) for priority in (5, 0, 7, -2)
    }
    readers.finish()
    assert readers.ended == [first, *(by_priority[priority] for priority in (-2, 0, 5, 7))]


def test_equal_priorities_are_admitted_in_order_of_arrival() -> None:
    readers = Readers(Engine(wide_model(), limits=EngineLimits(max_running=1)))
    asked = [readers.begin(numbers(3, seed), max_tokens=2, priority=3) for seed in range(5)]
    readers.finish()
    assert readers.ended == asked


def test_rows_of_prompts_go_to_the_most_urgent_first() -> None:
    model = wide_model(context_length=300, max_batch_rows=10, max_output_rows=4)
    readers = Readers(Engine(model))
    later = readers.begin(numbers(100, 1), max_tokens=1, priority=1)
    for _ in range(3):
        readers.step()
    begun = later.request.cache.length
    urgent = [readers.begin(numbers(60, seed), max_tokens=1) for seed in (2, 3)]
    while len(readers.ended) < 2:
        readers.step()
    assert set(readers.ended) == set(urgent)
    assert begun > 0 and later.request.cache.length < begun + 10, "only what was left of the last step's rows"
    readers.finish()


def test_an_urgent_prompt_does_not_wait_for_a_less_urgent_one_that_computes_the_same() -> None:
    model = wide_model(context_length=300, max_batch_rows=10, max_output_rows=4)
    readers = Readers(Engine(model))
    shared = numbers(200)
    readers.begin(shared, max_tokens=1, priority=5, owner="one")
    for _ in range(2):
        readers.step()
    urgent = readers.begin(shared, max_tokens=1, owner="one")
    other = readers.begin(numbers(200, 1), max_tokens=1, owner="one")
    readers.finish()
    assert readers.ended.index(urgent) < readers.ended.index(other)


def test_an_urgent_request_takes_the_place_of_the_least_urgent_and_no_token_changes() -> None:
    engine = Engine(wide_model(), limits=EngineLimits(max_running=2))
    readers = Readers(engine)
    low = readers.begin(numbers(5, 1), sampling=SEEDED, max_tokens=40, priority=2)
    lowest = readers.begin(numbers(5, 2), sampling=SEEDED, max_tokens=40, priority=4)
    for _ in range(9):
        readers.step()
    urgent = readers.begin(numbers(5, 3), sampling=SEEDED, max_tokens=10)
    readers.step()
    assert lowest.request.sequence is None and low.request.sequence is not None
    readers.finish()
    assert readers.ended[0] is urgent
    for generation, seed in ((low, 1), (lowest, 2), (urgent, 3)):
        most = 10 if generation is urgent else 40
        assert readers.texts[generation] == alone(numbers(5, seed), SEEDED, max_tokens=most)
    assert all_pages_are_free(engine)


def test_an_urgent_request_takes_no_more_memory_of_less_urgent_ones_than_it_needs() -> None:
    engine = Engine(wide_model(), kv_memory=20 * PAGE_BYTES)
    readers = Readers(engine)
    running = [readers.begin(numbers(16, seed), max_tokens=9, priority=1 + seed) for seed in range(3)]
    for _ in range(4):
        readers.step()
    assert all(readers.texts.values()) and engine.scheduler.admission.preemptions == 0
    urgent = readers.begin(numbers(20, 9), max_tokens=3)
    readers.step()
    assert urgent.request.sequence is not None
    assert [one.request.sequence is None for one in running] == [False, False, True]
    readers.finish()
    for seed, one in enumerate(running):
        assert readers.texts[one] == alone(numbers(16, seed), GREEDY, max_tokens=9)
    assert all_pages_are_free(engine)


def test_nobody_gives_way_where_it_would_not_be_enough() -> None:
    engine = Engine(wide_model(), kv_memory=20 * PAGE_BYTES)
    readers = Readers(engine)
    equal = readers.begin(numbers(48, 1), max_tokens=9)
    less_urgent = readers.begin(numbers(8, 2), max_tokens=9, priority=1)
    for _ in range(4):
        readers.step()
    urgent = readers.begin(numbers(40, 3), max_tokens=3)
    readers.step()
    assert urgent.request.sequence is None and equal.request.sequence is not None
    assert engine.scheduler.admission.preemptions == 0
    readers.finish()
    assert len(readers.texts[less_urgent]) == 9


def test_where_memory_ends_the_least_urgent_loses_it() -> None:
    engine = Engine(wide_model(), kv_memory=20 * PAGE_BYTES)
    readers = Readers(engine)
    preempted: list[Request] = []
    preempt = engine.scheduler.admission._preempt

    def noted(request: Request) -> None:
        preempted.append(request)
        preempt(request)

    engine.scheduler.admission._preempt = noted  # type: ignore[method-assign]
    texts = {seed: readers.begin(numbers(20, seed), sampling=SEEDED, max_tokens=40, priority=seed) for seed in range(3)}
    readers.finish()
    assert preempted and texts[0].request not in preempted
    assert readers.ended[0] is texts[0]
    for seed, generation in texts.items():
        assert readers.texts[generation] == alone(numbers(20, seed), SEEDED, max_tokens=40)
    assert all_pages_are_free(engine)


def test_a_paused_urgent_reader_loses_its_memory_to_one_that_reads() -> None:
    engine = Engine(wide_model(), kv_memory=16 * PAGE_BYTES)
    paused = engine.generate(numbers(30), SEEDED, max_tokens=20)
    first = next(paused)
    text = list(engine.generate(numbers(30, 1), SEEDED, max_tokens=20, priority=9))
    assert text == alone(numbers(30, 1), SEEDED, max_tokens=20)
    assert [first, *paused] == alone(numbers(30), SEEDED, max_tokens=20)
    assert all_pages_are_free(engine)


class Ticking:
    """A clock that goes on by a second in each step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self.now = 100.0
        step = engine.scheduler._step
        # Of this module alone: threads of other tests wait by the real clock.
        stand_in = SimpleNamespace(monotonic=lambda: self.now, perf_counter=time.perf_counter)
        monkeypatch.setattr(scheduler, "time", stand_in)

        def ticking() -> None:
            self.now += 1.0
            step()

        monkeypatch.setattr(engine.scheduler, "_step", ticking)


def without_end(readers: Readers, is_over: Callable[[], bool], most: int) -> None:
    """Keep the only places taken by urgent requests, until something holds or for so many of them."""
    seed = 20
    present: list[Generation] = []
    while not is_over() and seed < 20 + most:
        present = [one for one in present if not one.request.is_over]
        while len(present) < 3:
            seed += 1
            present.append(readers.begin(numbers(4, seed), max_tokens=5, priority=-1, owner="urgent"))
        readers.step()


@pytest.mark.parametrize("aging_seconds", [None, 30.0])
def test_nobody_waits_for_ever_behind_more_urgent_requests(
    monkeypatch: pytest.MonkeyPatch, aging_seconds: float | None
) -> None:
    engine = Engine(wide_model(), limits=EngineLimits(max_running=2, aging_seconds=aging_seconds))
    readers = Readers(engine)
    clock = Ticking(monkeypatch, engine)
    low = readers.begin(numbers(9), sampling=SEEDED, max_tokens=12, priority=2**31 - 1)
    lower = readers.begin(numbers(9, 1), sampling=SEEDED, max_tokens=12, priority=2**31 - 1)
    without_end(readers, lambda: low in readers.ended and lower in readers.ended, 60)
    if aging_seconds is None:
        assert readers.texts[low] == readers.texts[lower] == []
        assert clock.now > 150
    else:
        # 30 seconds until the first is the elder, 12 until it has ended, and then the second, which is as old.
        assert readers.ended.index(low) < readers.ended.index(lower)
        assert clock.now <= 100 + 30 + 2 * 15
        assert readers.texts[low] == alone(numbers(9), SEEDED, max_tokens=12)
        assert readers.texts[lower] == alone(numbers(9, 1), SEEDED, max_tokens=12)


def test_only_one_at_a_time_is_the_elder(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(wide_model(), limits=EngineLimits(max_running=3, aging_seconds=20.0))
    readers = Readers(engine)
    Ticking(monkeypatch, engine)
    low = [readers.begin(numbers(9, seed), max_tokens=30, priority=1) for seed in range(4)]
    most = 0

    def noted() -> bool:
        nonlocal most
        is_served = [one.request.sequence is not None for one in low]
        most = max(most, sum(is_served))
        return len(readers.ended) > 40

    for _ in range(3):
        readers.begin(numbers(4, 15 + len(readers.texts)), max_tokens=5, priority=-1)
    without_end(readers, noted, 30)
    assert most == 1


def test_the_role_of_the_elder_passes_on_from_one_whose_reader_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(wide_model(), limits=EngineLimits(max_running=1, aging_seconds=20.0))
    readers = Readers(engine)
    Ticking(monkeypatch, engine)
    paused = readers.begin(numbers(9), max_tokens=30, priority=1)
    del readers.texts[paused]
    low = readers.begin(numbers(9, 1), max_tokens=5, priority=1)
    without_end(readers, lambda: low in readers.ended, 60)
    assert low in readers.ended and len(paused.request.events) == 4
    paused.close()


def test_ctrl_c_in_a_preemption_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(wide_model(), limits=EngineLimits(max_running=1))
    low = engine.generate(numbers(5), SEEDED, max_tokens=30, priority=1)
    text = [next(low) for _ in range(6)]
    runner = engine.scheduler.admission._runner
    retire = runner.retire

    def interrupted(request: Request) -> None:
        retire(request)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "retire", interrupted)
    urgent = engine.generate(numbers(5, 1), SEEDED, max_tokens=3)
    with pytest.raises(KeyboardInterrupt):
        next(urgent)
    assert [*text, *low] == alone(numbers(5), SEEDED, max_tokens=30)
    assert all_pages_are_free(engine)


def test_threads_of_many_priorities_get_what_they_would_alone() -> None:
    engine = Engine(wide_model(), kv_memory=24 * PAGE_BYTES, limits=EngineLimits(max_running=3))
    texts: dict[int, list[TokenEvent]] = {}

    def read(seed: int) -> None:
        prompt = numbers(6 + 3 * (seed % 5), seed % 5)
        texts[seed] = list(engine.generate(prompt, SEEDED, max_tokens=20, priority=seed * 7 % 5, owner=seed % 3))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(15)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {seed: alone(numbers(6 + 3 * seed, seed), SEEDED, max_tokens=20) for seed in range(5)}
    assert texts == {seed: expected[seed % 5] for seed in range(15)}
    assert all_pages_are_free(engine)


@pytest.mark.parametrize("priority", [1.5, "high", None, True, 2**31])
def test_wrong_priorities_are_refused(priority: Any) -> None:
    with pytest.raises(RequestError, match="priority"):
        Engine(wide_model()).generate([1], GREEDY, priority=priority)


def test_no_owner_holds_all_places_while_another_has_none() -> None:
    # Eight texts of one owner for four places, then texts of four others.
    engine = Engine(wide_model(), limits=EngineLimits(max_running=4))
    readers = Readers(engine)
    flood = [readers.begin(numbers(6, seed), sampling=SEEDED, max_tokens=60, owner="flood") for seed in range(8)]
    readers.step()
    others = []
    for count, owner in enumerate(("a", "a", "b", "c", "d"), start=10):
        others.append(readers.begin(numbers(5, count), sampling=SEEDED, max_tokens=60, owner=owner))
        readers.step()
    running = [generation for generation in readers.texts if generation.request.sequence is not None]
    assert running == [flood[0], others[0], others[2], others[3]], "one of each; nobody's last text is taken"
    readers.finish()
    for generation in readers.texts:
        seed = flood.index(generation) if generation in flood else 10 + others.index(generation)
        prompt = numbers(6 if generation in flood else 5, seed)
        assert readers.texts[generation] == alone(prompt, SEEDED, max_tokens=60)
    assert engine.scheduler.admission.preemptions == 3
    assert all_pages_are_free(engine)


def test_places_that_are_free_go_to_any_owner_and_a_less_urgent_one_takes_none() -> None:
    readers = Readers(Engine(wide_model(), limits=EngineLimits(max_running=4)))
    urgent = [readers.begin(numbers(6, seed), max_tokens=9, priority=-1, owner="urgent") for seed in range(5)]
    later = readers.begin(numbers(6, 9), max_tokens=9, owner="later")
    readers.step()
    assert [one.request.sequence is not None for one in (*urgent, later)] == [True] * 4 + [False] * 2
    readers.finish()
    assert set(readers.ended[4:]) == {urgent[4], later}


def test_no_owner_holds_all_memory_while_another_has_none() -> None:
    engine = Engine(wide_model(), kv_memory=32 * PAGE_BYTES, limits=EngineLimits(max_running=8))
    readers = Readers(engine)
    flood = [readers.begin(numbers(30, seed), sampling=SEEDED, max_tokens=20, owner="flood") for seed in range(3)]
    while not all(readers.texts.values()):
        readers.step()
    other = readers.begin(numbers(40, 9), sampling=SEEDED, max_tokens=20, owner="other")
    while not readers.texts[other]:
        readers.step()
    assert not readers.ended and flood[0].request.sequence is not None
    readers.finish()
    for seed, generation in enumerate(flood):
        assert readers.texts[generation] == alone(numbers(30, seed), SEEDED, max_tokens=20)
    assert readers.texts[other] == alone(numbers(40, 9), SEEDED, max_tokens=20)
    assert all_pages_are_free(engine)
