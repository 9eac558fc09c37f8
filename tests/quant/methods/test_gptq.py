"""GPTQ against the textbook's loop in float64, and what it must never do: lose to rounding, or mind the threads."""

import numpy as np
import pytest

from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.encoding import read_grid
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.methods.gptq import (
    DAMPING,
    SHIFT,
    Factor,
    factor,
    quantize_with_feedback,
    round_with_feedback,
    row_losses,
    shifted,
)
from localinfer.quant.methods.workers import Workers
from tests.quant.methods.grid_oracle import nearest


def activations(generator: np.random.Generator, tokens: int, columns: int) -> np.ndarray:
    """Correlated inputs: a spectrum of 1 / k in a random basis, and a few loud channels."""
    basis, _ = np.linalg.qr(np.random.default_rng(7).standard_normal((columns, columns)))
    loud = np.ones(columns)
    loud[:: columns // 8] = 10
    x = generator.standard_normal((tokens, columns)) / np.sqrt(np.arange(1, columns + 1))
    return (x @ basis.T * loud).astype(np.float32)


def factored(x: np.ndarray) -> Factor:
    with Workers(1) as workers:
        found = factor(workers.gram(x), len(x), workers)
    assert found is not None
    return found


def textbook(target: np.ndarray, grid_of: np.ndarray, type: TensorType, found: Factor) -> np.ndarray:
    """GPTQ as its paper writes it: the upper Cholesky factor of the inverse, one column at a time, errors passed on."""
    upper = found.upper.astype(np.float64)
    inverse = np.linalg.inv(upper @ upper.T)
    factor_of_inverse = np.linalg.cholesky(inverse).T
    grid, rows = read_grid(grid_of, type), slice(0, len(target))
    work, result = target.astype(np.float64)[:, found.order], np.empty_like(target)
    for i, column in enumerate(found.order):
        value = work[:, i].astype(np.float32)
        _, decoded = nearest(grid, value, column // grid.group_size, rows)
        result[:, column] = decoded
        error = (work[:, i] - decoded) / factor_of_inverse[i, i]
        work[:, i:] -= error[:, None] * factor_of_inverse[i, i:]
    return result


@pytest.mark.parametrize("type", [TensorType.Q4_0, TensorType.Q4_K, TensorType.IQ4_NL])
def test_blocks_of_columns_give_what_single_columns_give(type: TensorType) -> None:
    generator = np.random.default_rng(1)
    found = factored(activations(generator, 1500, 256))
    target = generator.standard_normal((37, 256)).astype(np.float32)
    blocks = quantize(target, type, found.diagonal)
    with Workers(1) as workers:
        _, decoded, losses = round_with_feedback(target, read_grid(blocks, type), found, workers)
    wanted = textbook(target, blocks, type, found)
    # A value between two levels may fall to either side in float32, and what follows answers for it.
    is_same = (decoded == wanted).all(axis=1)
    assert is_same.mean() > 0.7
    hessian = found.upper.astype(np.float64) @ found.upper.T.astype(np.float64)

    def loss(values: np.ndarray) -> float:
        error = (target - values)[:, found.order].astype(np.float64)
        return float(np.einsum("rk,kl,rl->", error, hessian, error))

    assert loss(decoded) == pytest.approx(loss(wanted), rel=0.01)
    with Workers(1) as workers:
        assert row_losses(target - decoded, found, workers).sum() == pytest.approx(loss(decoded), rel=1e-4)
    assert losses.sum() == pytest.approx(loss(decoded), rel=1e-3)


def test_a_layer_of_q4_k_errs_half_as_much_on_tokens_it_has_not_seen() -> None:
    generator = np.random.default_rng(2)
    x, unseen = activations(generator, 4096, 512), activations(generator, 2048, 512)
    found = factored(x)
    target = (generator.standard_normal((128, 512)) / 22).astype(np.float32)
    rounded = quantize(target, TensorType.Q4_K, found.diagonal)
    with Workers(2) as workers:
        blocks, decoded, ratio = quantize_with_feedback(target, rounded, TensorType.Q4_K, found, workers)
    np.testing.assert_array_equal(dequantize(blocks, TensorType.Q4_K, target.shape), decoded)

    def error(values: np.ndarray) -> float:
        return float(np.square(unseen @ (target - values).T, dtype=np.float64).sum())

    assert error(decoded) <= 0.5 * error(dequantize(rounded, TensorType.Q4_K, target.shape))
    assert ratio <= 0.5


def test_no_row_loses_to_rounding() -> None:
    generator = np.random.default_rng(3)
    # So few tokens and so flat a spectrum that feedback gains next to nothing.
    found = factored(generator.standard_normal((300, 64)).astype(np.float32))
    target = generator.standard_normal((400, 64)).astype(np.float32)
    rounded = quantize(target, TensorType.Q4_0, found.diagonal)
    with Workers(1) as workers:
        _, plain, _ = round_with_feedback(target, read_grid(rounded, TensorType.Q4_0), found, workers)
        _, decoded, ratio = quantize_with_feedback(target, rounded, TensorType.Q4_0, found, workers)
        before = row_losses(target - dequantize(rounded, TensorType.Q4_0, target.shape), found, workers)
        assert (row_losses(target - plain, found, workers) > before).any()
        assert (row_losses(target - decoded, found, workers) <= before).all()
    assert ratio < 1


def test_the_shifted_target_solves_for_what_is_missing() -> None:
    generator = np.random.default_rng(4)
    x = activations(generator, 2000, 320)
    original = x + x @ (0.02 * generator.standard_normal((320, 320))).astype(np.float32)
    found = factored(x)
    target = generator.standard_normal((600, 320)).astype(np.float32)
    correlation = target @ ((original - x).T @ x) * np.float32(2 / len(x))
    with Workers(2) as workers:
        moved = shifted(target, correlation, found, workers)
    hessian = np.empty((320, 320))
    hessian[np.ix_(found.order, found.order)] = found.upper.astype(np.float64) @ found.upper.T.astype(np.float64)
    wanted = target + SHIFT * np.linalg.solve(hessian, correlation.T.astype(np.float64)).T
    np.testing.assert_allclose(moved, wanted, atol=2e-3)
    error = [float(np.square(original @ target.T - x @ values.T).sum()) for values in (target, moved)]
    assert error[1] < 0.3 * error[0]


def test_bits_do_not_depend_on_threads() -> None:
    generator = np.random.default_rng(5)
    x = activations(generator, 1000, 512)
    target = generator.standard_normal((1100, 512)).astype(np.float32)
    rounded = quantize(target[:, :512], TensorType.Q4_1, None)
    results = []
    for threads in (1, 3):
        with Workers(threads) as workers:
            found = factor(workers.gram(x), len(x), workers)
            assert found is not None
            moved = shifted(target, workers.cross(x[:, :1100], x)[:1] + target, found, workers)
            results.append(
                (found.upper, moved, *quantize_with_feedback(moved, rounded, TensorType.Q4_1, found, workers))
            )
    for first, second in zip(*results, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_what_cannot_be_factored_is_none(value: float) -> None:
    with Workers(1) as workers:
        assert factor(np.full((4, 4), value, np.float32), 10, workers) is None


def test_the_factor_times_itself_is_the_damped_hessian() -> None:
    x = activations(np.random.default_rng(8), 3000, 700)
    found = factored(x)
    hessian = x.astype(np.float64).T @ x * (2 / len(x))
    hessian[np.diag_indices(700)] += DAMPING * np.diagonal(hessian).mean()
    wanted = hessian[np.ix_(found.order, found.order)]
    upper = found.upper.astype(np.float64)
    np.testing.assert_array_equal(upper, np.triu(upper))
    np.testing.assert_allclose(upper @ upper.T, wanted, atol=1e-5 * np.abs(wanted).max())


def test_dead_and_repeated_channels_are_damped() -> None:
    x = np.random.default_rng(6).standard_normal((40, 64)).astype(np.float32)
    x[:, 10] = 0
    x[:, 20:40] = x[:, :1]
    found = factored(x)
    assert np.isfinite(found.upper).all()
    assert (np.diagonal(found.upper) > 0).all()
