"""Scales per input channel that make a matrix round better: activation-aware weight quantization.

Multiplying a column of a matrix before it is rounded, and dividing its input by the same scale, keeps the product but
gives that column finer steps, at the others' expense. The candidates are those of AWQ (arXiv 2306.00978, section 3.2),
powers of the activations' size, with and without the weights' own size, and those of SmoothQuant (arXiv 2211.10438,
equation 4), which even out what int8 activations lose to outliers. No scaling at all is always one of them.
What decides is an error with inputs rounded to int8 as kernels round them: of a product, or better of a whole layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from localinfer.types import FloatArray

Rounding = Callable[[FloatArray, FloatArray], FloatArray]
"""Weights float32[rows, columns] and importance float32[columns] to what the target type makes of the weights."""

TOKENS_SAMPLED = 512
ROWS_SAMPLED = 256

LEAST_GAIN = 0.005
"""Scales that lower a layer's loss by less are not worth having: so much is chance."""

_SMALLEST_SCALE = 1e-4
_INT8_BLOCK = 32
_CLIPS = np.arange(1, 11) / 20


class Family(Enum):
    """What scales are made of, a power of each; `alpha` is that of the inputs."""

    INPUTS = "input_rms ** alpha"
    INPUTS_AND_WEIGHTS = "input_rms ** alpha / weight_mean ** (1 - alpha)"
    LARGEST = "input_max ** alpha / weight_max ** (1 - alpha)"


_ALL = (
    *((Family.INPUTS, alpha / 20) for alpha in range(1, 20)),
    *((Family.INPUTS_AND_WEIGHTS, alpha / 10) for alpha in range(1, 10)),
    *((Family.LARGEST, alpha / 10) for alpha in range(1, 10)),
)
_COARSE = (
    *((Family.INPUTS, alpha) for alpha in (0.1, 0.25, 0.45, 0.75)),
    *((Family.INPUTS_AND_WEIGHTS, alpha) for alpha in (0.15, 0.5)),
    *((Family.LARGEST, alpha) for alpha in (0.25, 0.6)),
)
_FINE_STEP = 0.08


@dataclass(frozen=True)
class ReadingMatrix:
    """A matrix float32[rows, columns] that reads the channels, and how its type rounds it."""

    weights: FloatArray
    round: Rounding


@dataclass(frozen=True)
class ScaleChoice:
    """Scales float32[channels] and what they are worth: the loss with them over the loss without. Both are 1 where
    scaling does not help."""

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


def scales_of(sizes: ChannelSizes, family: Family, alpha: float) -> FloatArray:
    """Scales of a family, float32[channels], the smallest as far below 1 as the largest is above it."""
    if family is Family.INPUTS:
        return _centred(sizes.input_rms**alpha)
    is_largest = family is Family.LARGEST
    inputs, weights = (sizes.input_max, sizes.weight_max) if is_largest else (sizes.input_rms, sizes.weight_mean)
    largest = weights.max()
    if largest == 0:
        return np.ones_like(weights)
    return _centred(inputs**alpha / np.maximum(weights / largest, np.float32(1e-6)) ** (1 - alpha))


def candidate_scales(sizes: ChannelSizes) -> FloatArray:
    """Scales to try, float32[candidates, channels]; the first are all 1."""
    return np.stack([np.ones_like(sizes.input_rms), *(scales_of(sizes, *one) for one in _ALL)])


def search_scales(
    sizes: ChannelSizes, loss_of: Callable[[FloatArray], float], *, is_thorough: bool = False
) -> ScaleChoice:
    """Find the scales of the least loss: a few of every family, or all if thorough, then two more beside the best.

    loss_of: the loss of scales float32[channels]; it is asked first for that of scales 1, then 10 times, or 39.
    """
    none = np.ones_like(sizes.input_rms)
    base = loss_of(none)
    if base == 0:
        return ScaleChoice(none, 1.0)
    found = [(loss_of(scales_of(sizes, *one)), one) for one in (_ALL if is_thorough else _COARSE)]
    _, (family, alpha) = min(found, key=lambda one: one[0])
    found += [
        (loss_of(scales_of(sizes, *one)), one) for one in ((family, alpha - _FINE_STEP), (family, alpha + _FINE_STEP))
    ]
    least, best = min(found, key=lambda one: one[0])
    if not least < (1 - LEAST_GAIN) * base:
        return ScaleChoice(none, 1.0)
    return ScaleChoice(scales_of(sizes, *best), least / base)


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
        """The best scales by every other token, if they are better than none by the tokens between too.

        The loss is that of the tokens between.
        """
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
