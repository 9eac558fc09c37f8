"""The depth that promises most tokens per second, from scripted costs and chances."""

import pytest

from localinfer.engine.sampling.sampler import MAX_DRAFT_TOKENS
from localinfer.engine.speculation.costs import Acceptance, VerificationCosts, best_draft_length

ROWS = range(1, MAX_DRAFT_TOKENS + 2)
FREE = [1.0] * (MAX_DRAFT_TOKENS + 1)
LINEAR = [float(rows) for rows in ROWS]
CLIFF = [1.0 if rows <= 4 else 3.0 for rows in ROWS]


def observed(seconds: list[float]) -> VerificationCosts:
    """Costs that steps have just confirmed."""
    costs = VerificationCosts(seconds)
    for rows in ROWS:
        for _ in range(3):
            costs.observe(rows, seconds[rows - 1])
    return costs


@pytest.mark.parametrize(
    ("seconds", "chance", "wanted"),
    [(FREE, 0.9, MAX_DRAFT_TOKENS), (FREE, 0.0, 0), (LINEAR, 0.9, 0), (CLIFF, 0.5, 3), (CLIFF, 0.99, MAX_DRAFT_TOKENS)],
)
def test_the_best_depth_follows_costs_and_chances(seconds: list[float], chance: float, wanted: int) -> None:
    depth, speed = best_draft_length([chance] * MAX_DRAFT_TOKENS, observed(seconds), MAX_DRAFT_TOKENS)
    assert depth == wanted
    assert speed >= 1.0


def test_the_best_depth_is_that_of_a_search_of_all() -> None:
    costs = observed([1.0 + 0.08 * (rows - 1) for rows in ROWS])
    chances = [0.9, 0.8, 0.85, *[0.7] * (MAX_DRAFT_TOKENS - 3)]
    rates = []
    for depth in range(MAX_DRAFT_TOKENS + 1):
        tokens = chance = 1.0
        for value in chances[:depth]:
            chance *= value
            tokens += chance
        rates.append(tokens / (costs.seconds(depth + 1) + depth * 0.05))
    depth, speed = best_draft_length(chances, costs, MAX_DRAFT_TOKENS, seconds_per_token=0.05)
    assert depth == rates.index(max(rates))
    assert speed == pytest.approx(max(rates) / rates[0])


def test_depth_stays_within_what_is_allowed_and_shrinks_beside_other_sequences() -> None:
    costs = observed(CLIFF)
    chances = [0.5] * MAX_DRAFT_TOKENS
    assert best_draft_length(chances, costs, 2)[0] == 2
    assert best_draft_length(chances, costs, MAX_DRAFT_TOKENS, other_rows=2)[0] == 1
    assert best_draft_length(chances, costs, MAX_DRAFT_TOKENS, other_rows=3)[0] == 0


def test_chances_follow_what_was_accepted_and_later_places_lean_on_earlier_ones() -> None:
    acceptance = Acceptance(0.5)
    assert acceptance.probabilities() == pytest.approx([0.5] + [0.5**0.5] * (MAX_DRAFT_TOKENS - 1))
    for _ in range(400):
        acceptance.observe(4, 2)
    chances = acceptance.probabilities()
    assert chances[0] > 0.97
    assert chances[1] > 0.96
    assert chances[2] < 0.05
    assert chances[MAX_DRAFT_TOKENS - 1] < 0.05
    for _ in range(600):
        acceptance.observe(2, 2)
    # The third place was not tried for long, so what it was then hardly counts.
    assert acceptance.probabilities()[2] > 0.9


def test_a_light_prior_and_a_short_reach_make_the_first_drafts_cheap() -> None:
    acceptance = Acceptance(0.7, 1.5)
    assert acceptance.reach == 1
    for _ in range(4):
        acceptance.observe(1, 0)
    assert acceptance.probabilities()[0] == pytest.approx(0.7 * 1.5 / (1.5 + sum(0.985**n for n in range(4))))
    for accepted, reach in ((1, 3), (3, 7), (2, 7)):
        acceptance.observe(accepted, accepted)
        assert acceptance.reach == reach


def test_probes_back_off_until_drafts_promise_a_gain_again() -> None:
    acceptance = Acceptance(0.1)
    probed = [index for index in range(4000) if acceptance.is_probe_due()]
    gaps = [second - first for first, second in zip(probed, probed[1:], strict=False)]
    assert gaps[:7] == [5, 9, 17, 33, 65, 129, 257]
    assert set(gaps[7:]) == {513}
    acceptance.stop_probing()
    assert acceptance.is_probe_due()
    assert [acceptance.is_probe_due() for _ in range(5)] == [False] * 4 + [True]
