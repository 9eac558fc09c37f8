"""Pages of keys and values in parts: each device of a pipeline holds the layers that it computes."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import OutOfMemoryError
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.cuda.memory import most_page_bytes
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.ops import KVLayerShape

Addresses = NDArray[np.int64]


@dataclass(frozen=True)
class KVPart:
    """The layers `first` to `end` - 1 of every page, in the memory of a device; None for the host's."""

    device: CudaDevice | None
    first: int
    end: int


class PagePlaces:
    """Addresses of the parts of pages, by the name of the page."""

    def __init__(self) -> None:
        self._names = np.zeros(0, np.int64)
        self._bases = np.zeros((0, 0), np.int64)
        self._memory: list[NDArray[np.uint8]] = []
        self._next_name = 1 << 20

    def add(self, num_bytes: int, bases: Sequence[int], host: NDArray[np.uint8] | None) -> int:
        """Register a slab of this many bytes in total, by the addresses of its parts; return its first page's name.

        host: memory to keep.
        """
        name = self._next_name
        self._next_name += num_bytes
        self._names = np.append(self._names, name)
        self._bases = np.array([*self._bases.reshape(-1, len(bases)), bases], np.int64)
        if host is not None:
            self._memory.append(host)
        return name

    def find(self, names: Addresses, sizes: Sequence[int]) -> list[Addresses]:
        """The addresses of each part of pages. sizes: bytes of a page in each part."""
        slabs = np.searchsorted(self._names, names, side="right") - 1
        index = (names - self._names[slabs]) // sum(sizes)
        return [self._bases[slabs, part] + index * size for part, size in enumerate(sizes)]


class ShardedKVLayout(KVLayout):
    """Pages in parts, in the order of the layers. A page's address is a name for all parts (`places`).

    computed_by: which kinds of devices compute what, part of the layout's repr and so of the key of stored pages:
    another kind may round differently. A part of no layers has no memory.
    """

    parts: Sequence[KVPart] = field(kw_only=True, repr=False, compare=False)
    computed_by: str = field(kw_only=True)
    _slabs: PagePlaces = field(default_factory=PagePlaces, init=False, repr=False, compare=False)

    def part_layout(self, part: int) -> KVLayout:
        """The layout of one part, with every layer under its own number; the others are empty."""
        held = range(self.parts[part].first, self.parts[part].end)
        layers = [shape if layer in held else _empty(shape) for layer, shape in enumerate(self.layers)]
        return KVLayout(self.kv_type, layers)

    @cached_property
    def part_bytes(self) -> tuple[int, ...]:
        """Bytes of a page in each part."""
        return tuple(self.part_layout(part).page_bytes for part in range(len(self.parts)))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page in all parts together, which may hold the same layer."""
        return sum(self.part_bytes)

    @property
    def host_page_bytes(self) -> int:
        """Bytes of a page in host memory."""
        sizes = zip(self.parts, self.part_bytes, strict=True)
        return sum(num_bytes for part, num_bytes in sizes if part.device is None)

    @property
    def devices(self) -> list[CudaDevice]:
        """The GPUs, in the order of their layers."""
        return [part.device for part in self.parts if part.device is not None]

    def free_pages(self, spare: int) -> int:
        """Pages for which every device has memory; see `memory.DeviceKVLayout.free_pages`."""
        counts = [
            most_page_bytes(part.device, spare) // num_bytes
            for part, num_bytes in zip(self.parts, self.part_bytes, strict=True)
            if part.device is not None and num_bytes
        ]
        # Layers without keys and values take no pages.
        return min(counts, default=1 << 40)

    def places(self, pages: Addresses) -> list[Addresses]:
        """The addresses of pages in each part."""
        return self._slabs.find(pages, self.part_bytes)

    def allocate(self, num_bytes: int) -> int:
        """Allocate pages in all parts; returns the name of the first. Raises: OutOfMemoryError, MemoryError."""
        count = num_bytes // self.page_bytes
        bases: list[int] = []
        host = None
        try:
            for part, size in zip(self.parts, self.part_bytes, strict=True):
                if not size:
                    bases.append(0)
                elif part.device is None:
                    host = aligned_zeros(count * size)
                    bases.append(address(host))
                else:
                    bases.append(part.device.allocate(count * size))
        except (MemoryError, OutOfMemoryError):
            for part, base in zip(self.parts, bases, strict=False):
                if base and part.device is not None:
                    part.device.free(base)
            raise
        return self._slabs.add(num_bytes, bases, host)

    def copy(self, source: int, target: int, num_bytes: int) -> None:
        """Copy one page to another, after every step so far."""
        for (part, size, start), (_, _, end) in zip(self._parts(source), self._parts(target), strict=True):
            if part.device is None:
                ctypes.memmove(end, start, size)
            else:
                part.device.copy(start, end, size)

    def read(self, page: int, out: NDArray[np.uint8]) -> None:
        """Copy a page, after every step so far, into uint8[page_bytes] on the host."""
        offset = 0
        for part, size, start in self._parts(page):
            if part.device is None:
                out[offset : offset + size] = _bytes_at(start, size)
            else:
                part.device.read(start, out[offset : offset + size])
            offset += size

    def write(self, page: int, data: NDArray[np.uint8]) -> None:
        """Fill a page with uint8[page_bytes]."""
        offset = 0
        for part, size, start in self._parts(page):
            if part.device is None:
                _bytes_at(start, size)[:] = data[offset : offset + size]
            else:
                part.device.write(start, data[offset : offset + size])
            offset += size

    def _parts(self, page: int) -> list[tuple[KVPart, int, int]]:
        """The parts of a page that hold something, with their bytes and addresses."""
        places = self.places(np.array([page], np.int64))
        found = zip(self.parts, self.part_bytes, places, strict=True)
        return [(part, size, int(place[0])) for part, size, place in found if size]


def _bytes_at(place: int, num_bytes: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(place))


def _empty(shape: KVLayerShape) -> KVLayerShape:
    """A layer without keys and values."""
    return KVLayerShape(0, shape.key_size, shape.value_size)
