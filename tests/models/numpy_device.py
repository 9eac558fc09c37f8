"""The NumPy oracle as a device of the architecture tests."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import KVLayerShape, OpGraph, StateShape
from localinfer.types import FloatArray
from tests.support.oracle import NumpyProgram, NumpyWeights
from tests.support.oracle_formulas import Float64Array


class ArrayWeights(NumpyWeights):
    """The same over tensors in memory, by their names."""

    def __init__(self, tensors: Mapping[str, FloatArray]) -> None:
        self._arrays = {name: np.array(values, np.float64) for name, values in tensors.items()}
        self.shapes = {name: values.shape for name, values in self._arrays.items()}

    def _values(self, name: str) -> Float64Array:
        return self._arrays[name]


class NumpyDevice:
    """A page is only a name for a sequence here; `kv_type` says what the cache rounds."""

    def __init__(self, kv_type: str | None = None) -> None:
        self._kv_type = kv_type
        self._names = itertools.count(1)

    def weights(self, path: Path) -> NumpyWeights:
        return NumpyWeights(path)

    def program(self, graph: OpGraph, max_rows: int) -> NumpyProgram:
        return NumpyProgram(graph, max_rows, max_rows, kv_type=self._kv_type)

    def pages(self, layers: Sequence[KVLayerShape], num_positions: int) -> NDArray[np.int64]:
        return np.array([1], dtype=np.int64)

    def states(self, shapes: Sequence[StateShape], count: int) -> list[int]:
        return list(itertools.islice(self._names, count))
