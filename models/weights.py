"""Weights of a model file for the CPU: packed into tiles straight from the map, one tensor at a time.

What a tensor's type is run as is decided in `quant/conversion.py`. After packing, the file's pages are given back to
the system, so loading needs little more memory than the packed weights themselves.
"""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.compile_ahead import ProgressCallback
from localinfer.kernels.cpu.arrays import Arena
from localinfer.kernels.cpu.layouts import Layout
from localinfer.kernels.cpu.packing import RowTable, pack
from localinfer.kernels.cpu.pool import ThreadPool
from localinfer.kernels.ops import EmbeddingTable, FloatArray, LinearWeight
from localinfer.quant.conversion import conversion_note, convert, layout_of, runs_directly
from localinfer.quant.formats import TensorType, row_bytes
from localinfer.quant.model_file import ModelFile
from localinfer.quant.reference import dequantize


class CpuWeights:
    """A `WeightSource` over a model file. `notes` says, per tensor type that no kernel runs directly, what it runs
    as."""

    def __init__(self, file: ModelFile, pool: ThreadPool, progress: ProgressCallback | None = None) -> None:
        self._file = file
        self._pool = pool
        self._progress = progress
        self._arena = Arena()
        self._done_bytes = 0
        self.notes: dict[TensorType, str] = {}

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor."""
        return name in self._file.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first."""
        return self._file.tensor(name).shape

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """Pack a matrix [rows, columns], a stack of them, or some rows of either; a vector is a matrix of one row."""
        info = self._file.tensor(name)
        experts, num_rows, num_columns = (1,) * (3 - len(info.shape)) + info.shape
        data = self._file.tensor_bytes(name)
        if rows is not None:
            matrix = data.reshape(experts, num_rows, -1)[:, rows]
            num_rows, data = matrix.shape[1], np.ascontiguousarray(matrix).reshape(-1)
        layout, data = self._runnable(info.type, data, (experts, num_rows, num_columns))
        done = None if rows is not None else lambda first, end: self._file.forget(name, first, end)
        packed = pack(self._pool, layout, data, experts, num_rows, num_columns, arena=self._arena, done=done)
        self._report(info.num_bytes if rows is None else data.size)
        return LinearWeight(name, num_rows, num_columns, packed, experts)

    def embedding(self, name: str) -> EmbeddingTable:
        """A table read where it lies in the file, or converted if no kernel reads its type."""
        info = self._file.tensor(name)
        num_rows, width = info.shape
        layout, data = self._runnable(info.type, self._file.tensor_bytes(name), info.shape)
        return EmbeddingTable(name, num_rows, width, RowTable(layout, num_rows, width, data))

    def vector(self, name: str) -> FloatArray:
        """A small tensor as float32, in its own shape."""
        info = self._file.tensor(name)
        return dequantize(self._file.tensor_bytes(name), info.type, info.shape)

    def _runnable(
        self, type: TensorType, data: NDArray[np.uint8], shape: tuple[int, ...]
    ) -> tuple[Layout, NDArray[np.uint8]]:
        if runs_directly(type):
            assert data.size == np.prod(shape[:-1], dtype=np.int64) * row_bytes(type, shape[-1]), (
                "the reader checks this"
            )
            return layout_of(type), data
        self.notes[type] = conversion_note(type)
        return convert(data, type, shape)

    def _report(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress("loading weights (MB)", self._done_bytes >> 20, self._file.num_bytes >> 20)
