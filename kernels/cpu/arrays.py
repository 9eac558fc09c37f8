"""Aligned memory for kernels, and the addresses of arrays."""

import contextlib
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import OutOfMemoryError
from localinfer.kernels.address_space import shortage

ALIGNMENT = 64
"""Bytes; one cache line and one AVX-512 register."""

READABLE_BYTES = 64
"""What follows every array and may be read, since a vector that begins in the last columns ends beyond them."""


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised uint8[num_bytes] whose address is a multiple of ALIGNMENT. Raises: OutOfMemoryError."""
    raw = _allocated(np.empty, num_bytes + ALIGNMENT + READABLE_BYTES)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def aligned_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """As `aligned`, all zero; pages the kernel never touches take no memory."""
    raw = _allocated(np.zeros, num_bytes + ALIGNMENT + READABLE_BYTES)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def _allocated(allocate: Callable[..., NDArray[np.uint8]], num_bytes: int) -> NDArray[np.uint8]:
    try:
        return allocate(num_bytes, np.uint8)
    except MemoryError:
        raise shortage(num_bytes, "working memory") from None


def address(array: NDArray[Any]) -> int:
    """Where a contiguous array's first element lies."""
    assert array.flags.c_contiguous, "kernels walk memory, so an array they get must be contiguous"
    # Unlike `array.ctypes.data` it calls no Python code.
    data: int = array.__array_interface__["data"][0]
    return data


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
        padded = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if padded > self._block.size:
            self._block = self._fresh_block(padded)
        taken, self._block = self._block[:num_bytes], self._block[padded:]
        return taken

    def _fresh_block(self, num_bytes: int) -> NDArray[np.uint8]:
        for size in (max(num_bytes, self._block_bytes), num_bytes):
            # Where memory is short a block is no larger than what is asked of it.
            with contextlib.suppress(MemoryError, OSError, OutOfMemoryError):
                return _map_memory(size)
        raise shortage(num_bytes, "a matrix of weights")


def _map_memory(num_bytes: int) -> NDArray[np.uint8]:
    """Fresh zero pages from the system, huge ones if it agrees; untouched pages take no memory."""
    if not hasattr(mmap, "MAP_ANONYMOUS"):
        return aligned(num_bytes)
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(mapped, np.uint8)
