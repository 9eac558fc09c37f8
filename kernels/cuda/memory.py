"""A device's memory: buffers and constants of a tape, and pages of keys and values that lie on one device.

A page has the same bytes on every device, so that stored pages can be restored anywhere: `read` and `write` copy it.
"""

from collections.abc import Callable, Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import Buffer, Rows
from localinfer.types import FloatArray

_BLOCK_BYTES = 256
"""Buffers begin at multiples of it."""

SMALL_ROWS = 16
"""Batches of up to this many rows are run as captured graphs, padded to a power of two."""


class SharedMemory:
    """Memory shared by the programs of one device, of which one runs at a time: buffers, scratch and constants.

    scratch: address and bytes, by name. constants: addresses, by type and bytes.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._blocks: list[tuple[int, int]] = []
        self.scratch: dict[str, tuple[int, int]] = {}
        self.constants: dict[tuple[str, bytes], int] = {}

    def allocator(self) -> Callable[[int], int]:
        """A function for one program that gives the address of so many bytes: of blocks that another one has, as far as
        this one has not taken them."""
        free = list(self._blocks)

        def take(num_bytes: int) -> int:
            size = -(-num_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
            fitting = [block for block in free if block[1] >= size]
            if not fitting:
                block = self._device.allocate(size), size
                self._blocks.append(block)
                return block[0]
            block = min(fitting, key=lambda one: one[1])
            free.remove(block)
            if block[1] > size:
                free.append((block[0] + size, block[1] - size))
            return block[0]

        return take


class DeviceMemory:
    """The buffers and constants of one tape on the device. shared: with other tapes; None for none."""

    def __init__(
        self,
        device: CudaDevice,
        max_rows: dict[Rows, int],
        buffers: Sequence[Buffer],
        shared: SharedMemory | None = None,
    ) -> None:
        self.device = device
        self.max_rows = max_rows
        self._places: list[int] = []
        self._counters = (0, 0)
        shared = SharedMemory(device) if shared is None else shared
        self._take = shared.allocator()
        self._shared, self._constants = shared.scratch, shared.constants
        for buffer in buffers:
            self.buffer(buffer.name, buffer.width, buffer.rows)

    def buffer(self, name: str, width: int, rows: Rows) -> Buffer:
        """Allocate rows x width float32."""
        count = max(self.max_rows[rows], SMALL_ROWS)
        self._places.append(self._take(count * _stride(width)))
        return Buffer(len(self._places) - 1, name, width, rows)

    def address_of(self, buffer: Buffer) -> tuple[int, int]:
        """Address and row stride of a buffer."""
        return self._places[buffer.index], _stride(buffer.width)

    def constant(self, values: FloatArray | None) -> int:
        """Address of float32 values; 0 for None."""
        return 0 if values is None else self.array(np.ascontiguousarray(values, np.float32))

    def array(self, values: NDArray[np.generic]) -> int:
        """Address of a copy of an array; equal arrays share one."""
        key = (values.dtype.str, values.tobytes())
        if key not in self._constants:
            address = self.device.allocate(values.nbytes)
            self.device.write(address, values)
            self._constants[key] = address
        return self._constants[key]

    def max_input_bytes(self, width: int) -> int:
        """Bytes of the most rows of `width` numbers that a library GEMM reads."""
        return 4 * width * max(self.max_rows.values())

    def shared(self, name: str, num_bytes: int) -> int:
        """Address of at least `num_bytes`, shared by name; moves when a larger size is requested."""
        if name not in self._shared or self._shared[name][1] < num_bytes:
            self._shared[name] = (self.device.allocate(num_bytes), num_bytes)
        return self._shared[name][0]

    def counters(self, count: int) -> int:
        """Address of at least so many uint32 that are 0 between kernels, see `compiled.last_block`; shared by all."""
        if self._counters[1] < count:
            self._counters = (self.device.allocate(4 * count), count)
            self.device.write(self._counters[0], np.zeros(count, np.uint32))
        return self._counters[0]


def _stride(width: int) -> int:
    """Bytes of a row, padded to sixteen for vector loads."""
    return -(-width // 4) * 16


def most_page_bytes(device: CudaDevice, spare: int) -> int:
    """Bytes of a device's memory that pages may take."""
    free = device.free_bytes()
    return max(free - spare, free // 2)


class DeviceKVLayout(KVLayout):
    """A page layout whose pages are in a device's memory.

    device_kind: part of the layout's repr, and so of the key of stored pages: another kind may round differently.
    """

    device: CudaDevice = field(kw_only=True, repr=False, compare=False)
    device_kind: str = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "device_kind", "sm_{}{}".format(*self.device.capability))

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a page in host memory: none."""
        return 0

    def free_pages(self, spare: int) -> int:
        """Pages for which the device has memory, where `spare` bytes, or half of the free memory, stay free."""
        return most_page_bytes(self.device, spare) // self.page_bytes

    def allocate(self, num_bytes: int) -> int:
        """Allocate pages; returns the address, or name, of the first. Raises: OutOfMemoryError, MemoryError."""
        return self.device.allocate(num_bytes)

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Copy from one address to another, after every step so far."""
        self.device.copy(source, target, num_bytes)

    def read(self, page: int, out: NDArray[np.uint8]) -> None:
        """Copy a page, after every step so far, into uint8[page_bytes] on the host."""
        self.device.read(page, out)

    def write(self, page: int, data: NDArray[np.uint8]) -> None:
        """Fill a page with uint8[page_bytes]."""
        self.device.write(page, data)
