"""Scales and clips are chosen by what products lose, and never make it more."""

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.methods.awq import (
    ReadingMatrix,
    Rounding,
    ScaleSearch,
    candidate_scales,
    channel_sizes,
    round_activations,
    search_scales,
)

TOKENS, COLUMNS = 256, 128


def rounding(type: TensorType) -> Rounding:
    def apply(weights: NDArray[np.float32], importance: NDArray[np.float32]) -> NDArray[np.float32]:
        return dequantize(quantize(weights, type, importance), type, weights.shape)

    return apply


def activations(seed: int, outlier: float) -> NDArray[np.float32]:
    """Correlated inputs; every sixteenth channel is `outlier` times as large."""
    generator = np.random.default_rng(seed)
    mixing = generator.standard_normal((COLUMNS, COLUMNS)) / np.sqrt(COLUMNS)
    x = generator.standard_normal((TOKENS, COLUMNS)) @ (mixing + np.eye(COLUMNS))
    x[:, ::16] *= outlier
    return x.astype(np.float32)


def matrix(seed: int, type: TensorType, rows: int = 96) -> ReadingMatrix:
    weights = np.random.default_rng(seed).standard_normal((rows, COLUMNS)).astype(np.float32)
    return ReadingMatrix(weights, rounding(type))


def search(x: NDArray[np.float32], *matrices: ReadingMatrix) -> ScaleSearch:
    found = ScaleSearch(channel_sizes(x, [one.weights for one in matrices]))
    found.add(x, matrices)
    return found


def loss(x: NDArray[np.float32], one: ReadingMatrix, scales: NDArray[np.float32]) -> float:
    rounded = one.round(one.weights * scales, np.square(x / scales).mean(axis=0))
    return float(np.square(round_activations(x / scales) @ rounded.T - x @ one.weights.T).sum())


@pytest.mark.parametrize("type", [TensorType.Q4_0, TensorType.Q4_1])
def test_scales_protect_channels_with_large_inputs(type: TensorType) -> None:
    one = matrix(1, type)
    choice = search(activations(0, 12.0), one).best()
    assert choice.loss_ratio < 0.85
    assert choice.scales[::16].min() > choice.scales[1::16].max()
    unseen = activations(7, 12.0)
    assert loss(unseen, one, choice.scales) < loss(unseen, one, np.ones_like(choice.scales))


def test_scales_even_out_what_int8_activations_lose_to_outliers() -> None:
    one = matrix(2, TensorType.Q8_0)
    choice = search(activations(3, 100.0), one).best()
    assert choice.loss_ratio < 0.6
    unseen = activations(8, 100.0)
    assert loss(unseen, one, choice.scales) < 0.6 * loss(unseen, one, np.ones_like(choice.scales))


def test_scales_stay_one_where_nothing_is_lost() -> None:
    exact = ReadingMatrix(matrix(4, TensorType.Q8_0).weights, lambda weights, importance: weights)
    x = np.random.default_rng(5).integers(-127, 128, (TOKENS, COLUMNS)).astype(np.float32)
    x[:, ::32] = 127
    choice = search(x, exact).best()
    np.testing.assert_array_equal(choice.scales, 1)
    assert choice.loss_ratio == 1


def test_scales_stay_one_unless_tokens_that_were_not_searched_agree() -> None:
    one = matrix(6, TensorType.Q4_0)
    x = activations(9, 1.0)
    x[::2, 0] *= 100
    found = search(x, one)
    proven = found.losses[1]
    assert proven[int(found.losses[0].argmin())] >= proven[0], "the two halves should disagree in this test"
    np.testing.assert_array_equal(found.best().scales, 1)


def test_candidates_begin_with_none_and_are_centred() -> None:
    x = activations(10, 30.0)
    x[:, 5] = 0
    scales = candidate_scales(channel_sizes(x, [matrix(11, TensorType.Q4_0).weights]))
    np.testing.assert_array_equal(scales[0], 1)
    assert np.isfinite(scales).all() and (scales > 0).all()
    np.testing.assert_allclose(scales.max(axis=1) * scales.min(axis=1), 1, rtol=1e-5)


def test_columns_that_share_a_channel_share_its_scale() -> None:
    one, x = matrix(12, TensorType.Q4_0), activations(13, 8.0)
    columns = np.arange(COLUMNS) % 32
    sizes = channel_sizes(x, [one.weights], columns)
    np.testing.assert_allclose(sizes.input_rms, np.sqrt(np.square(x).reshape(-1, 4, 32).mean(axis=(0, 1))), rtol=1e-5)
    np.testing.assert_array_equal(sizes.input_max, np.abs(x).reshape(-1, 4, 32).max(axis=(0, 1)))
    np.testing.assert_array_equal(sizes.weight_max, np.abs(one.weights).reshape(-1, 4, 32).max(axis=(0, 1)))
    found = ScaleSearch(sizes, columns)
    found.add(x, [one])
    assert found.best().scales.shape == (32,)


def test_activations_round_as_kernels_round_them() -> None:
    x = activations(14, 50.0)
    x[0, :32] = 0
    blocks = x.reshape(TOKENS, -1, 32)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    found = round_activations(x).reshape(blocks.shape)
    np.testing.assert_array_equal(found[0, 0], 0)
    assert (np.abs(found - blocks) <= 0.5001 * scale).all()
    codes = np.divide(found, scale, out=np.zeros_like(found), where=scale > 0)
    np.testing.assert_allclose(codes, np.rint(codes), atol=1e-4)
    np.testing.assert_array_equal(round_activations(x[:, :40]), x[:, :40])


def test_search_takes_the_least_loss_it_meets_and_none_for_a_gain_by_chance() -> None:
    sizes = channel_sizes(activations(17, 5.0), [matrix(18, TensorType.Q4_0).weights])
    asked: list[NDArray[np.float32]] = []

    def spread(scales: NDArray[np.float32]) -> float:
        asked.append(scales)
        return 1 + abs(float(np.log(scales.max() / scales.min())) - 0.9)

    choice = search_scales(sizes, spread)
    assert len(asked) == 11
    np.testing.assert_array_equal(asked[0], 1)
    np.testing.assert_array_equal(choice.scales, min(asked[:11], key=spread))
    assert choice.loss_ratio < 1
    flat = search_scales(sizes, lambda scales: 1.0 if (scales == 1).all() else 0.996)
    np.testing.assert_array_equal(flat.scales, 1)
    assert flat.loss_ratio == 1
