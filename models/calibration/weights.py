"""Weights for a calibration pass, read matrix by matrix: as a file has them, or as scaling and rounding make them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import EmbeddingTable, LinearWeight
from localinfer.quant.checkpoint.model_file import ModelFile, read_stretch
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.encoding import as_float32, source_rows
from localinfer.quant.formats.types import row_bytes
from localinfer.quant.methods.awq import Rounding, TensorFactors
from localinfer.types import FloatArray

RoundingOf = Callable[[str], Rounding | None]
"""Rounding by the type that a tensor gets; None for tensors that are not rounded."""


@dataclass(frozen=True)
class StoredMatrices:
    """Rows of a tensor's matrices in a file, read when they are needed. `rows`: of each matrix of the stack."""

    file: ModelFile
    name: str
    rows: slice

    def matrix(self, expert: int = 0) -> FloatArray:
        """One matrix as float32[rows, columns]."""
        record = self.file.tensor(self.name)
        num_rows = record.shape[-2] if len(record.shape) > 1 else 1
        stride = row_bytes(record.type, record.shape[-1])
        first = expert * num_rows + self.rows.start
        start, end = first * stride, (first + self.rows.stop - self.rows.start) * stride
        data = read_stretch(self.file, self.name, start, end)
        values = np.array(as_float32(source_rows(data, record.type, record.shape[-1])), np.float32, order="C")
        self.file.forget(self.name, start, end)
        return values


class StreamedWeights:
    """A `WeightSource` over a model file that keeps nothing in memory."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file

    def has(self, name: str) -> bool:
        """Return whether the file holds this tensor."""
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return self._file.tensor(name).shape

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """A handle of a matrix, of a stack of them, or of some rows of either."""
        shape = self._file.tensor(name).shape
        experts, num_rows, num_columns = (1,) * (3 - len(shape)) + tuple(shape)
        part = slice(*(rows or slice(None)).indices(num_rows)[:2])
        return LinearWeight(name, part.stop - part.start, num_columns, StoredMatrices(self._file, name, part), experts)

    def embedding(self, name: str) -> EmbeddingTable:
        """A handle of a table."""
        num_rows, width = self._file.tensor(name).shape
        return EmbeddingTable(name, num_rows, width, self._file)

    def vector(self, name: str) -> FloatArray:
        """A small tensor as float32, in its own shape."""
        info = self._file.tensor(name)
        return dequantize(self._file.tensor_bytes(name), info.type, info.shape)


def embedding_rows(file: ModelFile, name: str, token_ids: NDArray[np.int32]) -> FloatArray:
    """Rows of a table, float32[token_ids, width]."""
    record = file.tensor(name)
    data = file.tensor_bytes(name).reshape(record.shape[0], -1)[token_ids]
    return as_float32(source_rows(np.ascontiguousarray(data), record.type, record.shape[-1])).copy()


class RoundedWeights(StreamedWeights):
    """Weights for an `Evaluator`: those of the file, scaled by the last factors and rounded, but for embeddings.

    Ordinary matrices are kept until `forget`, and rounded again only if their columns' factors change: factors of rows
    commute with rounding, because every row has scales of its own. Stacks of experts are rounded each time.
    """

    def __init__(
        self, file: ModelFile, rounding_of: RoundingOf, mean_squares: Mapping[tuple[str, int], FloatArray]
    ) -> None:
        """mean_squares: of what each matrix reads, float32[columns], by its tensor and its number in a stack."""
        super().__init__(file)
        self._rounding_of = rounding_of
        self._mean_squares = mean_squares
        self._factors: Mapping[str, TensorFactors] = {}
        self._rounded: dict[tuple[str, int], tuple[NDArray[np.float64] | None, FloatArray]] = {}

    def scale(self, factors: Mapping[str, TensorFactors]) -> None:
        """Multiply tensors by these factors from now on, and no others."""
        self._factors = factors

    def forget(self) -> None:
        """Drop the matrices that are kept."""
        self._rounded.clear()

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """A handle of a matrix, of a stack of them, or of some rows of either."""
        weight = super().linear(name, rows)
        return replace(weight, packed=_RoundedMatrices(self, weight.packed, weight.num_experts))

    def vector(self, name: str) -> FloatArray:
        """A small tensor as float32, in its own shape."""
        values = super().vector(name)
        return self._factors[name].apply(values) if name in self._factors else values

    def matrix(self, stored: StoredMatrices, expert: int, num_experts: int) -> FloatArray:
        """One matrix, or rows of it, scaled and rounded: float32[rows, columns]."""
        factors = self._factors.get(stored.name, TensorFactors())
        columns = _of_expert(factors.columns, expert)
        key = (stored.name, stored.rows.start)
        kept = self._rounded.get(key) if num_experts == 1 else None
        if kept is not None and _are_equal(kept[0], columns):
            values = kept[1]
        else:
            values = self._round(stored, expert, columns)
            if num_experts == 1:
                self._rounded[key] = (columns, values)
        rows = _of_expert(factors.rows, expert)
        return values if rows is None else values * rows[stored.rows, None].astype(np.float32)

    def _round(self, stored: StoredMatrices, expert: int, columns: NDArray[np.float64] | None) -> FloatArray:
        values, rounding = stored.matrix(expert), self._rounding_of(stored.name)
        scales = np.float32(1) if columns is None else columns.astype(np.float32)
        values = values * scales
        if rounding is None:
            return values
        return rounding(values, (self._mean_squares[stored.name, expert] / np.square(scales)).astype(np.float32))


@dataclass(frozen=True)
class _RoundedMatrices:
    """Matrices of a weight for an evaluator."""

    source: RoundedWeights
    stored: StoredMatrices
    num_experts: int

    @property
    def rows(self) -> slice:
        return self.stored.rows

    def matrix(self, expert: int = 0) -> FloatArray:
        return self.source.matrix(self.stored, expert, self.num_experts)


def _of_expert(factors: NDArray[np.float64] | None, expert: int) -> NDArray[np.float64] | None:
    return factors if factors is None or factors.ndim == 1 else factors[expert]


def _are_equal(first: NDArray[np.float64] | None, second: NDArray[np.float64] | None) -> bool:
    if first is None or second is None:
        return first is second
    return np.array_equal(first, second)
