"""Weights of a model file for a CUDA device: the same tensors and conversions as on the CPU, packed as planes."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.pool import ThreadPool
from localinfer.kernels.cuda.device import Device
from localinfer.kernels.cuda.planes import DeviceWeight, upload
from localinfer.kernels.jit.compile_ahead import ProgressCallback
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import EmbeddingTable, LinearWeight
from localinfer.models.load.weights import CpuWeights
from localinfer.quant.checkpoint.model_file import ModelFile


class CudaWeights(CpuWeights):
    """A `WeightSource` over a model file whose matrices go to a device; one that is both a table and a matrix once."""

    def __init__(
        self, file: ModelFile, pool: ThreadPool, device: Device, progress: ProgressCallback | None = None
    ) -> None:
        super().__init__(file, pool, progress)
        self._device = device
        self._whole: dict[str, LinearWeight] = {}

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """Move a matrix to the device; see `CpuWeights.linear`."""
        if rows is not None:
            return super().linear(name, rows)
        if name not in self._whole:
            self._whole[name] = super().linear(name)
        return self._whole[name]

    def embedding(self, name: str) -> EmbeddingTable:
        """Move a table to the device."""
        table = self.linear(name)
        return EmbeddingTable(name, table.num_rows, table.num_columns, table.packed)

    def _pack(
        self,
        layout: Layout,
        data: NDArray[np.uint8],
        num_experts: int,
        num_rows: int,
        num_columns: int,
        done: Callable[[int, int], None] | None = None,
    ) -> DeviceWeight:
        return upload(self._device, layout, data, num_experts, num_rows, num_columns, done)
