"""Scales per input channel that make a matrix round better: activation-aware weight quantization.

Multiplying a column of a matrix before it is rounded, and dividing its input by the same scale, keeps the product but
gives that column finer steps, at the others' expense. The candidates are those of AWQ (arXiv 2306.00978, section 3.2),
powers of the activations' size, with and without the weights' own size, and those of SmoothQuant (arXiv 2211.10438,
equation 4), which even out what int8 activations lose to outliers. No scaling at all is always one of them.
The choice minimizes an error with inputs rounded to int8 as kernels do: of a product, or better of a whole layer.
`ScaledModel` is a model with such scales folded in as its tensors are read.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError, TokenizerError
from localinfer.quant.checkpoint.groups import GroupedMatrix
from localinfer.quant.checkpoint.model_file import ModelFile, read_stretch
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.mapped_file import FileStretch
from localinfer.types import FloatArray

Rounding = Callable[[FloatArray, FloatArray], FloatArray]
"""Weights float32[rows, columns] and importance float32[columns] to the weights as the target type rounds them."""

TOKENS_SAMPLED = 512
ROWS_SAMPLED = 256

LEAST_GAIN = 0.005
"""Scales that lower a layer's loss by less are not worth having: so much is chance."""

_SMALLEST_SCALE = 1e-4
_INT8_BLOCK = 32


class ScaleFamily(Enum):
    """Sizes that scales are made of, a power of each; `alpha` is that of the inputs."""

    INPUTS = "input_rms ** alpha"
    INPUTS_AND_WEIGHTS = "input_rms ** alpha / weight_mean ** (1 - alpha)"
    LARGEST = "input_max ** alpha / weight_max ** (1 - alpha)"


_ALL = (
    *((ScaleFamily.INPUTS, alpha / 20) for alpha in range(1, 20)),
    *((ScaleFamily.INPUTS_AND_WEIGHTS, alpha / 10) for alpha in range(1, 10)),
    *((ScaleFamily.LARGEST, alpha / 10) for alpha in range(1, 10)),
)
_COARSE = (
    *((ScaleFamily.INPUTS, alpha) for alpha in (0.1, 0.25, 0.45, 0.75)),
    *((ScaleFamily.INPUTS_AND_WEIGHTS, alpha) for alpha in (0.15, 0.5)),
    *((ScaleFamily.LARGEST, alpha) for alpha in (0.25, 0.6)),
)
_FINE_STEP = 0.08


@dataclass(frozen=True)
class ReadingMatrix:
    """A matrix float32[rows, columns] that reads the channels, and how its type rounds it."""

    weights: FloatArray
    round: Rounding


@dataclass(frozen=True)
class ScaleChoice:
    """Scales float32[channels] and their effect: the loss with them over the loss without. Both are 1 where
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


def scales_of(sizes: ChannelSizes, family: ScaleFamily, alpha: float) -> FloatArray:
    """Scales of a family, float32[channels], the smallest as far below 1 as the largest is above it."""
    if family is ScaleFamily.INPUTS:
        return _centred(sizes.input_rms**alpha)
    is_largest = family is ScaleFamily.LARGEST
    inputs, weights = (sizes.input_max, sizes.weight_max) if is_largest else (sizes.input_rms, sizes.weight_mean)
    largest = weights.max()
    if largest == 0:
        return np.ones_like(weights)
    return _centred(inputs**alpha / np.maximum(weights / largest, np.float32(1e-6)) ** (1 - alpha))


def candidate_scales(sizes: ChannelSizes) -> FloatArray:
    """Scales to try, float32[candidates, channels]; the first are all 1."""
    return np.stack([np.ones_like(sizes.input_rms), *(scales_of(sizes, *one) for one in _ALL)])


def search_scales(sizes: ChannelSizes, loss_of: Callable[[FloatArray], float]) -> ScaleChoice:
    """Find the scales of the least loss: a few of every family, then two more beside the best.

    loss_of: the loss of scales float32[channels]; called first for scales of 1, then 10 times.
    """
    none = np.ones_like(sizes.input_rms)
    base = loss_of(none)
    if base == 0:
        return ScaleChoice(none, 1.0)
    found = [(loss_of(scales_of(sizes, *one)), one) for one in _COARSE]
    _, (family, alpha) = min(found, key=lambda one: one[0])
    found += [
        (loss_of(scales_of(sizes, *one)), one) for one in ((family, alpha - _FINE_STEP), (family, alpha + _FINE_STEP))
    ]
    least, best = min(found, key=lambda one: one[0])
    if not least < (1 - LEAST_GAIN) * base:
        return ScaleChoice(none, 1.0)
    return ScaleChoice(scales_of(sizes, *best), least / base)


class ScaleSearch:
    """The losses of a scale group's candidates, summed over the products that read its channels.

    losses: float64[2, candidates], over every other token, and over the tokens between.
    """

    def __init__(self, sizes: ChannelSizes, columns: NDArray[np.int64] | None = None) -> None:
        """columns: the channel of each column; None where each has its own."""
        self._candidates = candidate_scales(sizes)
        self._columns = columns
        self.losses = np.zeros((2, len(self._candidates)))

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
                self.losses[:, index] += errors[::2].sum() / size, errors[1::2].sum() / size

    def best(self) -> ScaleChoice:
        """The best scales by every other token, if they are better than none by the tokens between too.

        The loss is that of the tokens between.
        """
        searched, proven = self.losses
        index = int(searched.argmin())
        if proven[index] >= proven[0]:
            index = 0
        ratio = float(proven[index] / proven[0]) if proven[0] else 1.0
        return ScaleChoice(self._candidates[index], ratio)


def round_activations(x: FloatArray) -> FloatArray:
    """Activations as int8 kernels round them: per row and 32 columns a scale of largest / 127, to the nearest even.

    Columns that do not fill blocks stay as they are: such matrices have no int8 kernel.
    Shapes: float32[tokens, columns].
    """
    if x.shape[1] % _INT8_BLOCK:
        return x
    blocks = x.reshape(len(x), -1, _INT8_BLOCK)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= 1e-36)
    return np.asarray(np.rint(blocks * inverse) * (largest / np.float32(127)), dtype=np.float32).reshape(x.shape)


def _centred(scales: NDArray[np.floating]) -> FloatArray:
    """Bounded from below, and the smallest as far under 1 as the largest is above it."""
    largest = scales.max()
    bounded = np.maximum(scales / largest, _SMALLEST_SCALE) if largest > 0 else np.ones_like(scales)
    return np.asarray(bounded / np.sqrt(bounded.max() * bounded.min()), dtype=np.float32)


def _largest(values: FloatArray, columns: NDArray[np.int64], num_channels: int) -> FloatArray:
    result = np.zeros(num_channels, np.float32)
    np.maximum.at(result, columns, values)
    return result


Factors = NDArray[np.float64]


@dataclass(frozen=True)
class TensorFactors:
    """Factors of a tensor; None is 1.

    Shapes: rows float64[rows], or float64[matrices, rows] where every matrix of a stack has its own; columns alike. A
    vector has columns only, and float64[experts, columns] fit one vector per expert.
    """

    rows: Factors | None = None
    columns: Factors | None = None

    def apply(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Multiply a tensor, rounding once. Raises: ShapeError if the factors are not those of its shape."""
        factor: Factors | float = 1.0
        try:
            if self.rows is not None:
                factor = factor * np.broadcast_to(self.rows, values.shape[:-1])[..., None]
            if self.columns is not None:
                is_stack = self.columns.ndim == 2 and values.ndim == 3
                factor = factor * np.broadcast_to(self.columns[:, None] if is_stack else self.columns, values.shape)
        except ValueError as error:
            raise ShapeError(f"got factors for another shape than {list(values.shape)}: {error}") from error
        return np.asarray(values * factor, dtype=np.float32)

    def __mul__(self, other: "TensorFactors") -> "TensorFactors":
        """Both, one after the other."""
        return TensorFactors(_product(self.rows, other.rows), _product(self.columns, other.columns))


class ScaledModel:
    """A `ModelFile` with some tensors multiplied by factors, those as F32. Closing it closes the model."""

    def __init__(self, model: ModelFile, factors: Mapping[str, TensorFactors]) -> None:
        self._model = model
        self._factors = dict(factors)
        # Stacks of experts are read matrix by matrix, but scaled whole.
        self._last: tuple[str, NDArray[np.uint8]] | None = None
        self.path: Path = model.path
        self.paths: tuple[Path, ...] = model.paths
        self.num_bytes: int = model.num_bytes
        self.metadata: Mapping[str, object] = model.metadata
        self.tokenizer_error: TokenizerError | None = model.tokenizer_error
        self.tensors: Mapping[str, TensorRecord] = {
            name: TensorRecord(name, TensorType.F32, record.shape) if name in factors else record
            for name, record in model.tensors.items()
        }

    def tensor(self, name: str) -> TensorRecord:
        """Return a tensor's record. Raises: CorruptFileError if the model lacks it."""
        return self.tensors[name] if name in self._factors else self._model.tensor(name)

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[num_bytes]. Raises: ShapeError if a tensor's factors are not those of its shape."""
        if name not in self._factors:
            return self._model.tensor_bytes(name)
        if self._last is None or self._last[0] != name:
            record = self._model.tensor(name)
            values = dequantize(read_stretch(self._model, name, 0, record.num_bytes), record.type, record.shape)
            self._last = (name, self._factors[name].apply(values).reshape(-1).view(np.uint8))
        return self._last[1]

    def grouped(self, name: str) -> tuple[GroupedMatrix, ...] | None:
        """Return a checkpoint's codes; None for what has none, and for what is scaled."""
        return None if name in self._factors else self._model.grouped(name)

    def stretch(self, name: str) -> FileStretch | None:
        """Return where a tensor's bytes lie; None for what is scaled."""
        return None if name in self._factors else self._model.stretch(name)

    @property
    def has_changed(self) -> bool:
        """True if a file of the model was written since it was opened, or another one has its name."""
        return self._model.has_changed

    def forget(self, name: str, first: int, end: int) -> None:
        """Let the system drop the memory behind some bytes; a scaled tensor's source is dropped whole."""
        record = self._model.tensor(name)
        if name not in self._factors:
            self._model.forget(name, first, end)
        elif end >= self.tensors[name].num_bytes:
            self._last = None
            self._model.forget(name, 0, record.num_bytes)

    def close(self) -> None:
        """Refuse further access. Safe to call twice."""
        self._last = None
        self._model.close()


def _product(first: Factors | None, second: Factors | None) -> Factors | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second
