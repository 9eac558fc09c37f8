"""Inputs with their columns in another order, as weights want them whose columns were sorted by group."""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.arrays import address
from localinfer.kernels.cpu.memory import TapeMemory, check
from localinfer.kernels.ops import Buffer, Rows


class OrderedInputs:
    """Which input was gathered last, and in which order: weights that agree share one gather."""

    def __init__(self, memory: TapeMemory) -> None:
        self._memory = memory
        self._buffers: dict[tuple[Rows, int], Buffer] = {}
        self._source: tuple[int, bytes] | None = None

    def find(self, x: Buffer, columns: NDArray[np.int32]) -> tuple[Buffer, tuple[int, ...] | None]:
        """Return the buffer for x in this order, and the parameters of the gather that has yet to fill it, if any.

        columns: int32[width of x], which column comes where. Raises: ShapeError if one is not a column of x.
        """
        check(columns.size == x.width, f"an order of {columns.size} columns does not fit {x.name}, {x.width} wide")
        check(int(columns.min()) >= 0 and int(columns.max()) < x.width, f"an order leaves the columns of {x.name}")
        key = (x.rows, x.width)
        if key not in self._buffers:
            self._buffers[key] = self._memory.buffer(f"ordered {x.width}", x.width, x.rows)
        out, source = self._buffers[key], (x.index, columns.tobytes())
        if self._source == source:
            return out, None
        self._source = source
        offsets = 4 * columns.astype(np.int64)
        self._memory.keep(offsets)
        places = (*self._memory.place(out), *self._memory.place(x))
        return out, (*places, address(offsets), x.width, int(x.rows is Rows.OUTPUT))

    def forget(self, written: Buffer) -> None:
        """Gather an input again after it changed."""
        if self._source is not None and self._source[0] == written.index:
            self._source = None
