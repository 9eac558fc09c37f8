"""Ten thousand simulated operations, with test_simulated_states.py, and what tells of a violation."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.proof.simulation import campaign
from tests.proof.simulation.campaign import RUN_STEPS, Report, run_seed
from tests.proof.simulation.cold import ColdAnswer
from tests.proof.simulation.shrinking import shrink, signature
from tests.proof.simulation.world import World
from tests.support.limits import seconds
from tests.support.warm_python import run_copy

SEED = 24


def simulate(model: str) -> Report:
    """A run, none of whose steps fails."""
    report = Report()
    run_seed(model, SEED, RUN_STEPS, report)
    assert report.failure is None, report.failure.describe()
    return report


@pytest.mark.parametrize("model", ["dense", "mixture"])
def test_nothing_simulated_is_ever_wrong(model: str) -> None:
    counts = simulate(model).counts
    # What a simulation passes by, it says nothing about.
    for name in ("preemptions", "cached_tokens", "evicted_tokens", "drafted", "read_pages", "died", "faults", "loaded"):
        assert counts[name] > 0, name
    assert counts["finished"] > RUN_STEPS // 40 and counts["tokens"] > RUN_STEPS // 4


def test_several_processes_share_the_runs() -> None:
    words = [sys.executable, "-m", "tests.proof.simulation", "--steps", "60", "--model", "dense", "--jobs", "2"]
    done = run_copy(words, cwd=Path(__file__).parents[3], timeout=seconds(120))
    assert done.stdout.startswith("60 steps in 1 runs from seed 1: no violation"), done.stdout + done.stderr


def test_a_seed_gives_the_same_run_again() -> None:
    first, second = Report(), Report()
    for report in (first, second):
        run_seed("dense", 77, 500, report)
    assert first.failure is None and first.counts == second.counts


def test_a_violation_is_told_with_its_seed_and_the_few_operations_that_lead_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = ColdAnswer.token
    monkeypatch.setattr(ColdAnswer, "token", lambda answer, index: token(answer, index) + (index == 9))
    report = Report()
    run_seed("dense", 5, RUN_STEPS, report)
    assert report.failure is not None
    told = report.failure.describe()
    assert "seed 5" in told and "token 9 is" in told
    # One caller, who reads ten times.
    assert len(report.failure.kept) <= 12 < len(report.failure.operations)


def test_shrinking_keeps_what_is_needed_alone() -> None:
    calls = 0

    def fails(items: Sequence[int]) -> bool:
        nonlocal calls
        calls += 1
        return {3, 57, 90} <= set(items)

    assert shrink(range(100), fails, seconds=60.0) == [3, 57, 90]
    assert calls < 200
    assert shrink(range(100), fails, seconds=0.0) == list(range(100))


def test_failures_with_other_numbers_are_the_same() -> None:
    assert signature(ValueError("page 3 has 2 holders")) == signature(ValueError("page 11 has 4 holders"))
    assert signature(ValueError("page 3")) != signature(KeyError("page 3"))


def test_an_error_of_a_world_that_cannot_begin_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(world: World, number: int) -> None:
        raise OSError("no model")

    monkeypatch.setattr(World, "_begin", broken)
    report = Report()
    campaign.run_seed("dense", 1, 10, report)
    assert report.failure is not None and "no model" in report.failure.describe()
