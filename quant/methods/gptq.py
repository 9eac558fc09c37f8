"""GPTQ on the grids of GGUF's blocks: column after column, each compensating for the errors of those before it.
`RoundingVisitor` quantizes each matrix of a model so while a calibration pass runs.

The grid (scales and minimums) is fixed beforehand, so columns go in the order that suits the error, and no trace of it
is left in the file.
Source: GPTQ (arXiv 2210.17323), with static groups and activation order; blocks of columns as in its section 3.3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.encoding import FeedbackColumns
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.quant.formats.encoding import encode
from localinfer.quant.formats.reference import dequantize
from localinfer.quant.formats.types import TensorRecord, TensorType, row_bytes
from localinfer.quant.methods.grids import LEVEL_RANGES, Grid, read_grid, with_levels
from localinfer.quant.methods.hessian import Factor, factor, row_losses, shifted
from localinfer.quant.methods.hooks import LinearProduct, MatrixPart
from localinfer.quant.methods.presets import TypeChoice
from localinfer.quant.methods.torch_workers import TorchWorkers
from localinfer.quant.methods.workers import ROWS_PER_PIECE, Workers
from localinfer.types import FloatArray

LEAST_TOKENS_PER_COLUMN = 0.25
"""A Hessian of fewer tokens (an expert's, say) is too poor: such matrices are rounded by importance alone."""

_TOKENS_SAMPLED = 512
_BLOCK = 128


def round_with_feedback(
    target: FloatArray, grid: Grid, factor: Factor, workers: Workers
) -> tuple[NDArray[np.int8], FloatArray, NDArray[np.float64]]:
    """Choose levels on a grid for a matrix; return them, what they decode to, and each row's |(W - Q) R|^2.

    Column i is rounded after adding sum over earlier j of (W_j - Q_j) R_ji / R_ii, which makes entry i of (W - Q) R as
    small as the grid allows.

    Shapes: target float32[rows, columns]; results int8 and float32 [rows, columns], float64[rows].
    """
    levels = np.empty(target.shape, np.int8)
    decoded: FloatArray = workers.memory.empty(target.shape)
    losses = np.empty(len(target))
    diagonal = np.diagonal(factor.upper).copy()
    # Row i: what the errors of earlier columns weigh in column i.
    weights: FloatArray = workers.memory.empty(factor.upper.shape)

    def weigh(rows: slice) -> None:
        weights[rows] = (factor.upper[:, rows] / diagonal[rows]).T

    workers.over_rows(weigh, len(weights), _BLOCK)

    def one(rows: slice) -> None:
        if isinstance(workers, TorchWorkers):
            chosen, values, remainders = workers.round_columns(target, grid, factor.order, weights)
        else:
            chosen, values, remainders = _round_columns(target[rows], grid, rows, factor.order, weights)
        levels[rows], decoded[rows] = chosen.T, values.T
        remainders *= diagonal[:, None]
        losses[rows] = np.einsum("kr,kr->r", remainders, remainders, dtype=np.float64)

    workers.over_rows(one, len(target), ROWS_PER_PIECE if workers.device is None else len(target))
    return levels, decoded, losses


def _round_columns(
    target: FloatArray, grid: Grid, rows: slice, order: NDArray[np.int64], weights: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Levels and values in file order, and what rounding took from each column as it was then, in rounding order.

    Shapes: target float32[rows, columns]; results float32[columns, rows].
    """
    num_rows, size = target.shape
    columns = FeedbackColumns(
        target.T[order],
        grid.scale[:, rows],
        None if grid.minimum is None else grid.minimum[:, rows],
        level_range=grid.level_range,
        groups=order // grid.group_size,
        places=order,
        weights=weights,
    )
    for start in range(0, size, _BLOCK):
        end = min(size, start + _BLOCK)
        if start:
            columns.wanted[start:end] += weights[start:end, :start] @ columns.errors[:start]
        columns.round_block(start, end)
    return columns.levels[:, :num_rows], columns.decoded[:, :num_rows], columns.wanted[:, :num_rows]


def quantize_with_feedback(
    target: FloatArray, encoded: NDArray[np.uint8], type: TensorType, factor: Factor, workers: Workers
) -> tuple[NDArray[np.uint8], FloatArray, float]:
    """Choose the codes of encoded rows anew; a row that loses by it keeps those it has.

    encoded: the target rounded with importance; its scales and minimums stay.
    Shapes: target float32[rows, columns]; encoded uint8[rows, row bytes]. Returns: rows in blocks, what they decode to,
        and their loss over that of the given ones.
    """
    levels, decoded, after = round_with_feedback(target, read_grid(encoded, type), factor, workers)
    plain = dequantize(encoded, type, target.shape)
    before = row_losses(target - plain, factor, workers)
    is_worse = after > before
    blocks = with_levels(encoded, type, levels)
    blocks[is_worse], decoded[is_worse] = encoded[is_worse], plain[is_worse]
    total = float(before.sum())
    return blocks, decoded, float(np.minimum(before, after).sum()) / total if total > 0 else 1.0


@dataclass(frozen=True)
class PreparedTensor:
    """A tensor quantized by calibration.

    blocks: uint8[rows of all matrices, row bytes]. relative_error: root of the mean square by which its answers differ
    from those wanted of it, over the latter's, on tokens of the calibration text.
    """

    type: TensorType
    blocks: NDArray[np.uint8]
    relative_error: float


@dataclass
class _Unfinished:
    """A tensor some parts of which have been quantized."""

    type: TensorType
    blocks: NDArray[np.uint8]
    num_rows_left: int
    error: float = 0.0
    scale: float = 0.0


class RoundingVisitor:
    """A `ProductVisitor` that quantizes with GPTQ's feedback against the target that compensates for earlier errors.

    choices: what each tensor becomes; those left out stay as they are. records: theirs in the model.
    """

    def __init__(
        self,
        choices: Mapping[str, TypeChoice],
        records: Mapping[str, TensorRecord],
        pool: ThreadPool,
        workers: Workers,
    ) -> None:
        self._choices, self._records = choices, records
        self._pool, self._workers = pool, workers
        self._unfinished: dict[str, _Unfinished] = {}
        self._finished: dict[str, PreparedTensor] = {}

    def take_finished(self) -> dict[str, PreparedTensor]:
        """Return the tensors all of whose parts have been quantized since the last call."""
        finished, self._finished = self._finished, {}
        return finished

    def visit(self, product: LinearProduct) -> Sequence[FloatArray | None]:
        """Quantize the product's matrices; return what they decode to."""
        if not any(matrix.tensor in self._choices for matrix in product.matrices):
            return [None] * len(product.matrices)
        x, num_tokens = product.current, len(product.current)
        found = None
        if num_tokens >= LEAST_TOKENS_PER_COLUMN * x.shape[1]:
            found = factor(self._workers.gram(x), num_tokens, self._workers)
        drift = None
        has_drift = product.is_aligned and product.original is not x
        if found is not None and has_drift and any(matrix.wanted is None for matrix in product.matrices):
            drift = self._workers.cross(x, product.original - x)
        return [self._quantize(matrix, product, found, drift) for matrix in product.matrices]

    def _quantize(
        self, matrix: MatrixPart, product: LinearProduct, found: Factor | None, drift: FloatArray | None
    ) -> FloatArray | None:
        choice = self._choices.get(matrix.tensor)
        if choice is None:
            return None
        x, type = product.current, choice.type
        target = matrix.values
        correlation = None if found is None else self._correlation(matrix, product, drift)
        if found is not None and correlation is not None:
            target = shifted(target, correlation, found, self._workers)
        importance = np.einsum("tk,tk->k", x, x) / np.float32(max(1, len(x))) if len(x) else None
        try:
            blocks = encode(self._pool, target, type, importance if type in LEVEL_RANGES else None)
        except RequestError as error:
            raise RequestError(f"{matrix.tensor}: {error}") from error
        if found is not None and type in LEVEL_RANGES:
            blocks, decoded, _ = quantize_with_feedback(target, blocks, type, found, self._workers)
        else:
            decoded = dequantize(blocks, type, target.shape)
        self._keep(matrix, type, blocks, *_answer_errors(x, target, decoded))
        return decoded

    def _correlation(self, matrix: MatrixPart, product: LinearProduct, drift: FloatArray | None) -> FloatArray | None:
        """C of `hessian.shifted`: 2 / T * (wanted answers - X W^T)^T X; None if there is nothing to compensate."""
        if matrix.wanted is not None:
            missing = matrix.wanted - self._workers.product(product.current, matrix.values)
            total = self._workers.cross(missing, product.current)
        elif drift is not None:
            total = self._workers.product(matrix.values, drift)
        else:
            return None
        total *= np.float32(2 / len(product.current))
        return total

    def _keep(
        self, matrix: MatrixPart, type: TensorType, blocks: NDArray[np.uint8], error: float, scale: float
    ) -> None:
        name, shape = matrix.tensor, self._records[matrix.tensor].shape
        rows_each = shape[-2]
        num_rows = rows_each * (shape[0] if len(shape) > 2 else 1)
        if name not in self._unfinished:
            empty = np.empty((num_rows, row_bytes(type, shape[-1])), np.uint8)
            self._unfinished[name] = _Unfinished(type, empty, num_rows)
        entry = self._unfinished[name]
        first = matrix.expert * rows_each + matrix.rows.start
        entry.blocks[first : first + len(blocks)] = blocks
        entry.num_rows_left -= len(blocks)
        entry.error, entry.scale = entry.error + error, entry.scale + scale
        if entry.num_rows_left == 0:
            relative = (entry.error / entry.scale) ** 0.5 if entry.scale > 0 else 0.0
            self._finished[name] = PreparedTensor(type, entry.blocks, relative)
            del self._unfinished[name]


def _answer_errors(x: FloatArray, target: FloatArray, decoded: FloatArray) -> tuple[float, float]:
    """Sums of squares of the error and of what was wanted, over answers to a sample of tokens and of rows."""
    tokens = x[:: max(1, len(x) // _TOKENS_SAMPLED)]
    rows = slice(None, None, max(1, len(target) // ROWS_PER_PIECE))
    wanted = tokens @ target[rows].T
    error = wanted - tokens @ decoded[rows].T
    return float(np.square(error, dtype=np.float64).sum()), float(np.square(wanted, dtype=np.float64).sum())
