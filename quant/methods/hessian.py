"""The second-order form of a layer's error, factored, and the target that compensates for earlier layers.

For a matrix W of one layer, what rounding it to Q does to the layer's answers over T tokens X is, row by row,
(W - Q) H (W - Q)^T with H = 2 / T * X^T X. With H + lambda I = R R^T, R upper triangular, that is |(W - Q) R|^2 but for
the damping, and entry i of (W - Q) R depends on columns 0 to i alone: what GPTQ needs, without an inverse.

Names: W, Q [rows, columns]; H, R [columns, columns]; X [tokens, columns]; C [rows, columns].
Sources: GPTQ (arXiv 2210.17323); the triangular form is that of QuIP (arXiv 2307.13304), section 3.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.quant.methods.workers import Workers
from localinfer.types import FloatArray

DAMPING = 0.01
"""lambda, as a share of the mean of H's diagonal."""

FEW_TOKENS_DAMPING = 0.05
"""The same where tokens are fewer than twice the columns, or where H cannot be factored with less."""

SHIFT = 0.5
"""How much of the error of earlier layers a matrix compensates for; all of it fits the calibration text too closely."""

_BLOCK = 128


@dataclass(frozen=True)
class Factor:
    """H + lambda I = R R^T with columns in the order they will be rounded in: falling diagonal of H.

    order: int64[columns]. upper: R, float32[columns, columns]. diagonal: H's own, float32[columns], in file order.
    """

    order: NDArray[np.int64]
    upper: FloatArray
    diagonal: FloatArray


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

    workers.over_rows(one, len(upper), _BLOCK)
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
        for start in range(0, size, _BLOCK):
            end = min(size, start + _BLOCK)
            part = ordered[:, :end] @ factor.upper[:end, start:end]
            total += np.einsum("rk,rk->r", part, part, dtype=np.float64)
        losses[rows] = total

    workers.over_rows(one, len(error))
    return losses


def _block_inverses(upper: FloatArray) -> list[FloatArray]:
    return [
        np.linalg.inv(upper[start : start + _BLOCK, start : start + _BLOCK].astype(np.float64)).astype(np.float32)
        for start in range(0, len(upper), _BLOCK)
    ]


def _solve(right: FloatArray, upper: FloatArray, inverses: list[FloatArray]) -> FloatArray:
    """x with x R R^T = right, by blocks of columns: first against R^T from the last block, then against R."""
    size = len(upper)
    starts = list(range(0, size, _BLOCK))
    for index in reversed(range(len(starts))):
        start, end = starts[index], min(size, starts[index] + _BLOCK)
        if end < size:
            right[:, start:end] -= right[:, end:] @ upper[start:end, end:].T
        right[:, start:end] = right[:, start:end] @ inverses[index].T
    for index, start in enumerate(starts):
        end = min(size, start + _BLOCK)
        if start:
            right[:, start:end] -= right[:, :start] @ upper[:start, start:end]
        right[:, start:end] = right[:, start:end] @ inverses[index]
    return right
