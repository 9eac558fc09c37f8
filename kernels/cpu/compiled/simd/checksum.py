"""A checksum at memory bandwidth: bytes are folded into a few int64 lanes.

Word i of the data goes into lane i modulo CHECKSUM_LANES: the lane is xored with it, multiplied by an odd number, and
its upper half is xored into its lower one. Each of these is a bijection of the lane, so a change of one word is always
detected, and changes of several cancel with probability 2^-64. It does not detect deliberate changes.
"""

import numpy as np
from numba import carray

from localinfer.kernels.cpu.compiled.simd.memory import int64_pointer
from localinfer.kernels.cpu.kernel_abi import CHECKSUM_LANES, CHECKSUM_MULTIPLIER
from localinfer.kernels.jit.numba import entry

_MULTIPLIER = np.uint64(CHECKSUM_MULTIPLIER)
_HALF = np.uint64(32)


@entry("q", "qqq")
def fold(lanes_address: int, data_address: int, num_words: int) -> int:
    """Fold num_words words into the CHECKSUM_LANES lanes; return 0."""
    lanes = carray(int64_pointer(lanes_address), (CHECKSUM_LANES,))
    num_rows = num_words // CHECKSUM_LANES
    data = carray(int64_pointer(data_address), (num_words,))
    for row in range(num_rows):
        for lane in range(CHECKSUM_LANES):
            mixed = (np.uint64(lanes[lane]) ^ np.uint64(data[row * CHECKSUM_LANES + lane])) * _MULTIPLIER
            lanes[lane] = np.int64(mixed ^ (mixed >> _HALF))
    for word in range(num_rows * CHECKSUM_LANES, num_words):
        lane = word - num_rows * CHECKSUM_LANES
        mixed = (np.uint64(lanes[lane]) ^ np.uint64(data[word])) * _MULTIPLIER
        lanes[lane] = np.int64(mixed ^ (mixed >> _HALF))
    return 0
