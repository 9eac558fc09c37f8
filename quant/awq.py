"""Scales per input channel that make a matrix round better: activation-aware weight quantization.

Multiplying a column of a matrix before it is rounded, and dividing its input by the same scale, keeps the product but
gives that column finer steps, at the others' expense. The candidates are those of AWQ (arXiv 2306.00978, section 3.2),
powers of the activations' size, with and without the weights' own size, and those of SmoothQuant (arXiv 2211.10438,
equation 4), which even out what int8 activations lose to outliers. No scaling at all is always one of them, and what
decides is the error of the products, with inputs rounded to int8 as kernels round them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float32]

Rounding = Callable[[FloatArray, FloatArray], FloatArray]
"""Weights float32[rows, columns] and importance float32[columns] to what the target type makes of the weights."""

TOKENS_SAMPLED = 512
ROWS_SAMPLED = 256

_ALPHAS = np.arange(1, 20) / 20
_WEIGHED_ALPHAS = np.arange(1, 10) / 10
_SMALLEST_SCALE = 1e-4
_INT8_BLOCK = 32
_CLIPS = np.arange(1, 11) / 20


@dataclass(frozen=True)
class ReadingMatrix:
    """A matrix float32[rows, columns] that reads the channels, and how its type rounds it."""

    weights: FloatArray
    round: Rounding


@dataclass(frozen=True)
class ScaleChoice:
    """Scales float32[channels] and what they are worth: the loss with them over the loss without, on other tokens than
    those they were chosen on. Both are 1 where scaling does not help."""

    scales: FloatArray
    loss_ratio: float


@dataclass(frozen=True)
class ChannelSizes:
    """Sizes of channels, float32[channels] each: root mean square and largest magnitude of the inputs, mean and largest
    magnitude of the weights."""

    input_rms: FloatArray
    input_max: FloatArray
    weight_mean: FloatArray
    weight_max: FloatArray


def channel_sizes(
    x: FloatArray, weights: Sequence[FloatArray], columns: NDArray[np.int64] | None = None
) -> ChannelSizes:
    """Measure channels; where several columns share one, over all of them.

    columns: the channel of each column; None where each has its own.
    Shapes: x float32[tokens, columns], weights float32[rows, columns].
    """
    magnitudes = [np.abs(matrix) for matrix in weights]
    # Relative to its row, so that rows of another size count alike (the official AWQ code does the same per group).
    relative = [matrix / np.maximum(matrix.max(axis=1, keepdims=True), np.float32(1e-30)) for matrix in magnitudes]
    weight_mean = np.concatenate(relative).mean(axis=0)
    weight_max = np.max([matrix.max(axis=0) for matrix in magnitudes], axis=0)
    mean_square = np.square(x).mean(axis=0)
    input_max = np.abs(x).max(axis=0)
    if columns is not None:
        count = np.bincount(columns)
        mean_square = (np.bincount(columns, mean_square) / count).astype(np.float32)
        weight_mean = (np.bincount(columns, weight_mean) / count).astype(np.float32)
        input_max, weight_max = (_largest(values, columns, len(count)) for values in (input_max, weight_max))
    return ChannelSizes(np.sqrt(mean_square), input_max, weight_mean, weight_max)


def candidate_scales(sizes: ChannelSizes) -> FloatArray:
    """Scales to try, float32[candidates, channels]; the first are all 1."""
    found = [np.ones_like(sizes.input_rms)]
    found += [sizes.input_rms**alpha for alpha in _ALPHAS]
    for inputs, weights in ((sizes.input_rms, sizes.weight_mean), (sizes.input_max, sizes.weight_max)):
        safe = np.maximum(weights, np.float32(1e-6) * max(weights.max(), np.float32(1e-30)))
        found += [inputs**alpha / safe ** (1 - alpha) for alpha in _WEIGHED_ALPHAS]
    return np.stack([_centred(scales) for scales in found])


class ScaleSearch:
    """The losses of a site's candidates, summed over the products that read its channels."""

    def __init__(self, sizes: ChannelSizes, columns: NDArray[np.int64] | None = None) -> None:
        """columns: the channel of each column; None where each has its own."""
        self._candidates = candidate_scales(sizes)
        self._columns = columns
        self._losses = np.zeros((2, len(self._candidates)))

    def add(self, x: FloatArray, matrices: Sequence[ReadingMatrix]) -> None:
        """Count one product: its matrices read x, float32[tokens, columns]."""
        importance = np.square(x).mean(axis=0)
        sampled = x[:: max(1, len(x) // TOKENS_SAMPLED)]
        for matrix in matrices:
            rows = matrix.weights[:: max(1, len(matrix.weights) // ROWS_SAMPLED)]
            wanted = sampled @ rows.T
            size = float(np.square(wanted, dtype=np.float64).sum())
            if size == 0:
                continue
            for index, scales in enumerate(self._candidates):
                spread = scales if self._columns is None else scales[self._columns]
                rounded = matrix.round(rows * spread, importance / np.square(spread))
                errors = np.square(round_activations(sampled / spread) @ rounded.T - wanted).sum(axis=1)
                self._losses[:, index] += errors[::2].sum() / size, errors[1::2].sum() / size

    def best(self) -> ScaleChoice:
        """The best scales by every other token, if they are better than none by the tokens between too."""
        searched, proven = self._losses
        index = int(searched.argmin())
        if proven[index] >= proven[0]:
            index = 0
        ratio = float(proven[index] / proven[0]) if proven[0] else 1.0
        return ScaleChoice(self._candidates[index], ratio)


def round_activations(x: FloatArray) -> FloatArray:
    """What int8 kernels make of activations: per row and 32 columns a scale of largest / 127, to the nearest even.

    Columns that do not fill blocks stay as they are: such matrices have no int8 kernel.
    Shapes: float32[tokens, columns].
    """
    if x.shape[1] % _INT8_BLOCK:
        return x
    blocks = x.reshape(len(x), -1, _INT8_BLOCK)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= 1e-36)
    return np.asarray(np.rint(blocks * inverse) * (largest / np.float32(127)), dtype=np.float32).reshape(x.shape)


def clip_weights(matrix: ReadingMatrix, gram: FloatArray, group_size: int = 32) -> FloatArray:
    """Cut off the largest weights of each group where the steps this leaves to the others are worth it.

    gram: x.T @ x / tokens, float32[columns, columns]. A group's own error decides how far (AWQ's official code, ten
    steps down to half the largest magnitude), the error of each row over all columns whether at all.
    Shapes: result float32[rows, columns].
    """
    weights = matrix.weights
    importance = np.diagonal(gram).copy()
    num_groups = weights.shape[1] // group_size
    starts = np.arange(num_groups) * group_size
    inside = starts[:, None] + np.arange(group_size)
    blocks = gram[inside[:, :, None], inside[:, None, :]]
    limits = np.abs(weights.reshape(len(weights), num_groups, group_size)).max(axis=2)

    def clipped_at(shares: NDArray[np.float64]) -> FloatArray:
        edges = np.repeat((limits * shares).astype(np.float32), group_size, axis=1)
        return np.clip(weights, -edges, edges)

    plain = weights - matrix.round(weights, importance)
    best, shares = _group_errors(plain, blocks), np.ones_like(limits, dtype=np.float64)
    for clip in _CLIPS:
        error = weights - matrix.round(clipped_at(np.full_like(shares, 1 - clip)), importance)
        errors = _group_errors(error, blocks)
        shares = np.where(errors < best, 1 - clip, shares)
        best = np.minimum(errors, best)
    candidate = clipped_at(shares)
    error = weights - matrix.round(candidate, importance)
    is_better = _row_errors(error, gram) < _row_errors(plain, gram)
    return np.where(is_better[:, None], candidate, weights)


def _group_errors(error: FloatArray, blocks: FloatArray) -> FloatArray:
    """e H e' of every row and group, with the group's own block of H. Shapes: result float32[rows, groups]."""
    by_group = error.reshape(len(error), len(blocks), -1).transpose(1, 0, 2)
    return np.asarray(np.einsum("gri,gri->rg", by_group @ blocks, by_group))


def _row_errors(error: FloatArray, gram: FloatArray) -> FloatArray:
    return np.asarray(np.einsum("ri,ri->r", error @ gram, error))


def _centred(scales: NDArray[np.floating]) -> FloatArray:
    """Bounded from below, and the smallest as far under 1 as the largest is above it."""
    largest = scales.max()
    bounded = np.maximum(scales / largest, _SMALLEST_SCALE) if largest > 0 else np.ones_like(scales)
    return np.asarray(bounded / np.sqrt(bounded.max() * bounded.min()), dtype=np.float32)


def _largest(values: FloatArray, columns: NDArray[np.int64], num_channels: int) -> FloatArray:
    result = np.zeros(num_channels, np.float32)
    np.maximum.at(result, columns, values)
    return result
