"""Drafting never loses more than two in a hundred against plain decoding of the same time, and wins where it can.

Time is simulated: `simulated_machine` counts how many tokens plain decoding would have made of it, whatever else kept
the machine busy.
"""

from typing import Any

import pytest

from tests.engine.simulated_machine import LIKE_1B, LINEAR_ROWS, Machine, ScriptedDrafter, decode

WINDOW = 1000
CURVES = {"linear": LINEAR_ROWS, "1B": LIKE_1B}
BELIEFS = {"honest": None, "drafts are free": [1.0] * 16, "drafts are dear": [1.0] + [8.0] * 15}
BUSY_FOR_MOMENTS = {"load": lambda now: 8.0 if now % 0.1 < 0.03 else 1.0}
SPIKES = {"spikes": (30.0, 4e-3)}
BESIDE: dict[str, dict[str, Any]] = {
    "calm": {},
    "busy for seconds": {"load": lambda now: 3.0 if now % 1.0 < 0.4 else 1.0},
    "busy for moments": BUSY_FOR_MOMENTS,
    "interrupted": SPIKES,
    "busy and interrupted": {**BUSY_FOR_MOMENTS, **SPIKES},
}


def belief(name: str, curve: str) -> list[float]:
    return [1e-3 * ratio for ratio in BELIEFS[name] or CURVES[curve]]


@pytest.mark.parametrize(
    ("curve", "believed", "beside"),
    [
        (("linear", "1B")[(belief + beside) % 2], believed, besides)
        for belief, believed in enumerate(BELIEFS)
        for beside, besides in enumerate(BESIDE)
    ],
)
def test_drafts_that_do_not_pay_lose_hardly_anything_in_any_stretch(curve: str, believed: str, beside: str) -> None:
    simulated = Machine(CURVES[curve], **BESIDE[beside])
    # Looking alone takes a third of a step where rows are dear: the smallest of models.
    drafter = ScriptedDrafter(simulated, lambda _: 0.2, seconds=3e-4 if curve == "linear" else 5e-6)
    trace = decode(simulated, drafter, belief(believed, curve), 2 * WINDOW)
    assert trace.worst_window(WINDOW) >= 0.98
    assert drafter.asked > 3, "it goes on looking"


@pytest.mark.parametrize(
    ("believed", "beside"),
    [
        pair
        for index, pair in enumerate((believed, beside) for beside in BESIDE for believed in BELIEFS)
        if index % 2 == 0
    ],
)
def test_drafts_that_are_mostly_right_win_whatever_was_believed_of_their_cost(believed: str, beside: str) -> None:
    simulated = Machine(LIKE_1B, **BESIDE[beside])
    drafter = ScriptedDrafter(simulated, lambda _: 0.95, seconds=5e-6)
    trace = decode(simulated, drafter, belief(believed, "1B"), 4 * WINDOW)
    assert trace.worst_window(WINDOW) >= 0.98
    assert trace.speed >= (1.5 if "interrupted" in beside else 3.5)


def test_a_text_that_changes_its_nature_is_followed_both_ways() -> None:
    simulated = Machine(LIKE_1B)
    drafter = ScriptedDrafter(simulated, lambda place: 0.95 if place // 2000 % 2 else 0.02, seconds=5e-6)
    trace = decode(simulated, drafter, belief("honest", "1B"), 8000)
    assert trace.worst_window(WINDOW) >= 0.98
    for start in (0, 4000):
        assert trace.speed_between(start + 2, start + 1990) >= 0.98
        assert trace.speed_between(start + 2400, start + 3900) >= 3.0


def test_a_bad_hour_is_forgotten_when_it_ends() -> None:
    def load(now: float) -> float:
        return 10.0 if now < 5.0 else 1.0

    simulated = Machine(LIKE_1B, load=load)
    drafter = ScriptedDrafter(simulated, lambda _: 0.95, seconds=5e-6)
    trace = decode(simulated, drafter, belief("drafts are dear", "1B"), 8000)
    ended = int((trace.seconds < 5.0).sum())
    assert 500 < ended < 6000
    assert trace.speed_between(ended + 200, 7900) >= 4.0


def test_looking_for_drafts_costs_the_smallest_model_hardly_anything() -> None:
    simulated = Machine(LINEAR_ROWS)
    drafter = ScriptedDrafter(simulated, lambda _: 0.0, seconds=1e-3)
    trace = decode(simulated, drafter, belief("honest", "linear"), 8000)
    assert trace.worst_window(WINDOW) >= 0.98
    assert trace.speed >= 0.99
    assert drafter.asked <= 100
