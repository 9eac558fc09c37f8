"""Pages of keys and values in a device's memory, or part there and part in the host's, for the pool that has them.

A page is the same bytes wherever it lies, so what was kept of it can come back anywhere: `read` and `write` move it.
"""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import OutOfMemoryError
from localinfer.kernels.cpu.arrays import address, aligned_zeros
from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import KVLayerShape

Addresses = NDArray[np.int64]

_FIRST_NAME = 1 << 20


@dataclass(frozen=True)
class DeviceKVLayout(KVLayout):
    """A page layout whose pages lie in a device's memory; `kv_layout.DevicePages`."""

    device: CudaDevice = field(kw_only=True, repr=False, compare=False)
    device_kind: str = field(init=False)
    """Named in the layout's repr, by which kept pages are told apart: another kind may round otherwise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "device_kind", _kind_of(self.device))

    @property
    def device_page_bytes(self) -> int:
        """Bytes of a page on the device: all of it."""
        return self.page_bytes

    def allocate(self, num_bytes: int) -> int:
        """Address of fresh memory. Raises: OutOfMemoryError."""
        return self.device.allocate(num_bytes)

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Copy from one address to another, after every step so far."""
        self.device.copy(source, target, num_bytes)

    def read(self, page: int, out: NDArray[np.uint8]) -> None:
        """Copy a page, after every step so far, into uint8[page_bytes] of the host's."""
        self.device.read(page, out)

    def write(self, page: int, data: NDArray[np.uint8]) -> None:
        """Fill a page with uint8[page_bytes]."""
        self.device.write(page, data)

    def free_bytes(self) -> int:
        """Memory that is free on the device."""
        return self.device.free_bytes()


class PagePlaces:
    """Where the two parts of pages lie, by the name that stands for both."""

    def __init__(self) -> None:
        self._names: Addresses = np.zeros(0, np.int64)
        self._hosts: Addresses = np.zeros(0, np.int64)
        self._devices: Addresses = np.zeros(0, np.int64)
        self._memory: list[Any] = []
        self._next_name = _FIRST_NAME

    def add(self, num_bytes: int, host: NDArray[np.uint8], device: int) -> int:
        """Keep a slab of so many bytes in all; return the name of its first page."""
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
class SplitKVLayout(KVLayout):
    """Pages whose first `num_host_layers` layers lie in the host's memory and the others on a device.

    A page's address names both places (`places`) and is neither.
    """

    num_host_layers: int = field(kw_only=True)
    device: CudaDevice = field(kw_only=True, repr=False, compare=False)
    device_kind: str = field(init=False)
    """As of `DeviceKVLayout`."""
    _slabs: PagePlaces = field(default_factory=PagePlaces, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "device_kind", _kind_of(self.device))

    @property
    def host_part(self) -> KVLayout:
        """The layout of the host's part, with every layer under its own number; those elsewhere take no room."""
        return KVLayout(self.kv_type, [*self.layers[: self.num_host_layers], *map(_empty, self._device_layers)])

    @property
    def device_part(self) -> KVLayout:
        """As `host_part`, of the device's."""
        return KVLayout(self.kv_type, [*map(_empty, self.layers[: self.num_host_layers]), *self._device_layers])

    @property
    def device_page_bytes(self) -> int:
        """Bytes of a page on the device."""
        return self.page_bytes - self._host_page_bytes

    def places(self, pages: Addresses) -> tuple[Addresses, Addresses]:
        """Where these pages lie in the host's memory, and where on the device."""
        return self._slabs.find(pages, (self._host_page_bytes, self.device_page_bytes))

    def allocate(self, num_bytes: int) -> int:
        """Name of the first of the pages that so many bytes are. Raises: OutOfMemoryError, MemoryError."""
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
        hosts, devices = self.places(np.array([source, target], np.int64))
        _host_bytes(int(hosts[1]), self._host_page_bytes)[:] = _host_bytes(int(hosts[0]), self._host_page_bytes)
        self.device.copy(int(devices[0]), int(devices[1]), self.device_page_bytes)

    def read(self, page: int, out: NDArray[np.uint8]) -> None:
        """Copy a page, after every step so far, into uint8[page_bytes] of the host's."""
        host, device = self._place(page)
        out[: self._host_page_bytes] = _host_bytes(host, self._host_page_bytes)
        self.device.read(device, out[self._host_page_bytes :])

    def write(self, page: int, data: NDArray[np.uint8]) -> None:
        """Fill a page with uint8[page_bytes]."""
        host, device = self._place(page)
        _host_bytes(host, self._host_page_bytes)[:] = data[: self._host_page_bytes]
        self.device.write(device, data[self._host_page_bytes :])

    def free_bytes(self) -> int:
        """Memory that is free on the device."""
        return self.device.free_bytes()

    @property
    def _device_layers(self) -> list[KVLayerShape]:
        return list(self.layers[self.num_host_layers :])

    @property
    def _host_page_bytes(self) -> int:
        shapes = enumerate(self.layers[: self.num_host_layers])
        return sum(shape.num_kv_heads * self.head(layer).num_bytes for layer, shape in shapes)

    def _place(self, page: int) -> tuple[int, int]:
        hosts, devices = self.places(np.array([page], np.int64))
        return int(hosts[0]), int(devices[0])


def _kind_of(device: CudaDevice) -> str:
    major, minor = device.capability
    return f"sm_{major}{minor}"


def _empty(shape: KVLayerShape) -> KVLayerShape:
    """A layer that keeps nothing."""
    return KVLayerShape(0, shape.key_size, shape.value_size)


def _host_bytes(place: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(place))
