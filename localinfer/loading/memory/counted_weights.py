"""Weights without data, which count what those of a loaded model take on the CPU."""

from localinfer.kernels.layouts import num_tiles, stored_row_bytes, tile_bytes
from localinfer.kernels.ops import EmbeddingTable, LinearWeight
from localinfer.models.decoder.shape_weights import ShapeWeights
from localinfer.models.load.weights import named_tensor
from localinfer.quant.checkpoint.groups import kernel_layout
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.pipeline.conversion import layout_of, runs_directly
from localinfer.types import FloatArray

_TABLE_BYTES = 32 << 20
"""Of an embedding table whose rows are read on demand: those of some thousand different tokens."""


class CountedWeights(ShapeWeights):
    """Weights without data, which count the bytes that a device's weights of the same requests take."""

    def __init__(self, file: ModelFile) -> None:
        super().__init__({name: tensor.shape for name, tensor in file.tensors.items()})
        self._file = file
        self._matrices: dict[tuple[str, tuple[int, int] | None], LinearWeight] = {}
        self._tables: set[str] = set()
        self._vectors_by_name: dict[str, int] = {}

    def linear(self, name: str, rows: slice | None = None) -> LinearWeight:
        """Note a matrix, or the part of it, which is packed once."""
        found = super().linear(name, rows)
        part = None if rows is None else (found.packed, found.packed + found.num_rows)
        self._matrices[name, part] = found
        return found

    def embedding(self, name: str) -> EmbeddingTable:
        """Note a table."""
        self._tables.add(name)
        return super().embedding(name)

    def vector(self, name: str) -> FloatArray:
        """Count a vector, of which kernels read a copy."""
        values = super().vector(name)
        self._vectors_by_name[name] = 2 * values.nbytes
        return values

    def num_bytes(self) -> int:
        """Bytes of all that was requested."""
        return (
            sum(self._vectors_by_name.values())
            + sum(self._matrix_bytes(name, part) for name, part in self._matrices)
            + sum(map(self._table_bytes, self._tables))
        )

    def _matrix_bytes(self, name: str, part: tuple[int, int] | None) -> int:
        weight, tensor = self._matrices[name, part], self._file.tensor(name)
        if part is not None and not part[0] and (name, None) in self._matrices and weight.num_experts == 1:
            # The first rows of a matrix that is packed whole are taken from it.
            return 0
        with named_tensor(name):
            grouped = self._file.grouped(name)
            if grouped is None:
                layout = layout_of(tensor.type)
            elif len(grouped) == 1 and not grouped[0].is_in_order:
                layout = kernel_layout([grouped[0].in_group_order()[1]])
            else:
                layout = kernel_layout(grouped)
        return num_tiles(weight.num_rows) * tile_bytes(layout, weight.num_columns) * weight.num_experts

    def _table_bytes(self, name: str) -> int:
        tensor = self._file.tensor(name)
        if not runs_directly(tensor.type):
            # Converted once; a tied output matrix is packed from it, and counted beside it.
            with named_tensor(name):
                layout = layout_of(tensor.type)
            return tensor.shape[0] * stored_row_bytes(layout, tensor.shape[1])
        return min(tensor.num_bytes, _TABLE_BYTES)
