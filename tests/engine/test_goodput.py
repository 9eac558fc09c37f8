"""Goodput above capacity on a machine of known speed: what admission by predicted TTFT and priorities are worth there.

`tests/bench/bench_goodput.py` measures the same on a real one.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from localinfer.engine.scheduler import Generation
from localinfer.errors import OverloadedError
from tests.engine.generations import numbers
from tests.engine.test_ttft import Machine

SECONDS = 8.0


@dataclass(frozen=True)
class Kind:
    prompt_tokens: int
    reply_tokens: int
    first_token: float
    priority: int


PEOPLE, BATCH = Kind(30, 10, 0.25, 0), Kind(120, 40, 4.0, 5)


def in_time(monkeypatch: pytest.MonkeyPatch, rate: float, *, admits: bool, has_priorities: bool) -> dict[Kind, int]:
    """How many replies of each kind had their first token in time and came to their end."""
    machine = Machine(monkeypatch, max_running=8)
    machine.learn()
    random = np.random.default_rng(5)
    began = now = machine.clock()
    arrivals = []
    while (now := now + float(random.exponential(1 / rate))) < began + SECONDS:
        arrivals.append((now, PEOPLE if random.random() < 0.7 else BATCH))
    asked: dict[Generation, tuple[float, Kind]] = {}
    refused = 0
    while machine.clock() < began + SECONDS + 1.0:
        while arrivals and arrivals[0][0] <= machine.clock():
            arrived, kind = arrivals.pop(0)
            try:
                generation = machine.begin(
                    numbers(kind.prompt_tokens, 1000 + len(asked) + refused),
                    max_tokens=kind.reply_tokens,
                    owner=len(asked),
                    priority=kind.priority if has_priorities else 0,
                    ttft_objective=kind.first_token if admits else None,
                )
                asked[generation] = arrived, kind
            except OverloadedError:
                refused += 1
        if not machine.engine.scheduler.running:
            machine.program.now += 0.01
        else:
            machine.step()
    good = {PEOPLE: 0, BATCH: 0}
    for generation, (arrived, kind) in asked.items():
        waited = machine.waited.get(generation, SECONDS) + machine.began[generation] - arrived
        good[kind] += waited <= kind.first_token and len(machine.texts[generation]) == kind.reply_tokens
        generation.close()
    assert bool(refused) == admits
    return good


def test_more_replies_are_in_time_with_admission_and_more_of_people_with_priorities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Some 19 a second are what this machine can serve.
    rate = 28.0
    as_they_come = in_time(monkeypatch, rate, admits=False, has_priorities=False)
    admission = in_time(monkeypatch, rate, admits=True, has_priorities=False)
    priorities = in_time(monkeypatch, rate, admits=False, has_priorities=True)
    both = in_time(monkeypatch, rate, admits=True, has_priorities=True)
    assert sum(admission.values()) > 1.3 * sum(as_they_come.values())
    assert priorities[PEOPLE] > 1.3 * as_they_come[PEOPLE]
    assert sum(both.values()) > 1.3 * sum(as_they_come.values())
    assert both[PEOPLE] >= admission[PEOPLE]
