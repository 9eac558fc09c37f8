"""Bytes folded into 256 that change when they do, some ten times faster than a cryptographic hash.

How it works is in `compiled/simd/checksum.py`.
"""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.arrays import address
from localinfer.kernels.cpu.kernel_abi import CHECKSUM_LANES, CHECKSUM_MULTIPLIER
from localinfer.kernels.jit.object_cache import Function

_FOLD = Function("checksum.fold", "q", "qqq")
KERNELS = (_FOLD,)
"""What folding calls, so that a loader can compile it ahead."""

_FIRST_LANES: NDArray[np.uint64] = np.arange(1, CHECKSUM_LANES + 1, dtype=np.uint64) * np.uint64(CHECKSUM_MULTIPLIER)


def fold(data: memoryview | bytes) -> bytes:
    """Fold data, whose length is a multiple of 8 bytes, into 8 * CHECKSUM_LANES bytes; the GIL is released meanwhile.

    Equal data give equal results on every machine that is little-endian.
    """
    words = np.frombuffer(data, np.uint64)
    lanes = _FIRST_LANES.copy()
    _FOLD(address(lanes), address(words), words.size)
    return lanes.tobytes()
