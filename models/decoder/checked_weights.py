"""Sources of weights that check shapes, and that have shapes alone."""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import numpy as np

from localinfer.errors import CorruptFileError
from localinfer.kernels.ops import EmbeddingTable, LinearWeight, WeightSource
from localinfer.types import FloatArray

_WAY_OUT = "Convert the model again or download another copy."


ROW_TYPES = "row_types.weight"
"""Table float32[2, 1] of each token type's factor of an adapter's part; a file with adapters (`adapters.py`) has it."""


def is_of_adapter(name: str) -> bool:
    """Return whether a tensor is of an adapter."""
    return name == ROW_TYPES or ".adapter_a." in name or ".adapter_b." in name


class CheckedWeights:
    """A `WeightSource` that checks the shape of every tensor, because kernels read by address."""

    def __init__(self, source: WeightSource, architecture: str) -> None:
        self._source = source
        self._architecture = architecture

    def has(self, name: str) -> bool:
        """Return whether the file has this tensor."""
        return self._source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first. Raises: CorruptFileError if it is not in the file."""
        if not self._source.has(name):
            raise CorruptFileError(
                f"{name} is not in the file; the architecture {self._architecture!r} needs it. {_WAY_OUT}"
            )
        return self._source.shape(name)

    def linear(self, name: str, num_rows: int, num_columns: int, rows: slice | None = None) -> LinearWeight:
        """A matrix of this whole shape, or some of its rows; one row may be stored as a vector."""
        shapes: tuple[tuple[int, ...], ...] = ((num_rows, num_columns),)
        if num_rows == 1:
            shapes += ((num_columns,),)
        self._check(name, shapes)
        return self._source.linear(name, rows)

    def experts(
        self, name: str, num_experts: int, num_rows: int, num_columns: int, rows: slice | None = None
    ) -> LinearWeight:
        """A stack of matrices of this whole shape, or the same rows of each; a stack of one may be a plain matrix."""
        shapes: tuple[tuple[int, ...], ...] = ((num_experts, num_rows, num_columns),)
        if num_experts == 1:
            shapes += ((num_rows, num_columns),)
        self._check(name, shapes)
        return self._source.linear(name, rows)

    def embedding(self, name: str, num_rows: int, width: int) -> EmbeddingTable:
        """A table of this shape."""
        self._check(name, ((num_rows, width),))
        return self._source.embedding(name)

    def squeezed_vector(self, name: str, *shape: int) -> FloatArray:
        """A small tensor of this shape, which a file may store with further axes of length 1."""
        found = tuple(size for size in self.shape(name) if size != 1)
        if found != tuple(size for size in shape if size != 1):
            self._check(name, (shape,))
        return self._source.vector(name).reshape(shape)

    def vector(self, name: str, *shapes: tuple[int, ...]) -> FloatArray:
        """A small tensor of one of these shapes."""
        self._check(name, shapes)
        return self._source.vector(name)

    def optional_vector(self, name: str, *shapes: tuple[int, ...]) -> FloatArray | None:
        """A small tensor of one of these shapes, or None if the file lacks it."""
        return self.vector(name, *shapes) if self._source.has(name) else None

    def _check(self, name: str, shapes: tuple[tuple[int, ...], ...]) -> None:
        found = self.shape(name)
        if tuple(found) not in shapes:
            wanted = " or ".join(str(shape) for shape in shapes)
            raise CorruptFileError(f"{name} has shape {tuple(found)}; the rest of the file wants {wanted}. {_WAY_OUT}")


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
        """Return whether there is such a tensor."""
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
        """Find the tensor and the elements of it that these are; None if they are of none."""
        address = values.ctypes.data
        for first, name, whole in self._vectors:
            if first <= address < first + whole.nbytes:
                return VectorPart(name, (address - first) // 4, values.size)
        return None

    def _count(self, name: str) -> None:
        self.uses[name] = self.uses.get(name, 0) + 1
