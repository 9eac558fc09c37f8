"""Rotary frequencies of every scaling, against the formulas of their papers written out for single pairs."""

import decimal
import math
from dataclasses import replace
from decimal import Decimal

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.kernels.ops import Pairing
from localinfer.models.decoder.block_config import RopeConfig
from localinfer.models.decoder.positions import own_magnitude, plain_frequencies, rope_table

PLAIN = RopeConfig(rotary_size=10, base=10000.0, original_context_length=2048)


def frequencies(rope: RopeConfig, divisors: NDArray[np.float32] | None = None) -> NDArray[np.float64]:
    return rope_table(rope, Pairing.ADJACENT, divisors).inverse_frequencies


def test_plain_frequencies_fall_geometrically_from_one() -> None:
    found = frequencies(PLAIN)
    np.testing.assert_allclose(found, [1.0, 10**-0.8, 10**-1.6, 10**-2.4, 10**-3.2], rtol=1e-14)
    assert found.dtype == np.float64


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6, 5e6, 1e7])
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_plain_frequencies_are_the_nearest_numbers_so_that_all_cpus_have_them(base: float, size: int) -> None:
    with decimal.localcontext(prec=40):
        logarithm = Decimal(base).ln()
        wanted = [float((Decimal(-2.0 * pair / size) * logarithm).exp()) for pair in range(size // 2)]
    np.testing.assert_array_equal(plain_frequencies(size, base), wanted)


def test_linear_scaling_divides_every_frequency() -> None:
    scaled = replace(PLAIN, scaling="linear", factor=4.0)
    np.testing.assert_array_equal(frequencies(scaled), frequencies(PLAIN) / 4.0)
    assert own_magnitude(scaled) == 1.0


def test_divisors_of_a_file_divide_pair_by_pair() -> None:
    divisors = np.array([1.0, 2.0, 4.0, 8.0, 8.0], dtype=np.float32)
    np.testing.assert_array_equal(frequencies(PLAIN, divisors), frequencies(PLAIN) / divisors)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    rope = RopeConfig(rotary_size=64, base=10000.0, scaling="yarn", factor=16.0, original_context_length=4096)
    plain = np.array([10000.0 ** (-pair / 32) for pair in range(32)])
    found = frequencies(rope)
    turns = 4096 * plain / (2 * math.pi)
    np.testing.assert_array_equal(found[turns > 40], plain[turns > 40])
    np.testing.assert_allclose(found[turns < 0.5], plain[turns < 0.5] / 16, rtol=1e-15)
    blended = found / plain
    assert np.all(np.diff(blended) <= 0.0), "each slower pair is interpolated at least as much"


def test_yarn_turns_its_temperature_into_the_magnitude() -> None:
    rope = RopeConfig(rotary_size=8, scaling="yarn", factor=40.0, original_context_length=4096)
    assert own_magnitude(rope) == pytest.approx(1.0 + 0.1 * math.log(40.0))
    assert own_magnitude(replace(rope, attention_factor=0.5)) == pytest.approx(0.5 + 0.05 * math.log(40.0))
    assert own_magnitude(replace(rope, log_multiplier=1.0)) == pytest.approx(1.0)


def test_longrope_takes_its_magnitude_from_the_file() -> None:
    rope = replace(PLAIN, scaling="longrope", attention_factor=1.19)
    assert rope_table(rope, Pairing.HALVES).magnitude == 1.19


@pytest.mark.parametrize("divisors", [[1.0] * 4, [1.0] * 4 + [0.0], [1.0] * 4 + [math.nan]])
def test_divisors_that_cannot_divide_are_refused(divisors: list[float]) -> None:
    with pytest.raises(CorruptFileError, match="divisors"):
        rope_table(PLAIN, Pairing.HALVES, np.array(divisors, dtype=np.float32))
