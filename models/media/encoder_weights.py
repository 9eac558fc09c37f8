"""Tensors of an encoder: found by name, checked by shape, packed for kernels.

Matrices stay in the type of the file. Kernels of convolutions become matrices of patches; they and whatever lies the
other way round in the file become float32, which holds their numbers as they are.
"""

from math import prod

import numpy as np

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.weights import PackedWeight, pack
from localinfer.kernels.layouts import Layout, num_tiles, tile_bytes
from localinfer.kernels.ops import LinearWeight
from localinfer.models.load.weights import CpuWeights, UnreadWeights
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.types import FloatArray, ProgressCallback

_WAY_OUT = "convert the model's mmproj file again, or download another copy"


class EncoderWeights:
    """The tensors of a file, for the graphs of its encoders.

    file: an mmproj file, or whatever else has tensors of these names. pool: None to leave matrices unread, for sizes
    and kernels alone.
    """

    def __init__(self, file: ModelFile, pool: ThreadPool | None, progress: ProgressCallback | None = None) -> None:
        self._file = file
        self._pool = pool
        self._source = UnreadWeights(file) if pool is None else CpuWeights(file, pool, progress)
        self._packed: dict[str, LinearWeight] = {}

    @property
    def is_read(self) -> bool:
        """False if matrices have sizes alone."""
        return self._pool is not None

    def close(self) -> None:
        """Give up every weight; those that programs hold stay alive with them."""
        self._source.close()
        self._packed.clear()

    def has(self, name: str) -> bool:
        """True if the file holds this tensor."""
        return self._source.has(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, rows first. Raises: CorruptFileError if it is missing."""
        if not self._source.has(name):
            raise CorruptFileError(
                f"{self._file.path.name} has no tensor {name!r}, which its kind of encoder needs: {_WAY_OUT}"
            )
        return self._source.shape(name)

    def check(self, name: str, *shape: int) -> None:
        """Raise CorruptFileError unless a tensor has this shape, sides of 1 left aside."""
        found = self.shape(name)
        if [side for side in found if side != 1] != [side for side in shape if side != 1]:
            raise CorruptFileError(
                f"{self._file.path.name}: tensor {name!r} is {list(found)}; wanted {list(shape)}, as the rest of the "
                f"file says: {_WAY_OUT}"
            )

    def width_of(self, name: str) -> int:
        """Rows of a matrix: the width of its results."""
        shape = self.shape(name)
        if len(shape) != 2:
            raise CorruptFileError(
                f"{self._file.path.name}: tensor {name!r} is {list(shape)}; wanted a matrix: {_WAY_OUT}"
            )
        return shape[0]

    def linear(self, name: str, num_rows: int, num_columns: int, rows: slice | None = None) -> LinearWeight:
        """A matrix of this shape, or some of its rows, in the type of the file."""
        self.check(name, num_rows, num_columns)
        if len(self.shape(name)) != 2:
            part = rows or slice(None)
            return self.matrix(f"{name} {part}", self.values(name, num_rows, num_columns)[part])
        return self._source.linear(name, rows)

    def values(self, name: str, *shape: int) -> FloatArray:
        """A tensor of this shape as float32."""
        self.check(name, *shape)
        return self._source.vector(name).reshape(shape)

    def optional(self, name: str, *shape: int) -> FloatArray | None:
        """The same, or None if the file lacks it."""
        return self.values(name, *shape) if self.has(name) else None

    def number(self, name: str, default: float) -> float:
        """A tensor of one number."""
        return float(self.values(name, 1)[0]) if self.has(name) else default

    def matrix(self, name: str, values: FloatArray) -> LinearWeight:
        """A float32 matrix, or a stack of them, made of tensors; `name` says of which, and is of one matrix only."""
        if name not in self._packed:
            self._packed[name] = self.own_matrix(name, values)
        return self._packed[name]

    def own_matrix(self, name: str, values: FloatArray) -> LinearWeight:
        """The same, which only the graph that has it keeps."""
        rows = np.ascontiguousarray(values, np.float32)
        experts = prod(rows.shape[:-2])
        num_rows, num_columns = rows.shape[-2:]
        if self._pool is None:
            data = np.empty(experts * num_tiles(num_rows) * tile_bytes(Layout.F32, num_columns), np.uint8)
            unread = PackedWeight(Layout.F32, num_rows, num_columns, experts, data)
            return LinearWeight(name, num_rows, num_columns, unread, experts)
        packed = pack(self._pool, Layout.F32, rows.reshape(-1).view(np.uint8), experts, num_rows, num_columns)
        return LinearWeight(name, num_rows, num_columns, packed, experts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all matrices that were packed so far."""
        found = {id(weight.packed): weight.packed.data.nbytes for weight in self._packed.values()}
        return int(sum(found.values())) + self._source.packed_bytes

    def check_asked(self, prefix: str, num_layers: int) -> None:
        """Raise UnsupportedFormatError if blocks that are computed have tensors that no graph looked for."""
        for name in self._file.tensors:
            parts = name.split(".")
            is_of_block = parts[:2] == [prefix, "blk"] and len(parts) > 3 and parts[2].isdecimal()
            if is_of_block and int(parts[2]) < num_layers and name not in self._source.asked:
                raise UnsupportedFormatError(
                    f"{self._file.path.name} has {name:.80}, which its kind of encoder is computed without here, so "
                    "that its embeddings would be wrong: update localinfer, or choose another model"
                )
