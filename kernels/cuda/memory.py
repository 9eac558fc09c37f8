"""The memory of one CUDA tape: its buffers and constants, reserved once on the device."""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.memory import check
from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.ops import Buffer, FloatArray, Rows

SMALL_ROWS = 16
"""Batches of up to this many rows are computed by captured graphs, padded to a power of two; buffers hold as many."""


class DeviceMemory:
    """Hands out addresses on a device."""

    def __init__(self, device: CudaDevice, max_rows: dict[Rows, int]) -> None:
        self.device = device
        self.max_rows = max_rows
        self._places: list[int] = []
        self._shared: dict[str, tuple[int, int]] = {}
        self._constants: dict[tuple[str, bytes], int] = {}

    def buffer(self, name: str, width: int, rows: Rows) -> Buffer:
        """Reserve rows x width float32."""
        check(width > 0, f"buffer {name} is {width} wide; a buffer has at least one column")
        count = max(self.max_rows[rows], SMALL_ROWS)
        self._places.append(self.device.allocate(count * _stride(width)))
        return Buffer(len(self._places) - 1, name, width, rows)

    def place(self, buffer: Buffer) -> tuple[int, int]:
        """Address and row stride of a buffer."""
        return self._places[buffer.index], _stride(buffer.width)

    def constant(self, values: FloatArray | None, width: int, name: str) -> int:
        """Address of float32 values; 0 for None."""
        if values is None:
            return 0
        check(values.size == width, f"{name} has {values.size} values; {width} are needed")
        return self.array(np.ascontiguousarray(values, np.float32))

    def array(self, values: NDArray[np.generic]) -> int:
        """Address of a copy of an array; equal arrays share one."""
        key = (values.dtype.str, values.tobytes())
        if key not in self._constants:
            address = self.device.allocate(values.nbytes)
            self.device.write(address, values)
            self._constants[key] = address
        return self._constants[key]

    def max_input_bytes(self, width: int) -> int:
        """Bytes of the most rows of `width` numbers that a library's product may take."""
        return 4 * width * max(self.max_rows.values())

    def shared(self, name: str, num_bytes: int) -> int:
        """Address of at least `num_bytes`, the same for all who ask by this name until one of them asks for more."""
        if name not in self._shared or self._shared[name][1] < num_bytes:
            self._shared[name] = (self.device.allocate(num_bytes), num_bytes)
        return self._shared[name][0]


def _stride(width: int) -> int:
    """Bytes of a row: whole units of sixteen bytes, so that every row can be read in such."""
    return -(-width // 4) * 16
