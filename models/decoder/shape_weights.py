"""Weights without data, for graphs that are listed and not run."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from localinfer.kernels.ops import EmbeddingTable, LinearWeight
from localinfer.types import FloatArray


class VectorPart(NamedTuple):
    """Elements of a tensor, `size` of them from `start`."""

    tensor: str
    start: int
    size: int


class ShapeWeights:
    """A `WeightSource` without data: vectors are of ones, and recognised by their address.

    shapes: of every tensor, rows first. uses: how often each tensor was requested. A matrix's `packed` is its first
    row.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = shapes
        self._vectors: list[tuple[int, str, FloatArray]] = []
        self.uses: dict[str, int] = {}

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return self._shapes[name]

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """A handle of a matrix, of a stack of them, or of some rows of either."""
        self._count(name)
        *stacked, num_rows, num_columns = (1, *self._shapes[name])
        first, end, _ = (rows or slice(None)).indices(num_rows)
        return LinearWeight(name, end - first, num_columns, first, prod(stacked))

    def embedding(self, name: str) -> EmbeddingTable:
        """A handle of a table."""
        self._count(name)
        num_rows, width = self._shapes[name]
        return EmbeddingTable(name, num_rows, width, None)

    def vector(self, name: str) -> FloatArray:
        """Ones in the shape of a small tensor."""
        self._count(name)
        values = np.ones(self._shapes[name], np.float32)
        self._vectors.append((values.ctypes.data, name, values))
        return values

    def part_of(self, values: FloatArray) -> VectorPart | None:
        """Which elements of which tensor these are, or None."""
        address = values.ctypes.data
        for first, name, whole in self._vectors:
            if first <= address < first + whole.nbytes:
                return VectorPart(name, (address - first) // 4, values.size)
        return None

    def _count(self, name: str) -> None:
        self.uses[name] = self.uses.get(name, 0) + 1
