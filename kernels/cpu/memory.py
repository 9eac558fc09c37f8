"""The memory of one tape: its buffers, and copies of the constants that its ops point to."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.arrays import address, aligned, aligned_zeros
from localinfer.kernels.cpu.weights import RowTable
from localinfer.kernels.ops import Buffer, FloatArray, Rows


def padded(width: int) -> int:
    """Columns of a row in memory: whole vectors of sixteen."""
    return (width + 15) // 16 * 16


class TapeMemory:
    """Hands out addresses, and keeps what lies there alive as long as itself.

    buffers: uint8[...] of each, by its index. fills: called with the ids of every batch before it runs, so that their
    rows are in the tables.
    """

    def __init__(self, max_rows: dict[Rows, int], buffers: Sequence[Buffer]) -> None:
        self._max_rows = max_rows
        self.buffers: list[NDArray[np.uint8]] = []
        self._kept: list[Any] = []
        self.fills: list[Callable[[NDArray[np.int32]], None]] = []
        self._shared: dict[str, NDArray[np.uint8]] = {}
        self._zeros = aligned_zeros(64).view(np.float32)
        self.keep(self._zeros)
        for buffer in buffers:
            self.buffer(buffer.name, buffer.width, buffer.rows)

    def buffer(self, name: str, width: int, rows: Rows) -> Buffer:
        """Reserve rows x width float32, each row padded to whole vectors."""
        self.buffers.append(aligned_zeros(self._max_rows[rows] * padded(width) * 4))
        return Buffer(len(self.buffers) - 1, name, width, rows)

    def place(self, buffer: Buffer) -> tuple[int, int]:
        """Address and row stride of a buffer."""
        return address(self.buffers[buffer.index]), 4 * padded(buffer.width)

    def rows(self, buffer: Buffer) -> FloatArray:
        """A buffer as float32[rows, width]."""
        values = self.buffers[buffer.index].view(np.float32)
        return values.reshape(self._max_rows[buffer.rows], -1)[:, : buffer.width]

    def keep_table(self, rows: RowTable, *, by_position: bool) -> None:
        """Hold a table, and have its rows there in time: those of positions, which are few, now."""
        self.keep(rows)
        if rows.fill is not None and by_position:
            rows.fill(np.arange(rows.num_rows, dtype=np.int32))
        elif rows.fill is not None:
            self.fills.append(rows.fill)

    def constant(self, values: FloatArray | None) -> int:
        """Address of a padded copy of float32 values; 0 for None."""
        if values is None:
            return 0
        copy = aligned_zeros(4 * padded(values.size)).view(np.float32)
        copy[: values.size] = values.reshape(-1)
        self.keep(copy)
        return address(copy)

    def zeros(self, width: int) -> int:
        """Address of at least `width` zeros, which nobody writes."""
        if self._zeros.size < padded(width):
            self._zeros = aligned_zeros(4 * padded(width)).view(np.float32)
            self.keep(self._zeros)
        return address(self._zeros)

    def shared(self, name: str, num_bytes: int) -> int:
        """Address of at least `num_bytes`, the same for all who ask by this name until one of them asks for more."""
        if name not in self._shared or self._shared[name].size < num_bytes:
            self._shared[name] = aligned(num_bytes)
            self.keep(self._shared[name])
        return address(self._shared[name])

    def keep(self, *things: Any) -> None:
        """Keep what an op's parameters point to."""
        self._kept.extend(things)
