"""A device's memory: buffers and constants of a tape, and pages of keys and values, wholly or partly on the device.

A page has the same bytes on every device, so that stored pages can be restored anywhere: `read` and `write` copy it.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import OutOfMemoryError
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import Buffer, KVLayerShape, Rows
from localinfer.types import FloatArray

Addresses = NDArray[np.int64]

SMALL_ROWS = 16
"""Batches of up to this many rows are run as captured graphs, padded to a power of two."""


class DeviceMemory:
    """The buffers and constants of one tape on the device."""

    def __init__(self, device: CudaDevice, max_rows: dict[Rows, int], buffers: Sequence[Buffer]) -> None:
        self.device = device
        self.max_rows = max_rows
        self._places: list[int] = []
        self._shared: dict[str, tuple[int, int]] = {}
        self._constants: dict[tuple[str, bytes], int] = {}
        for buffer in buffers:
            self.buffer(buffer.name, buffer.width, buffer.rows)

    def buffer(self, name: str, width: int, rows: Rows) -> Buffer:
        """Allocate rows x width float32."""
        count = max(self.max_rows[rows], SMALL_ROWS)
        self._places.append(self.device.allocate(count * _stride(width)))
        return Buffer(len(self._places) - 1, name, width, rows)

    def place(self, buffer: Buffer) -> tuple[int, int]:
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


def _stride(width: int) -> int:
    """Bytes of a row, padded to sixteen for vector loads."""
    return -(-width // 4) * 16


@dataclass(frozen=True)
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
    def device_page_bytes(self) -> int:
        """Bytes of a page on the device."""
        return self.page_bytes

    def free_bytes(self) -> int:
        """Free memory on the device."""
        return self.device.free_bytes()

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


class PagePlaces:
    """Addresses of the two parts of pages, by the name of the page."""

    def __init__(self) -> None:
        self._names, self._hosts, self._devices = (np.zeros(0, np.int64) for _ in range(3))
        self._memory: list[NDArray[np.uint8]] = []
        self._next_name = 1 << 20

    def add(self, num_bytes: int, host: NDArray[np.uint8], device: int) -> int:
        """Register a slab of this many bytes in total; return the name of its first page."""
        name = self._next_name
        self._next_name += num_bytes
        self._names = np.append(self._names, name)
        self._hosts = np.append(self._hosts, address(host))
        self._devices = np.append(self._devices, device)
        self._memory.append(host)
        return name

    def find(self, names: Addresses, sizes: tuple[int, int]) -> tuple[Addresses, Addresses]:
        """Host and device addresses of pages. sizes: bytes of a page on each side."""
        slabs = np.searchsorted(self._names, names, side="right") - 1
        index = (names - self._names[slabs]) // sum(sizes)
        return self._hosts[slabs] + index * sizes[0], self._devices[slabs] + index * sizes[1]


@dataclass(frozen=True)
class SplitKVLayout(DeviceKVLayout):
    """Pages whose first `num_host_layers` layers are in host memory and the others on a device.

    A page's address is a name for both parts (`places`).
    """

    num_host_layers: int = field(kw_only=True)
    _slabs: PagePlaces = field(default_factory=PagePlaces, init=False, repr=False, compare=False)

    @property
    def host_part(self) -> KVLayout:
        """The layout of the host's part, with every layer under its own number; the others are empty."""
        count = self.num_host_layers
        return KVLayout(self.kv_type, [*self.layers[:count], *map(_empty, self.layers[count:])])

    @property
    def device_part(self) -> KVLayout:
        """As `host_part`, for the device's part."""
        count = self.num_host_layers
        return KVLayout(self.kv_type, [*map(_empty, self.layers[:count]), *self.layers[count:]])

    @property
    def device_page_bytes(self) -> int:
        return self.page_bytes - self._host_page_bytes

    def places(self, pages: Addresses) -> tuple[Addresses, Addresses]:
        """The addresses of pages in host memory, and on the device."""
        return self._slabs.find(pages, (self._host_page_bytes, self.device_page_bytes))

    def allocate(self, num_bytes: int) -> int:
        count = num_bytes // self.page_bytes
        device = self.device.allocate(count * self.device_page_bytes)
        try:
            host = aligned_zeros(count * self._host_page_bytes)
        except (MemoryError, OutOfMemoryError):
            self.device.free(device)
            raise
        return self._slabs.add(num_bytes, host, device)

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Copy one page to another, after every step so far."""
        (host, device), (target_host, target_device) = self._parts(source), self._parts(target)
        target_host[:] = host
        self.device.copy(device, target_device, self.device_page_bytes)

    def read(self, page: int, out: NDArray[np.uint8]) -> None:
        host, device = self._parts(page)
        out[: host.size] = host
        self.device.read(device, out[host.size :])

    def write(self, page: int, data: NDArray[np.uint8]) -> None:
        host, device = self._parts(page)
        host[:] = data[: host.size]
        self.device.write(device, data[host.size :])

    @property
    def _host_page_bytes(self) -> int:
        shapes = enumerate(self.layers[: self.num_host_layers])
        return sum(shape.num_kv_heads * self.head(layer).num_bytes for layer, shape in shapes)

    def _parts(self, page: int) -> tuple[NDArray[np.uint8], int]:
        """A page's bytes in host memory, and the address of the others on the device."""
        hosts, devices = self.places(np.array([page], np.int64))
        bytes_of_page = ctypes.c_uint8 * self._host_page_bytes
        return np.ctypeslib.as_array(bytes_of_page.from_address(int(hosts[0]))), int(devices[0])


def _empty(shape: KVLayerShape) -> KVLayerShape:
    """A layer without keys and values."""
    return KVLayerShape(0, shape.key_size, shape.value_size)
