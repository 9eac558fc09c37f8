"""Aligned memory for kernels, and the addresses of arrays."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Bytes; one cache line and one AVX-512 register."""


def aligned(num_bytes: int) -> NDArray[np.uint8]:
    """Uninitialised uint8[num_bytes] whose address is a multiple of ALIGNMENT."""
    raw = np.empty(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def aligned_zeros(num_bytes: int) -> NDArray[np.uint8]:
    """As `aligned`, all zero; pages the kernel never touches take no memory."""
    raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + num_bytes]


def address(array: NDArray[Any]) -> int:
    """Where a contiguous array's first element lies."""
    assert array.flags.c_contiguous, "kernels walk memory, so an array they get must be contiguous"
    return int(array.ctypes.data)
