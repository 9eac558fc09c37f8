"""Quantize each matrix when a calibration pass meets it, by what it reads in the model quantized so far."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.quant.formats.encoding import encode
from localinfer.quant.formats.reference import dequantize
from localinfer.quant.formats.types import TensorType, row_bytes
from localinfer.quant.methods.gptq import quantize_with_feedback
from localinfer.quant.methods.grids import LEVEL_RANGES
from localinfer.quant.methods.hessian import Factor, factor, shifted
from localinfer.quant.methods.hooks import LinearProduct, MatrixPart
from localinfer.quant.methods.presets import TypeChoice
from localinfer.quant.methods.workers import ROWS_PER_PIECE, Workers
from localinfer.types import FloatArray

LEAST_TOKENS_PER_COLUMN = 0.25
"""A Hessian of fewer tokens (an expert's, say) knows too little: such matrices are rounded by importance alone."""

_TOKENS_SAMPLED = 512


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
    """A `ProductVisitor` that quantizes with GPTQ's feedback against the target that answers for earlier errors.

    choices: what each tensor becomes; those left out stay as they are. shapes: theirs in the model, rows first.
    """

    def __init__(
        self,
        choices: Mapping[str, TypeChoice],
        shapes: Mapping[str, tuple[int, ...]],
        pool: ThreadPool,
        workers: Workers,
    ) -> None:
        self._choices, self._shapes = choices, shapes
        self._pool, self._workers = pool, workers
        self._unfinished: dict[str, _Unfinished] = {}
        self._finished: dict[str, PreparedTensor] = {}

    def take_finished(self) -> dict[str, PreparedTensor]:
        """Hand over the tensors all of whose parts have been quantized since the last call."""
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
        """C of `hessian.shifted`: 2 / T * (wanted answers - X W^T)^T X; None if nothing has to be answered for."""
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
        name, shape = matrix.tensor, self._shapes[matrix.tensor]
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
