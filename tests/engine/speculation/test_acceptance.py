"""Coupled acceptance leaves the distribution as it is and accepts as often as promised; a planted bias is found."""

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.sampling.sampler import Sampler, SamplingParams, SamplingPlan, choose_verified

VOCABULARY = 12
SAMPLES = 24_000
LIMIT = 38.0
"""A chi-square of 11 degrees of freedom is larger once in 12,000 draws."""

Probabilities = NDArray[np.float64]


def distributions() -> tuple[Probabilities, Probabilities]:
    generator = np.random.default_rng(5)
    return generator.dirichlet(np.full(VOCABULARY, 2.0)), generator.dirichlet(np.full(VOCABULARY, 2.0))


def chi_square(tokens: list[int], expected: Probabilities) -> float:
    counts = np.bincount(tokens, minlength=VOCABULARY)
    wanted = expected * len(tokens)
    return float((((counts - wanted) ** 2) / wanted).sum())


def test_the_same_test_finds_a_rule_that_draws_again_from_the_target_instead_of_the_difference() -> None:
    p, q = distributions()
    generator = np.random.default_rng(3)
    tokens = []
    for draft in generator.choice(VOCABULARY, SAMPLES, p=q).tolist():
        is_accepted = generator.random() < min(1.0, p[draft] / q[draft])
        tokens.append(draft if is_accepted else int(generator.choice(VOCABULARY, p=p)))
    assert chi_square(tokens, p) > 2 * LIMIT


def test_coupled_choices_draw_from_the_target_and_agree_with_the_draft_as_often_as_promised() -> None:
    p, q = distributions()
    sampler = Sampler(VOCABULARY)
    plan = SamplingPlan(SamplingParams(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=9), VOCABULARY)
    nothing = np.zeros(0, np.int32)
    rows = np.log(p).astype(np.float32), np.log(q).astype(np.float32)
    chosen, drafted = ([sampler.choose(row, plan, i, nothing) for i in range(SAMPLES)] for row in rows)
    assert chi_square(chosen, p) < LIMIT
    assert chi_square(drafted, q) < LIMIT
    distance = float(np.abs(p - q).sum() / 2)
    accepted = sum(draft == token for draft, token in zip(drafted, chosen, strict=True)) / SAMPLES
    assert (1 - distance) / (1 + distance) - 0.01 < accepted < 1 - distance + 0.01


@pytest.mark.parametrize(("drafted", "wanted"), [([4, 5], [4, 5, 5]), ([5, 5], [4]), ([], [4])])
def test_nothing_is_accepted_after_a_wrong_token_or_the_last_drafted_one(drafted: list[int], wanted: list[int]) -> None:
    plan = SamplingPlan(SamplingParams(temperature=0), VOCABULARY)
    rows = np.eye(VOCABULARY, dtype=np.float32)[[4, 5, 5][: len(drafted) + 1]]
    history = np.zeros(4, np.int32)
    assert choose_verified(Sampler(VOCABULARY).choose, rows, plan, 1, history, drafted, ()) == wanted
