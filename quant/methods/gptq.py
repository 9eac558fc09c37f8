"""GPTQ on the grids of GGUF's blocks: column after column, each answering for the errors of those before it.

The grid (scales and minimums) is fixed beforehand, so columns go in the order that suits the error, and no trace of it
is left in the file.
Source: GPTQ (arXiv 2210.17323), with static groups and activation order; blocks of columns as in its section 3.3.
"""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.encoding import FeedbackColumns
from localinfer.quant.formats.reference import dequantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.methods.grids import Grid, read_grid, with_levels
from localinfer.quant.methods.hessian import Factor, row_losses
from localinfer.quant.methods.torch_workers import TorchWorkers
from localinfer.quant.methods.workers import ROWS_PER_PIECE, Workers
from localinfer.types import FloatArray

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
