"""Memory that kernels walk: aligned, and safe to read a vector beyond its end."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.kernels.cpu import guard
from localinfer.kernels.cpu.compiled.emit import LANES
from localinfer.kernels.cpu.memory import ALIGNMENT, READABLE_BYTES, Arena, address, aligned, aligned_zeros

pytestmark = pytest.mark.skipif(guard.IS_ON, reason="in guard mode every array lies alone")


@pytest.mark.parametrize("allocate", [aligned, aligned_zeros])
@pytest.mark.parametrize("num_bytes", [1, 63, 64, 4096, 100_001])
def test_arrays_are_aligned_and_followed_by_a_readable_vector(
    allocate: Callable[[int], NDArray[np.uint8]], num_bytes: int
) -> None:
    assert READABLE_BYTES >= 4 * LANES
    for _ in range(20):
        array = allocate(num_bytes)
        assert array.size == num_bytes
        assert array.ctypes.data % ALIGNMENT == 0
        whole = array.base
        assert isinstance(whole, np.ndarray)
        assert whole.ctypes.data + whole.nbytes >= array.ctypes.data + num_bytes + READABLE_BYTES


def test_an_arena_hands_out_neighbours_and_outgrows_its_block() -> None:
    arena = Arena(block_bytes=4096)
    first, second, large, third = (arena.take(size) for size in (100, 64, 9000, 10))
    assert [part.size for part in (first, second, large, third)] == [100, 64, 9000, 10]
    assert address(second) == address(first) + 128
    for part in (first, second, large, third):
        assert address(part) % ALIGNMENT == 0
        part[:] = 7
    assert (first == 7).all()
