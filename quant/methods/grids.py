"""The grid inside encoded blocks: what each weight may become once scales are fixed, and its codes put back in place.

Every type here decodes a weight to scale * level + minimum, in float32 and in this order, with one scale (and minimum)
per group of 16 or 32 columns. Levels are the whole numbers of a range, or IQ4's table.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.encoding import TABLE
from localinfer.quant.formats.packing import pack_codes
from localinfer.quant.formats.reference import LEVEL_OFFSETS, SUBTRACTS_MINIMUM, group_scales
from localinfer.quant.formats.reference_encoders import nearest_iq4
from localinfer.quant.formats.types import TensorType, block_dtype, block_size
from localinfer.types import FloatArray

LEVEL_RANGES = {
    TensorType.Q4_0: (-8, 7),
    TensorType.Q4_1: (0, 15),
    TensorType.Q5_0: (-16, 15),
    TensorType.Q5_1: (0, 31),
    TensorType.Q8_0: (-127, 127),
    TensorType.Q2_K: (0, 3),
    TensorType.Q3_K: (-4, 3),
    TensorType.Q4_K: (0, 15),
    TensorType.Q5_K: (0, 31),
    TensorType.Q6_K: (-32, 31),
    TensorType.IQ4_NL: TABLE,
    TensorType.IQ4_XS: TABLE,
}
"""Types whose codes can be chosen apart from their scales: the lowest and highest level, or `TABLE`."""


@dataclass(frozen=True)
class Grid:
    """Scales and minimums of encoded rows, by group of columns.

    Shapes: scale and minimum float32[groups, rows]; minimum is None where all are 0.
    """

    type: TensorType
    group_size: int
    scale: FloatArray
    minimum: FloatArray | None

    @property
    def level_range(self) -> tuple[int, int]:
        """The lowest and highest level, or `TABLE` of `kernels.cpu.encoding`."""
        return LEVEL_RANGES[self.type]


def read_grid(encoded: NDArray[np.uint8], type: TensorType) -> Grid:
    """Read the grid of encoded rows. Shapes: encoded uint8[rows, row bytes]."""
    rows = len(encoded)
    blocks = np.ascontiguousarray(encoded).reshape(-1).view(block_dtype(type))
    scale, minimum = group_scales(blocks, type)
    if minimum is not None and type in SUBTRACTS_MINIMUM:
        minimum = -minimum

    def by_group(values: NDArray[Any]) -> FloatArray:
        return np.ascontiguousarray(values.reshape(rows, -1).T, np.float32)

    group_size = block_size(type) // scale.shape[1]
    return Grid(type, group_size, by_group(scale), None if minimum is None else by_group(minimum))


def with_levels(encoded: NDArray[np.uint8], type: TensorType, levels: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Encoded rows with other levels on the same grid.

    Shapes: encoded uint8[rows, row bytes]; levels int8[rows, columns], of the type's range or values of IQ4's table.
    """
    result = np.array(encoded, np.uint8, order="C")
    blocks = result.reshape(-1).view(block_dtype(type))
    by_block = levels.reshape(len(blocks), -1)
    if LEVEL_RANGES[type] == TABLE:
        codes: NDArray[Any] = nearest_iq4(by_block.astype(np.float32))
    else:
        codes = by_block.astype(np.int16) + LEVEL_OFFSETS.get(type, 0)
    for name, values in pack_codes(codes, type).items():
        blocks[name] = values.reshape(blocks[name].shape)
    return result
