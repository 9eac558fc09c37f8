"""Log probabilities: those of the model's own distribution, and of nothing that the sampler does."""

import math

import numpy as np
import pytest

from localinfer.engine.sampling.filters import likeliest, log_total, token_logprobs
from localinfer.engine.sampling.sampler import Sampler, SamplingParams, SamplingPlan

EMPTY = np.zeros(0, np.int32)


def test_log_probabilities_are_those_of_the_softmax() -> None:
    generator = np.random.default_rng(1)
    for scale in (0.1, 3.0, 1e30):
        row = (generator.normal(0, 1, 501) * scale).astype(np.float32)
        wide = row.astype(np.float64)
        total = float(row.max()) + math.log(math.fsum(np.exp(wide - wide.max())))
        assert math.isclose(log_total(row), total, rel_tol=1e-12, abs_tol=1e-12)
        told = token_logprobs(row, 17, 5)
        assert told.logprob == pytest.approx(float(row[17]) - total)
        assert [token for token, _ in told.top] == np.argsort(-row, kind="stable")[:5].tolist()
        assert told.top[0][1] == pytest.approx(float(row.max()) - total)


def test_likeliest_takes_the_lowest_ids_on_ties_and_at_most_all() -> None:
    row = np.array([1, 3, 3, 0, 3, 1], np.float32)
    assert likeliest(row, 2).tolist() == [1, 2]
    assert likeliest(row, 4).tolist() == [1, 2, 4, 0]
    assert likeliest(row, 9).tolist() == [1, 2, 4, 0, 5, 3]
    assert likeliest(row, 0).tolist() == []


def test_ruled_out_tokens_have_no_probability() -> None:
    row = np.array([0.0, -np.inf], np.float32)
    assert token_logprobs(row, 0, 2) == (0.0, ((0, 0.0), (1, -math.inf)))


def test_sampler_tells_what_the_model_gave_before_bias_and_penalties() -> None:
    row = np.log(np.array([0.5, 0.25, 0.25])).astype(np.float32)
    params = SamplingParams(temperature=0.1, logit_bias={0: -math.inf, 2: 5.0}, logprobs=2)
    plan = SamplingPlan(params, 3)
    assert Sampler(3).choose(row, plan, 4, np.zeros(4, np.int32)) == 2
    told = plan.logprobs.pop(4)
    assert told.logprob == pytest.approx(math.log(0.25))
    assert [(token, pytest.approx(logprob)) for token, logprob in told.top] == [(0, math.log(0.5)), (1, math.log(0.25))]


def test_nothing_is_told_that_nobody_asked_for() -> None:
    plan = SamplingPlan(SamplingParams(), 3)
    Sampler(3).choose(np.zeros(3, np.float32), plan, 0, EMPTY)
    assert not plan.logprobs
