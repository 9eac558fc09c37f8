"""Memory for kernels: aligned arrays and their addresses, the arena of weights, and the memory of one tape."""

import contextlib
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import OutOfMemoryError
from localinfer.kernels.address_space import shortage
from localinfer.kernels.cpu import guard
from localinfer.kernels.ops import Buffer, Rows
from localinfer.types import FloatArray

if TYPE_CHECKING:
    from localinfer.kernels.cpu.weights import RowTable

ALIGNMENT = 64
"""Bytes; one cache line and one AVX-512 register."""

READABLE_BYTES = 64
"""Readable bytes behind every array of `aligned`, since a vector that begins in the last columns ends beyond them.
Nothing may be read behind any other array, nor before one."""

Number = TypeVar("Number", bound=np.generic)


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised uint8[num_bytes] whose address is a multiple of ALIGNMENT. Raises: OutOfMemoryError."""
    if guard.IS_ON:
        return guard.guarded(num_bytes, READABLE_BYTES)
    raw = _allocated(np.empty, num_bytes + ALIGNMENT + READABLE_BYTES)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def aligned_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """As `aligned`, all zero; pages the kernel never touches take no memory."""
    if guard.IS_ON:
        return guard.guarded(num_bytes, READABLE_BYTES)
    raw = _allocated(np.zeros, num_bytes + ALIGNMENT + READABLE_BYTES)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def empty(shape: int | tuple[int, ...], kind: type[Number]) -> NDArray[Number]:
    """An uninitialised array for kernels, which stay inside it."""
    return _exact(np.dtype(kind), shape) if guard.IS_ON else np.empty(shape, kind)


def zeros(shape: int | tuple[int, ...], kind: type[Number]) -> NDArray[Number]:
    """An array of zeros for kernels, which stay inside it."""
    return _exact(np.dtype(kind), shape) if guard.IS_ON else np.zeros(shape, kind)


def placed(array: NDArray[Number]) -> NDArray[Number]:
    """A contiguous array that kernels stay inside: itself, in guard mode a copy between protected pages."""
    if not guard.IS_ON:
        return array
    copy: NDArray[Number] = _exact(array.dtype, array.shape)
    copy[...] = array
    return copy


def _exact(kind: "np.dtype[Number]", shape: int | tuple[int, ...]) -> NDArray[Number]:
    num_bytes = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
    return guard.guarded(num_bytes, alignment=kind.itemsize).view(kind).reshape(shape)


def _allocated(allocate: Callable[..., NDArray[np.uint8]], num_bytes: int) -> NDArray[np.uint8]:
    try:
        return allocate(num_bytes, np.uint8)
    except MemoryError:
        raise shortage(num_bytes, "working memory") from None


def address(array: NDArray[Any]) -> int:
    """Address of a contiguous array's first element."""
    assert array.flags.c_contiguous, "kernels walk memory, so an array they get must be contiguous"
    return int(array.ctypes.data)


class Arena:
    """Memory for the weights of one model: few large blocks, on huge pages where the system has them.

    Weights lie in the order they were packed, which is the order a token reads them, so a prefetch that runs past the
    end of one matrix is already in the next.
    """

    def __init__(self, block_bytes: int = 256 << 20) -> None:
        self._block_bytes = block_bytes
        self._block: NDArray[np.uint8] = np.empty(0, np.uint8)

    def take(self, num_bytes: int) -> NDArray[np.uint8]:
        """Uninitialised uint8[num_bytes], aligned; lives as long as any array taken from its block.

        Raises: OutOfMemoryError if the system has no such memory.
        """
        if guard.IS_ON:
            return guard.guarded(num_bytes)
        padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if padded > self._block.size:
            self._block = self._fresh_block(padded)
        taken, self._block = self._block[:num_bytes], self._block[padded:]
        return taken

    def release(self) -> None:
        """Drop the rest of the present block; arrays taken from it keep it alive."""
        self._block = np.empty(0, np.uint8)

    def _fresh_block(self, num_bytes: int) -> NDArray[np.uint8]:
        for size in (max(num_bytes, self._block_bytes), num_bytes):
            # Where memory is short a block is no larger than the array asked for.
            with contextlib.suppress(MemoryError, OSError, OutOfMemoryError):
                return _map_memory(size)
        raise shortage(num_bytes, "a matrix of weights")


def _map_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Fresh zero pages from the system, huge ones if it agrees; untouched pages take no memory."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return aligned(num_bytes)
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A system without huge pages, such as Raspberry Pi OS, refuses the advice.
        with contextlib.suppress(OSError):
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)


def padded(width: int) -> int:
    """Columns of a row in memory: whole vectors of sixteen."""
    return (width + 15) // 16 * 16


class TapeMemory:
    """Allocates memory by address, and keeps it alive as long as itself.

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

    def address_of(self, buffer: Buffer) -> tuple[int, int]:
        """Address and row stride of a buffer."""
        return address(self.buffers[buffer.index]), 4 * padded(buffer.width)

    def rows(self, buffer: Buffer) -> FloatArray:
        """A buffer as float32[rows, width]."""
        values = self.buffers[buffer.index].view(np.float32)
        return values.reshape(self._max_rows[buffer.rows], -1)[:, : buffer.width]

    def placed_table(self, rows: "RowTable") -> "RowTable":
        """A table whose rows are all there, as kernels may read it; see `placed`."""
        return rows if rows.fill is not None else replace(rows, data=placed(rows.data))

    def keep_table(self, rows: "RowTable", *, is_small: bool) -> None:
        """Hold a table, and have its rows there in time: those of a small one now."""
        self.keep(rows)
        if rows.fill is not None and is_small:
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
        """Address of at least `width` zeros, which nothing writes."""
        if self._zeros.size < padded(width):
            self._zeros = aligned_zeros(4 * padded(width)).view(np.float32)
            self.keep(self._zeros)
        return address(self._zeros)

    def shared(self, name: str, num_bytes: int) -> int:
        """Address of at least `num_bytes`, the same for one name until more is asked for."""
        if name not in self._shared or self._shared[name].size < num_bytes:
            self._shared[name] = aligned(num_bytes)
            self.keep(self._shared[name])
        return address(self._shared[name])

    def keep(self, *things: Any) -> None:
        """Keep what an op's parameters point to."""
        self._kept.extend(things)

    def release(self) -> None:
        """Give up everything; addresses are invalid from now on."""
        for held in (self.buffers, self._kept, self.fills, self._shared):
            held.clear()
