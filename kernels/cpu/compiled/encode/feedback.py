"""The inner loop of GPTQ: a block of columns is rounded one by one, and later ones take up the errors so far.

Columns lie one after the other, with rows as lanes: nothing is summed across them, so a row gets the bits it would get
alone. Products are added one by one in the order of columns.
"""

from typing import Any

import numpy as np

from localinfer.kernels.cpu.compiled.encode.grid_fits import divide, nearest_iq4_value, whole
from localinfer.kernels.cpu.compiled.simd.lanes import LANE_BYTES, load, splat, store
from localinfer.kernels.cpu.compiled.simd.memory import load_f32, load_i64
from localinfer.kernels.cpu.parameters import ROUND_COLUMNS
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
    p = ROUND_COLUMNS.load(parameters)
    for part in range(p.vectors):
        lane = LANE_BYTES * part
        for i in range(p.first, p.end):
            column = i * p.stride + lane
            value = load(p.wanted + column)
            for j in range(p.first, i):
                weight = splat(load_f32(p.weights + i * p.weights_stride + 4 * j))
                value = value + weight * load(p.errors + j * p.stride + lane)
            grid = load_i64(p.groups + 8 * i) * p.stride + lane
            scale, minimum = load(p.scales + grid), load(p.minimums + grid)
            level = _nearest(divide(value - minimum, scale), p.lowest, p.highest)
            found = scale * level + minimum
            store(p.errors + column, load(p.given + column) - found)
            store(p.wanted + column, value - found)
            place = load_i64(p.places + 8 * i) * p.stride + lane
            store(p.levels + place, level)
            store(p.decoded + place, found)
    return 0
