"""The inner loop of GPTQ: a block of columns is rounded one by one, and the later ones answer for the errors so far.

Columns lie one after the other, with rows as lanes: nothing is summed across them, so a row gets the bits it would get
alone. Products are added one by one in the order of columns.
"""

from typing import Any

import numpy as np

from localinfer.kernels.cpu.compiled.encode.grid_fits import divide, nearest_iq4_value, whole
from localinfer.kernels.cpu.compiled.simd.lanes import LANE_BYTES, load, splat, store
from localinfer.kernels.cpu.compiled.simd.memory import load_f32, load_i64
from localinfer.kernels.jit.numba import entry, inline


@inline
def _nearest(value: Any, lowest: int, highest: int) -> Any:
    """The nearest whole number of a range, or of IQ4's table where the range is empty."""
    if lowest > highest:
        return nearest_iq4_value(value)
    return whole(value, splat(np.float32(lowest)), splat(np.float32(highest)))


@entry("q", "q")
def round_block(parameters: int) -> int:
    """Round some columns; return 0.

    Parameters: first column, end, vectors of rows, bytes from column to column, wanted, given, errors, levels, decoded,
    weights, bytes from row to row of them, group of each column, place of each column, scales, minimums, lowest level,
    highest level.
    """
    first, end = load_i64(parameters), load_i64(parameters + 8)
    vectors, stride = load_i64(parameters + 16), load_i64(parameters + 24)
    wanted, given, errors = load_i64(parameters + 32), load_i64(parameters + 40), load_i64(parameters + 48)
    levels, decoded = load_i64(parameters + 56), load_i64(parameters + 64)
    weights, weights_stride = load_i64(parameters + 72), load_i64(parameters + 80)
    groups, places = load_i64(parameters + 88), load_i64(parameters + 96)
    scales, minimums = load_i64(parameters + 104), load_i64(parameters + 112)
    lowest, highest = load_i64(parameters + 120), load_i64(parameters + 128)
    for part in range(vectors):
        lane = LANE_BYTES * part
        for i in range(first, end):
            column = i * stride + lane
            value = load(wanted + column)
            for j in range(first, i):
                weight = splat(load_f32(weights + i * weights_stride + 4 * j))
                value = value + weight * load(errors + j * stride + lane)
            grid = load_i64(groups + 8 * i) * stride + lane
            scale, minimum = load(scales + grid), load(minimums + grid)
            level = _nearest(divide(value - minimum, scale), lowest, highest)
            found = scale * level + minimum
            store(errors + column, load(given + column) - found)
            store(wanted + column, value - found)
            place = load_i64(places + 8 * i) * stride + lane
            store(levels + place, level)
            store(decoded + place, found)
    return 0
