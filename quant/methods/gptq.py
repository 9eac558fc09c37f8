"""GPTQ on the grids of GGUF's blocks: column after column, each compensating for the errors of those before it.
`RoundingVisitor` quantizes each matrix of a model so while a calibration pass runs.

The grid (scales and minimums) is fixed beforehand, so columns go in the order that suits the error, and no trace of it
is left in the file.
Source: GPTQ (arXiv 2210.17323), with static groups and activation order; blocks of columns as in its section 3.3.

The second-order form of a layer's error, factored, and the target that compensates for earlier layers.

For a matrix W of one layer, what rounding it to Q does to the layer's answers over T tokens X is, row by row,
(W - Q) H (W - Q)^T with H = 2 / T * X^T X. With H + lambda I = R R^T, R upper triangular, that is |(W - Q) R|^2 but for
the damping, and entry i of (W - Q) R depends on columns 0 to i alone: what GPTQ needs, without an inverse.

Names: W, Q [rows, columns]; H, R [columns, columns]; X [tokens, columns]; C [rows, columns].
Sources: GPTQ (arXiv 2210.17323); the triangular form is that of QuIP (arXiv 2307.13304), section 3.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.encoding import FeedbackColumns
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.encoding import LEVEL_RANGES, Grid, encode, read_grid, with_levels
from localinfer.quant.formats.types import TensorRecord, TensorType, row_bytes
from localinfer.quant.methods.imatrix import LinearProduct, MatrixPart
from localinfer.quant.methods.presets import TypeChoice
from localinfer.quant.methods.workers import ROWS_PER_PIECE, TorchWorkers, Workers
from localinfer.types import FloatArray

DAMPING = 0.01
"""lambda, as a share of the mean of H's diagonal."""

FEW_TOKENS_DAMPING = 0.05
"""The same where tokens are fewer than twice the columns, or where H cannot be factored with less."""

SHIFT = 0.5
"""Share of the error of earlier layers that a matrix compensates for; all of it fits the text too closely."""

_HESSIAN_BLOCK = 128


@dataclass(frozen=True)
class Factor:
    """H + lambda I = R R^T with columns in the order they will be rounded in: falling diagonal of H."""

    order: NDArray[np.int64]
    """int64[columns]."""
    upper: FloatArray
    """R, float32[columns, columns]."""
    diagonal: FloatArray
    """H's own, float32[columns], in file order."""


def factor(gram: FloatArray, num_tokens: int, workers: Workers) -> Factor | None:
    """Factor the Hessian of inputs; None if there is nothing to factor (no inputs but zeros), or no way to.

    Shapes: gram float32[columns, columns], X^T X.
    """
    diagonal = np.diagonal(gram) * np.float32(2 / max(1, num_tokens))
    mean = float(diagonal.mean(dtype=np.float64))
    if not np.isfinite(gram).all() or mean <= 0:
        return None
    order = np.argsort(-diagonal, kind="stable")
    # With rows and columns turned around, the lower triangle that NumPy gives is the upper one wanted here.
    turned = order[::-1]
    shares = (DAMPING,) if num_tokens >= 2 * len(gram) else ()
    scale = 2 / num_tokens
    matrix = workers.memory.empty(gram.shape, np.float64)
    for share in (*shares, FEW_TOKENS_DAMPING, 10 * FEW_TOKENS_DAMPING):

        def fill(rows: slice) -> None:
            matrix[rows] = gram[turned[rows]][:, turned]
            matrix[rows] *= scale

        workers.over_rows(fill, len(matrix))
        matrix[np.diag_indices_from(matrix)] += share * mean
        try:
            workers.factor(matrix)
        except np.linalg.LinAlgError:
            continue
        return Factor(order, _turned_triangle(matrix, workers), diagonal)
    return None


def _turned_triangle(matrix: NDArray[np.float64], workers: Workers) -> FloatArray:
    """The lower triangle with rows and columns turned around, which is an upper one: float32, zeros below."""
    upper: FloatArray = workers.memory.empty(matrix.shape)

    def one(rows: slice) -> None:
        upper[rows] = np.triu(matrix[::-1, ::-1][rows], rows.start)

    workers.over_rows(one, len(upper), _HESSIAN_BLOCK)
    return upper


def shifted(target: FloatArray, correlation: FloatArray, factor: Factor, workers: Workers) -> FloatArray:
    """The target W + beta * C (H + lambda I)^-1 that brings answers nearer to the original model's.

    correlation: C = 2 / T * (wanted answers - X W^T)^T X.
    Shapes: target, correlation and result float32[rows, columns].
    """
    result: FloatArray = workers.memory.empty(target.shape)
    inverses = _block_inverses(factor.upper)

    def one(rows: slice) -> None:
        solved = _solve(np.ascontiguousarray(correlation[rows][:, factor.order]), factor.upper, inverses)
        result[rows, factor.order] = target[rows][:, factor.order] + np.float32(SHIFT) * solved

    workers.over_rows(one, len(target))
    return result


def row_losses(error: FloatArray, factor: Factor, workers: Workers) -> NDArray[np.float64]:
    """|(W - Q) R|^2 of every row. Shapes: error float32[rows, columns] in file order; result float64[rows]."""
    losses = np.empty(len(error))
    size = len(factor.order)

    def one(rows: slice) -> None:
        ordered = np.ascontiguousarray(error[rows][:, factor.order])
        total = np.zeros(len(ordered))
        for start in range(0, size, _HESSIAN_BLOCK):
            end = min(size, start + _HESSIAN_BLOCK)
            part = ordered[:, :end] @ factor.upper[:end, start:end]
            total += np.einsum("rk,rk->r", part, part, dtype=np.float64)
        losses[rows] = total

    workers.over_rows(one, len(error))
    return losses


def _block_inverses(upper: FloatArray) -> list[FloatArray]:
    return [
        np.linalg.inv(upper[start : start + _HESSIAN_BLOCK, start : start + _HESSIAN_BLOCK].astype(np.float64)).astype(
            np.float32
        )
        for start in range(0, len(upper), _HESSIAN_BLOCK)
    ]


def _solve(right: FloatArray, upper: FloatArray, inverses: list[FloatArray]) -> FloatArray:
    """x with x R R^T = right, by blocks of columns: first against R^T from the last block, then against R."""
    size = len(upper)
    starts = list(range(0, size, _HESSIAN_BLOCK))
    for index in reversed(range(len(starts))):
        start, end = starts[index], min(size, starts[index] + _HESSIAN_BLOCK)
        if end < size:
            right[:, start:end] -= right[:, end:] @ upper[start:end, end:].T
        right[:, start:end] = right[:, start:end] @ inverses[index].T
    for index, start in enumerate(starts):
        end = min(size, start + _HESSIAN_BLOCK)
        if start:
            right[:, start:end] -= right[:, :start] @ upper[:start, start:end]
        right[:, start:end] = right[:, start:end] @ inverses[index]
    return right


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
        self, choices: Mapping[str, TypeChoice], records: Mapping[str, TensorRecord], pool: ThreadPool, workers: Workers
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
