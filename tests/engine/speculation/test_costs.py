"""What rows cost, as steps of scripted lengths tell it: one measurement is never believed, and none for long."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localinfer.engine.sampling.sampler import MAX_DRAFT_TOKENS
from localinfer.engine.speculation.costs import VerificationCosts
from localinfer.kernels.kv_layout import KVLayout
from localinfer.loading import drafters
from localinfer.models.load import threads
from tests.support.limits import set_clock

ROWS = range(1, MAX_DRAFT_TOKENS + 2)
LINEAR = [float(rows) for rows in ROWS]


def test_costs_follow_plain_steps_and_steps_with_drafts() -> None:
    costs = VerificationCosts([0.5 * value for value in LINEAR])
    costs.observe_plain(1, 2.0)
    for _ in range(3):
        costs.observe(4, 5.0)
    assert costs.seconds(1) == 2.0
    assert costs.seconds(4) == costs.most_seconds(4) == costs.seconds(3) == pytest.approx(5.0)
    assert costs.seconds(5) == pytest.approx(6.25), "dearer by the same share"
    assert costs.seconds(MAX_DRAFT_TOKENS + 2) == costs.most_seconds(MAX_DRAFT_TOKENS + 2) == math.inf


def test_what_was_measured_beforehand_is_overridden_by_two_steps() -> None:
    for believed in ([1.0] * 16, [1.0] + [9.0] * 15):
        costs = VerificationCosts(believed)
        for _ in range(2):
            costs.observe(4, 2.0)
        assert costs.seconds(4) == pytest.approx(2.0)


def test_one_interruption_hardly_counts() -> None:
    costs = VerificationCosts([1.0] * 16)
    for seconds in (1.2, 1.3, 50.0):
        costs.observe(3, seconds)
    assert costs.seconds(3) == pytest.approx(1.3)
    alone = VerificationCosts([1.0] * 16)
    alone.observe(3, 50.0)
    assert alone.seconds(3) == 1.0


def test_what_is_not_confirmed_is_worth_another_try_after_some_time() -> None:
    costs = VerificationCosts([1.0] * 16)
    for _ in range(3):
        costs.observe(2, 3.0)
    assert costs.seconds(2) == pytest.approx(3.0)
    seen = []
    for _ in range(6):
        costs.num_steps += 250
        seen.append(costs.seconds(2))
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 1.5


def test_a_time_below_that_of_one_row_teaches_nothing() -> None:
    costs = VerificationCosts(LINEAR)
    costs.observe(4, 0.5)
    costs.observe(4, 0.5)
    assert costs.seconds(4) == pytest.approx(4.0)


def test_rows_that_were_never_tried_may_cost_as_much_as_so_many_steps() -> None:
    costs = VerificationCosts([1.0] * 16)
    assert [costs.most_seconds(rows) for rows in ROWS] == pytest.approx(LINEAR)
    costs.observe(4, 1.5)
    assert [costs.most_seconds(rows) for rows in (4, 8)] == pytest.approx([1.5, 3.0])


class Clock:
    """Time that a computation of so many rows takes, and what happens beside it."""

    def __init__(self, seconds: float, beside: Callable[[int], float] = lambda _: 0.0) -> None:
        self.now, self.seconds, self.beside = 0.0, seconds, beside
        self.sizes: list[int] = []

    def run(self, num_rows: int) -> None:
        self.sizes.append(num_rows)
        self.now += self.seconds * (1.0 + num_rows) * (1.0 + self.beside(len(self.sizes)))

    def read(self) -> float:
        return self.now


def measured(clock: Clock, most: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], bool]:
    set_clock(monkeypatch, threads, perf_counter=clock.read)
    monkeypatch.setattr(threads.OtherLoad, "measure", lambda _: 0.0)
    # As for a user; what a load of the tests measures matters less.
    monkeypatch.setattr(threads, "_PATIENCE_SECONDS", 0.6)
    timed = drafters.measure_costs(clock.run, most)
    return list(timed.seconds.values()), timed.is_calm


def test_slow_passes_are_few_and_what_lies_between_is_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0)
    seconds, is_calm = measured(clock, 64, monkeypatch)
    assert seconds == pytest.approx([1.0 + rows for rows in ROWS]) and is_calm
    assert len(clock.sizes) < 20 and max(clock.sizes) == MAX_DRAFT_TOKENS + 1
    assert measured(Clock(1.0), 3, monkeypatch)[0] == pytest.approx([2.0, 3.0, 4.0])
    assert measured(Clock(1.0), 1, monkeypatch)[0] == pytest.approx([2.0])


def test_every_size_is_measured_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(1.0)
    assert len(measured(clock, 64, monkeypatch)[0]) == 16
    assert all(clock.sizes.count(size) >= 3 for size in set(clock.sizes))


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_a_busy_machine_is_known_by_its_spread_and_the_least_times_count(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Eleven and the numbers of sizes and repetitions have no divisor in common: each size is met as often.
    disturbed = Clock(0.00001, lambda run: 3.0 * (run * 5 % 11 < 11 * share))
    seconds, is_calm = measured(disturbed, 64, monkeypatch)
    assert not is_calm
    undisturbed, was_calm = measured(Clock(0.00001), 64, monkeypatch)
    assert was_calm
    rarely, is_rarely_calm = measured(Clock(0.00001, lambda run: 3.0 * (run % 11 == 0)), 64, monkeypatch)
    assert is_rarely_calm and rarely == pytest.approx(undisturbed)
    if share == 0.3:
        assert seconds == pytest.approx(undisturbed)


def test_rows_that_are_measured_are_different_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal ones go to the same experts, read once: drafts of mixtures seemed to cost nothing."""
    seen = []

    def measure(run: Any, *_: object) -> threads.Timings[int]:
        run(16)
        return threads.Timings(dict.fromkeys(ROWS, 1.0), True, 0.0)

    monkeypatch.setattr(drafters, "measure_costs", measure)
    monkeypatch.setattr(drafters, "checked_run", lambda *_: None)
    monkeypatch.setattr(drafters, "forward", lambda run, caches, tokens, *_: seen.append(tokens[0].tolist()))
    program: Any = SimpleNamespace(max_batch_rows=16, max_output_rows=16)
    drafters._verification_seconds(program, KVLayout("f32", []), 300, None, False, True)
    assert [len(set(tokens)) for tokens in seen] == [16]
    assert min(seen[0]) >= 0 and max(seen[0]) < 300


def test_beside_busy_programs_not_every_start_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start took up to twice its time, for a measurement that it could not keep."""
    now, tries, is_calm = [1e9], [0], [False]

    def measure(*_: object) -> threads.Timings[int]:
        tries[0] += 1
        return threads.Timings(dict.fromkeys(ROWS, 1.0), is_calm[0], 0.0)

    def start(seconds: float, **options: bool) -> int:
        now[0] += seconds
        before = tries[0]
        drafters._verification_seconds(program, layout, 300, None, options.get("again", False), True)
        return tries[0] - before

    monkeypatch.setattr(threads, "cache_folder", lambda: tmp_path)
    set_clock(monkeypatch, threads, time=lambda: now[0])
    monkeypatch.setattr(drafters, "measure_costs", measure)
    monkeypatch.setattr(drafters, "checked_run", lambda *_: None)
    monkeypatch.setattr(drafters, "_fingerprint", lambda *_: "key")
    program: Any = SimpleNamespace(max_batch_rows=16, max_output_rows=16)
    layout = KVLayout("f32", [])
    assert [start(seconds) for seconds in (0, 1, 500, 100, 700, 400, 100)] == [1, 0, 0, 1, 0, 0, 1]
    assert start(1, again=True) == 1
    for _ in range(12):
        assert start(24 * 3600) == 1
    is_calm[0] = True
    assert [start(seconds) for seconds in (24 * 3600, 1, 1)] == [1, 1, 0]
    is_calm[0] = False
    assert threads.is_postponed("verification", "key") is False
