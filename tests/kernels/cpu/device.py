"""The CPU as a device of the architecture tests: float32 weights, a tape and cache pages."""

from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.lower import lower_to_cpu
from localinfer.kernels.cpu.memory import Arena, address
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.cpu.weights import RowTable, pack
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import Layout
from localinfer.kernels.ops import EmbeddingTable, KVLayerShape, LinearWeight, OpGraph, StateShape
from localinfer.models.load.loader import open_model_file
from localinfer.quant.formats.dequantize import dequantize
from localinfer.types import FloatArray


class DecodedWeights:
    """`WeightSource` over a GGUF file or a folder: every tensor decoded by the oracle, so that only kernels differ.

    pack_floats: brings float32 rows to the device: bytes, matrices, rows and columns.
    """

    def __init__(self, path: Path, pack_floats: Callable[[NDArray[np.uint8], int, int, int], Any]) -> None:
        self._pack_floats = pack_floats
        with closing(open_model_file(path)) as file:
            self._tensors = {
                name: dequantize(file.tensor_bytes(name), info.type, info.shape) for name, info in file.tensors.items()
            }

    def has(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        values = np.atleast_2d(self._tensors[name])
        if rows is not None:
            values = values[..., rows, :]
        num_experts = values.shape[0] if values.ndim == 3 else 1
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        packed = self._pack_floats(data, num_experts, values.shape[-2], values.shape[-1])
        return LinearWeight(name, values.shape[-2], values.shape[-1], packed, num_experts)

    def embedding(self, name: str) -> EmbeddingTable:
        linear = self.linear(name)
        return EmbeddingTable(name, linear.num_rows, linear.num_columns, linear.packed)

    def vector(self, name: str) -> FloatArray:
        return self._tensors[name]


class CpuWeights(DecodedWeights):
    """Weights in tiles; tables as the rows they are."""

    def __init__(self, pool: ThreadPool, path: Path) -> None:
        super().__init__(path, lambda *matrices: pack(pool, Layout.F32, *matrices))

    def embedding(self, name: str) -> EmbeddingTable:
        values = np.ascontiguousarray(self._tensors[name])
        num_rows, width = values.shape
        packed = RowTable(Layout.F32, num_rows, width, values.reshape(-1).view(np.uint8))
        return EmbeddingTable(name, num_rows, width, packed)


class CpuDevice:
    """A device of `num_threads`; each model gets a pool of its own, which its program closes."""

    def __init__(self, num_threads: int, kv_type: str = "f32") -> None:
        self._num_threads = num_threads
        self._kv_type = kv_type
        self._pool: ThreadPool | None = None
        self._pages: list[NDArray[np.uint8]] = []

    def weights(self, path: Path) -> CpuWeights:
        return CpuWeights(self.new_pool(), path)

    def new_pool(self) -> ThreadPool:
        """The pool of the next program."""
        self._pool = ThreadPool(self._num_threads)
        return self._pool

    def program(self, graph: OpGraph, max_rows: int) -> CpuProgram:
        assert self._pool is not None, "weights come first"
        layout = KVLayout(self._kv_type, graph.kv_layers, graph.states)
        return lower_to_cpu(graph, self._pool, layout, max_batch_rows=max_rows, max_output_rows=max_rows)

    def pages(self, layers: Sequence[KVLayerShape], num_positions: int) -> NDArray[np.int64]:
        layout = KVLayout(self._kv_type, layers)
        count = -(-num_positions // layout.page_tokens)
        return np.array(self._pieces(count, layout.page_bytes), np.int64)

    def states(self, shapes: Sequence[StateShape], count: int) -> list[int]:
        size = KVLayout(self._kv_type, [], shapes).state_bytes
        return self._pieces(count, size)

    def _pieces(self, count: int, num_bytes: int) -> list[int]:
        """Pages or states, each by itself, full of NaN: they hold whatever was in them before."""
        pieces = [Arena(0).take(num_bytes) for _ in range(count)]
        for piece in pieces:
            piece[:] = 255
        self._pages += pieces
        return [address(piece) for piece in pieces]
