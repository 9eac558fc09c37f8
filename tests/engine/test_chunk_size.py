"""The gap that a prompt's chunk causes in streams beside it, on machines of simulated time: bounded."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from localinfer.engine.runner import StepCosts

STREAMS = 4
SETTLING = 3
"""Steps that it may take until a machine that was slowed down at once is known as such."""


@dataclass
class Model:
    """Seconds of a calm machine: of a step with streams alone, of a row of a prompt, and of one position before it."""

    decode: float
    row: float
    position: float

    def chunk(self, rows: int, depth: int) -> float:
        return rows * (self.row + self.position * (depth + rows / 2))


TINY, SMALL, LARGE = Model(2e-3, 1.5e-4, 1.5e-7), Model(12e-3, 1.6e-3, 2e-7), Model(120e-3, 2e-2, 1e-6)


def calm(_: float) -> float:
    return 1.0


def busy_from(start: float, factor: float = 8.0) -> Callable[[float], float]:
    return lambda now: factor if now > start else 1.0


def free_from(start: float, factor: float = 8.0) -> Callable[[float], float]:
    return lambda now: 1.0 if now > start else factor


@dataclass
class Step:
    """now: when it ends. rows: of the prompt. caused: seconds that they have added, of them stalled: that something
    else has. bound: that they were to keep."""

    now: float
    rows: int
    bound: float
    caused: float
    stalled: float
    load: float


def read(
    model: Model,
    costs: StepCosts,
    *,
    tokens: int,
    cached: int = 0,
    load: Callable[[float], float] = calm,
    stalls: float = 0.0,
    now: float = 0.0,
) -> Iterator[Step]:
    """The steps of streams while a prompt is read beside them. stalls: the share that lose a core for 80 ms."""
    random, done = np.random.default_rng(5), cached
    for _ in range(40):
        seconds = load(now) * model.decode
        costs.observe(STREAMS, 0, seconds)
        now += seconds
    while done < tokens:
        is_plain = costs.wants_plain_step
        rows = 0 if is_plain else costs.chunk_rows(num_streams=STREAMS, num_prompts=1, most=508, depth=done)
        rows = min(rows, tokens - done)
        bound = costs.bound_seconds
        stalled = 0.08 if random.random() < stalls else 0.0
        caused = load(now) * model.chunk(rows, done) + stalled
        factor = load(now)
        costs.observe(STREAMS, rows, factor * model.decode + caused, done + rows / 2)
        now += factor * model.decode + caused
        done += rows
        yield Step(now, rows, bound, caused, stalled, factor)


LOADS = {
    "calm": calm,
    "busy": busy_from(-1.0),
    "busy in the midst": busy_from(1.5),
    "busier still": busy_from(1.5, 40.0),
    "free in the midst": free_from(4.0),
}


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("cached", [0, 11_000])
@pytest.mark.parametrize("model", [TINY, SMALL, LARGE], ids=["tiny", "small", "large"])
def test_what_a_chunk_adds_to_a_gap_has_a_bound_that_is_kept(model: Model, cached: int, load: str) -> None:
    costs = StepCosts()
    # What was read before, beside streams on a calm machine, at the beginning of another prompt.
    list(read(model, costs, tokens=400))
    steps = list(read(model, costs, tokens=12_000, cached=cached, load=LOADS[load]))
    changed = [step for step in range(1, len(steps)) if steps[step].load > steps[step - 1].load]
    settling = {step + more for step in changed for more in range(SETTLING)}
    over = [
        (number, step)
        for number, step in enumerate(steps)
        if number not in settling and step.caused > max(1.35 * step.bound, step.load * model.chunk(1, 12_000))
    ]
    assert not over
    # Of what a calm machine takes, which is remembered for a while where it is one no more.
    known = [step.bound for step in steps if step.now < 30.0]
    assert max(known, default=0.0) <= 2.05 * max(0.03, 2 * model.decode)


def test_chunks_are_no_smaller_than_the_bound_allows() -> None:
    """On a calm machine most of it is used, so a prompt takes hardly longer than it has to."""
    for model in (TINY, SMALL, LARGE):
        steps = list(read(model, StepCosts(), tokens=12_000))
        bound = max(0.03, 2.0 * model.decode)
        least = model.chunk(12_000, 0) / bound
        assert len(steps) < 1.45 * least + 40, (len(steps), least)


def test_steps_that_lose_a_core_do_not_leave_chunks_small() -> None:
    """What is lost there does not depend on the rows: each such step makes some smaller chunks, and that is all."""
    free = len(list(read(TINY, StepCosts(), tokens=12_000)))
    stalled = list(read(TINY, StepCosts(), tokens=12_000, stalls=0.1))
    assert len(stalled) < 2.2 * free
    assert max(step.caused - step.stalled for step in stalled) < 1.35 * 0.03


def test_who_reads_deeper_than_anybody_before_begins_with_few_rows_and_soon_has_more() -> None:
    costs = StepCosts()
    for _ in range(9):
        costs.observe(STREAMS, 0, SMALL.decode)
        costs.observe(STREAMS, 16, SMALL.decode + SMALL.chunk(16, 0), 8.0)
    shallow = costs.chunk_rows(num_streams=STREAMS, num_prompts=1, most=500, depth=0)
    first = costs.chunk_rows(num_streams=STREAMS, num_prompts=1, most=500, depth=50_000)
    assert 1 <= first < shallow / 4
    steps = list(read(SMALL, costs, tokens=50_400, cached=50_000))
    assert steps[0].rows == first
    assert steps[12].caused > 0.6 * 0.03


def test_a_prompt_that_ends_with_a_row_or_two_says_nothing_of_rows() -> None:
    costs = StepCosts()
    for _ in range(9):
        costs.observe(STREAMS, 0, TINY.decode)
        costs.observe(STREAMS, 64, TINY.decode + TINY.chunk(64, 0), 32.0)
    before = costs.chunk_rows(num_streams=STREAMS, num_prompts=1, most=500)
    for _ in range(9):
        costs.observe(STREAMS, 1, 5 * TINY.decode, 32.0)
    assert costs.chunk_rows(num_streams=STREAMS, num_prompts=1, most=500) == before
