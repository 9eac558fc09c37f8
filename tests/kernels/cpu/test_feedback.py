"""GPTQ's inner loop against the same loop in NumPy, bit for bit."""

import numpy as np
import pytest

from localinfer.kernels.cpu.encoding import TABLE, FeedbackColumns
from localinfer.quant.formats.reference_encoders import nearest_iq4
from localinfer.quant.formats.types import IQ4_VALUES

SIZE, GROUP = 70, 7


def nearest(value: np.ndarray, level_range: tuple[int, int]) -> np.ndarray:
    if level_range == TABLE:
        return IQ4_VALUES[nearest_iq4(value)]
    return np.clip(np.rint(value), *level_range).astype(np.float32)


@pytest.mark.parametrize("num_rows", [1, 16, 37])
@pytest.mark.parametrize("level_range", [(-8, 7), (0, 15), TABLE])
def test_blocks_give_what_the_plain_loop_gives(num_rows: int, level_range: tuple[int, int]) -> None:
    generator = np.random.default_rng(num_rows)

    def numbers(*shape: int) -> np.ndarray:
        return generator.standard_normal(shape).astype(np.float32)

    given, weights = numbers(SIZE, num_rows), 0.2 * numbers(SIZE, SIZE)
    scales, minimums = 0.1 * numbers(SIZE // GROUP, num_rows), numbers(SIZE // GROUP, num_rows)
    scales[3] = 0
    places = generator.permutation(SIZE)
    groups = places // GROUP
    columns = FeedbackColumns(
        given,
        scales,
        None if level_range == (-8, 7) else minimums,
        level_range=level_range,
        groups=groups,
        places=places,
        weights=weights.astype(np.float32),
    )
    if level_range == (-8, 7):
        minimums[:] = 0
    # A block in the middle, for which the caller has added what went before.
    columns.round_block(0, 30)
    columns.wanted[30:, :num_rows] += 0.25
    columns.round_block(30, SIZE)
    wanted, errors = given.copy(), np.zeros_like(given)
    wanted[30:] += np.float32(0.25)
    weights = weights.astype(np.float32)
    for i in range(SIZE):
        for j in range(30 if i >= 30 else 0, i):
            wanted[i] += weights[i, j] * errors[j]
        scale, minimum = scales[groups[i]], minimums[groups[i]]
        level = nearest(np.divide(wanted[i] - minimum, scale, out=np.zeros_like(scale), where=scale != 0), level_range)
        decoded = scale * level + minimum
        errors[i] = given[i] - decoded
        wanted[i] -= decoded
        np.testing.assert_array_equal(columns.levels[places[i], :num_rows], level)
        np.testing.assert_array_equal(columns.decoded[places[i], :num_rows], decoded)
    np.testing.assert_array_equal(columns.errors[:, :num_rows], errors)
    np.testing.assert_array_equal(columns.wanted[:, :num_rows], wanted)
