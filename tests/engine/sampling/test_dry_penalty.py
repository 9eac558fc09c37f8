"""DRY against an oracle that compares every earlier place with the text's end, token by token."""

import numpy as np
import pytest

from localinfer.engine.sampling.filters import LONGEST_REPETITION, penalise_repetitions, repetition_lengths
from localinfer.engine.sampling.sampler import Sampler, SamplingParams, SamplingPlan


def lengths_by_comparing(tokens: list[int], breakers: set[int]) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for place in range(1, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[-1 - length]:
            if tokens[-1 - length] in breakers:
                break
            length += 1
        if length:
            lengths[tokens[place]] = max(length, lengths.get(tokens[place], 0))
    return lengths


@pytest.mark.parametrize("alphabet", [1, 2, 3, 8])
def test_repetitions_are_as_long_as_comparing_finds(alphabet: int) -> None:
    generator = np.random.default_rng(alphabet)
    for size in (0, 1, 2, 3, 10, 50, 200):
        for breakers in (set[int](), {0}, {alphabet - 1}):
            tokens = generator.integers(0, alphabet, size).astype(np.int32)
            assert repetition_lengths(tokens, breakers) == lengths_by_comparing(tokens.tolist(), breakers)


def test_long_repetitions_count_as_the_longest_that_is_compared() -> None:
    assert repetition_lengths(np.zeros(3000, np.int32), ()) == {0: LONGEST_REPETITION}


def test_penalty_grows_with_the_repetition_and_spares_short_ones() -> None:
    logits = np.zeros(10, np.float32)
    tokens = np.array([1, 2, 3, 4, 9, 3, 5, 9, 1, 2, 3], np.int32)
    penalise_repetitions(logits, tokens, multiplier=0.8, base=1.75, allowed_length=1, breakers=())
    expected = np.zeros(10, np.float32)
    expected[4] = -0.8 * 1.75**2
    expected[5] = -0.8
    assert logits.tolist() == pytest.approx(expected.tolist())
    logits[:] = 0
    penalise_repetitions(logits, tokens, multiplier=0.8, base=1.75, allowed_length=3, breakers=())
    assert np.flatnonzero(logits).tolist() == [4]
    logits[:] = 0
    penalise_repetitions(logits, tokens, multiplier=0.8, base=1.75, allowed_length=1, breakers={3})
    assert not logits.any()


def test_penalty_stays_finite() -> None:
    logits = np.zeros(2, np.float32)
    penalise_repetitions(logits, np.ones(1000, np.int32), multiplier=1000.0, base=1000.0, allowed_length=1, breakers=())
    assert np.isfinite(logits).all() and logits[1] < -1e29


def test_sampler_looks_for_repetitions_in_its_window() -> None:
    history = np.array([1, 2, 3, 0, 0, 0, 1, 2, 5], np.int32)
    logits = np.zeros(6, np.float32)
    logits[3] = 1.0
    for last_n, expected in ((-1, 0), (8, 0), (7, 0), (5, 3), (0, 3)):
        params = SamplingParams(temperature=0, dry_multiplier=2.0, dry_allowed_length=1, dry_last_n=last_n)
        assert Sampler(6).choose(logits, SamplingPlan(params, 6), 8, history) == expected
    assert logits[3] == 1.0
