"""The nearest level of a grid, and the levels of encoded blocks, by plain NumPy."""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.encoding import TABLE
from localinfer.quant.formats import dequantize as reference
from localinfer.quant.formats.encoding import Grid
from localinfer.quant.formats.reference_encoders import nearest_iq4
from localinfer.quant.formats.types import IQ4_VALUES, TensorType, block_dtype
from localinfer.types import FloatArray


def levels_of(encoded: NDArray[np.uint8], type: TensorType) -> NDArray[np.int8]:
    """The levels of encoded rows: what `with_levels` takes. Shapes: uint8[rows, row bytes]; int8[rows, columns]."""
    blocks = np.ascontiguousarray(encoded).reshape(-1).view(block_dtype(type))
    return reference.levels_of(blocks, type).astype(np.int8).reshape(len(encoded), -1)


def nearest(grid: Grid, values: FloatArray, group: int, rows: slice) -> tuple[FloatArray, FloatArray]:
    """The nearest level of one column of weights, and what it decodes to: float32[rows] both.

    Where a scale is 0 every level decodes to the minimum, and the lowest magnitude is taken.
    """
    scale = grid.scale[group, rows]
    minimum = None if grid.minimum is None else grid.minimum[group, rows]
    levels = values if minimum is None else values - minimum
    levels = np.divide(levels, np.where(scale == 0, np.float32(np.inf), scale))
    if grid.level_range == TABLE:
        levels = IQ4_VALUES[nearest_iq4(levels)]
    else:
        np.clip(np.rint(levels), *grid.level_range, out=levels)
    decoded = scale * levels
    if minimum is not None:
        decoded += minimum
    return levels, decoded
