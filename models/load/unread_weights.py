"""Weights of a model file that are not read, for graphs that are written but not run: only kinds and sizes are true."""

import mmap
from types import SimpleNamespace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.weights import PackedWeight, RowTable
from localinfer.kernels.layouts import Layout, num_tiles, stored_row_bytes, tile_bytes
from localinfer.kernels.ops import EmbeddingTable, LinearWeight
from localinfer.models.load.weights import CpuWeights
from localinfer.quant.checkpoint.groups import kernel_layout
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.pipeline.conversion import layout_of, runs_directly

NO_POOL = cast(ThreadPool, SimpleNamespace(num_threads=1, max_threads=1, control_address=0))
"""What lowering asks of a pool; no thread is started, which would take compiled kernels."""


class UnreadWeights(CpuWeights):
    """Weights with the sizes and layouts of a file's, in memory that nobody ever touches, so that it takes none."""

    def __init__(self, file: ModelFile) -> None:
        super().__init__(file, NO_POOL)
        self._memory: NDArray[np.uint8] = np.empty(0, np.uint8)

    def _load_linear(self, name: str, rows: slice | None) -> LinearWeight:
        info = self._file.tensor(name)
        experts, num_rows, num_columns = (1,) * (3 - len(info.shape)) + info.shape
        columns = None
        if rows is not None:
            num_rows = len(range(*rows.indices(num_rows)))
        grouped = self._file.grouped(name)
        if grouped is None:
            layout = layout_of(info.type)
        elif len(grouped) == 1 and not grouped[0].is_in_order:
            columns, ordered = grouped[0].in_group_order()
            layout = kernel_layout([ordered])
            columns = None if layout is Layout.F32 else columns
        else:
            layout = kernel_layout(grouped)
        data = self._untouched(experts * num_tiles(num_rows) * tile_bytes(layout, num_columns))
        packed = PackedWeight(layout, num_rows, num_columns, experts, data, columns)
        return LinearWeight(name, num_rows, num_columns, packed, experts)

    def _load_embedding(self, name: str) -> EmbeddingTable:
        info = self._file.tensor(name)
        num_rows, width = info.shape
        layout = layout_of(info.type)
        num_bytes = info.num_bytes if runs_directly(info.type) else num_rows * stored_row_bytes(layout, width)
        return EmbeddingTable(name, num_rows, width, RowTable(layout, num_rows, width, self._untouched(num_bytes)))

    def _untouched(self, num_bytes: int) -> NDArray[np.uint8]:
        if num_bytes > self._memory.size:
            self._memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
        return self._memory[:num_bytes]
