"""The grid inside encoded blocks: what each weight may become once scales are fixed, and its codes put back in place.

Every type here decodes a weight to scale * level + minimum, in float32 and in this order, with one scale (and minimum)
per group of 16 or 32 columns. Levels are the whole numbers of a range, or IQ4's table.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.encoding import TABLE
from localinfer.quant.formats.reference_fits import IQ4_VALUES, nearest_iq4
from localinfer.quant.formats.types import TensorType, block_dtype
from localinfer.quant.formats.unpacking import pack_bits, unpack_bits, unpack_k_scales
from localinfer.types import FloatArray

_RANGES = {
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
}
_TABLES = (TensorType.IQ4_NL, TensorType.IQ4_XS)

GRID_TYPES = (*_RANGES, *_TABLES)
"""Types whose codes can be chosen apart from their scales."""


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
        return TABLE if self.type in _TABLES else _RANGES[self.type]

    def nearest(self, values: FloatArray, group: int, rows: slice) -> tuple[NDArray[np.float32], FloatArray]:
        """The nearest level of one column of weights, and what it decodes to: float32[rows] both.

        The oracle of `kernels.cpu.encoding`.

        Where a scale is 0 every level decodes to the minimum, and the lowest magnitude is taken.
        """
        scale = self.scale[group, rows]
        minimum = None if self.minimum is None else self.minimum[group, rows]
        levels = values if minimum is None else values - minimum
        levels = np.divide(levels, np.where(scale == 0, np.float32(np.inf), scale))
        if self.type in _TABLES:
            levels = IQ4_VALUES[nearest_iq4(levels)]
        else:
            lowest, highest = _RANGES[self.type]
            np.rint(levels, out=levels)
            np.clip(levels, lowest, highest, out=levels)
        decoded = scale * levels
        if minimum is not None:
            decoded += minimum
        return levels, decoded


def read_grid(encoded: NDArray[np.uint8], type: TensorType) -> Grid:
    """Read the grid of encoded rows. Shapes: encoded uint8[rows, row bytes]."""
    rows = len(encoded)
    blocks = np.ascontiguousarray(encoded).reshape(-1).view(block_dtype(type))
    scale, minimum = _fields(blocks, type)

    def by_group(values: NDArray[Any]) -> FloatArray:
        return np.ascontiguousarray(values.reshape(rows, -1).T, np.float32)

    group_size = 16 if type in (TensorType.Q2_K, TensorType.Q3_K, TensorType.Q6_K) else 32
    return Grid(type, group_size, by_group(scale), None if minimum is None else by_group(minimum))


def with_levels(encoded: NDArray[np.uint8], type: TensorType, levels: NDArray[np.int8]) -> NDArray[np.uint8]:
    """Encoded rows with other levels on the same grid.

    Shapes: encoded uint8[rows, row bytes]; levels int8[rows, columns], of the type's range or values of IQ4's table.
    """
    result = np.array(encoded, np.uint8, order="C")
    blocks = result.reshape(-1).view(block_dtype(type))
    by_block = levels.reshape(len(blocks), -1)
    codes: NDArray[Any]
    if type in _TABLES:
        codes = nearest_iq4(by_block.astype(np.float32))
    else:
        codes = (by_block.astype(np.int16) - (0 if type is TensorType.Q8_0 else _RANGES[type][0])).astype(np.uint8)
    for name, values in _packed(codes, type).items():
        blocks[name] = values.reshape(blocks[name].shape)
    return result


def levels_of(encoded: NDArray[np.uint8], type: TensorType) -> NDArray[np.int8]:
    """The levels of encoded rows: what `with_levels` takes. Shapes: uint8[rows, row bytes]; int8[rows, columns]."""
    blocks = np.ascontiguousarray(encoded).reshape(-1).view(block_dtype(type))
    codes = _codes(blocks, type)
    if type in _TABLES:
        found: NDArray[np.int8] = IQ4_VALUES[codes].astype(np.int8)
    else:
        found = (codes.astype(np.int16) + (0 if type is TensorType.Q8_0 else _RANGES[type][0])).astype(np.int8)
    return found.reshape(len(encoded), -1)


def _float(values: NDArray[Any]) -> FloatArray:
    return values.astype(np.float32)


def _fields(blocks: NDArray[Any], type: TensorType) -> tuple[FloatArray, FloatArray | None]:
    """Scales and minimums as `quant.reference` multiplies them out, [blocks, groups of a block]."""
    d = _float(blocks["d"])[:, None]
    if type in (TensorType.Q4_0, TensorType.Q5_0, TensorType.Q8_0, TensorType.IQ4_NL):
        return d, None
    if type in (TensorType.Q4_1, TensorType.Q5_1):
        return d, _float(blocks["m"])[:, None]
    if type is TensorType.Q6_K:
        return d * _float(blocks["scales"]), None
    if type is TensorType.Q3_K:
        packed = blocks["scales"]
        scales = unpack_bits(packed[:, :8], 4, 8) | unpack_bits(packed[:, 8:], 2, 4) << 4
        return d * (_float(scales) - 32), None
    if type is TensorType.IQ4_XS:
        high = blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
        scales = unpack_bits(blocks["scales_l"], 4, 1) | high.astype(np.uint8) << 4
        return d * (_float(scales) - 32), None
    dmin = _float(blocks["dmin"])[:, None]
    if type is TensorType.Q2_K:
        return d * _float(blocks["scales"] & 15), -(dmin * _float(blocks["scales"] >> 4))
    factors, minimums = unpack_k_scales(blocks["scales"])
    return d * _float(factors), -(dmin * _float(minimums))


def _packed(codes: NDArray[np.uint8], type: TensorType) -> dict[str, NDArray[Any]]:
    """The fields that hold codes 0 and up. Shapes: codes uint8[blocks, columns of a block]."""
    if type is TensorType.Q8_0:
        return {"qs": codes.view(np.int8)}
    if type in (TensorType.Q4_0, TensorType.Q4_1, TensorType.IQ4_NL, TensorType.IQ4_XS):
        return {"qs": pack_bits(codes, 4, 16)}
    if type in (TensorType.Q5_0, TensorType.Q5_1):
        return {"qh": pack_bits(codes >> 4, 1, 1), "qs": pack_bits(codes & 15, 4, 16)}
    if type is TensorType.Q2_K:
        return {"qs": pack_bits(codes, 2, 32)}
    if type is TensorType.Q3_K:
        return {"hmask": pack_bits(codes >> 2, 1, 32), "qs": pack_bits(codes & 3, 2, 32)}
    if type is TensorType.Q4_K:
        return {"qs": pack_bits(codes, 4, 32)}
    if type is TensorType.Q5_K:
        return {"qh": pack_bits(codes >> 4, 1, 32), "qs": pack_bits(codes & 15, 4, 32)}
    assert type is TensorType.Q6_K, f"{type.name} has no grid"
    return {"ql": pack_bits(codes & 15, 4, 64), "qh": pack_bits(codes >> 4, 2, 32)}


def _codes(blocks: NDArray[Any], type: TensorType) -> NDArray[Any]:
    """Undo `_packed`."""
    if type is TensorType.Q8_0:
        return blocks["qs"].view(np.uint8)
    if type in (TensorType.Q4_0, TensorType.Q4_1, TensorType.IQ4_NL, TensorType.IQ4_XS):
        return unpack_bits(blocks["qs"], 4, 16)
    if type in (TensorType.Q5_0, TensorType.Q5_1):
        return unpack_bits(blocks["qs"], 4, 16) | unpack_bits(blocks["qh"], 1, 1) << 4
    if type is TensorType.Q2_K:
        return unpack_bits(blocks["qs"], 2, 32)
    if type is TensorType.Q3_K:
        return unpack_bits(blocks["qs"], 2, 32) | unpack_bits(blocks["hmask"], 1, 32) << 2
    if type is TensorType.Q4_K:
        return unpack_bits(blocks["qs"], 4, 32)
    if type is TensorType.Q5_K:
        return unpack_bits(blocks["qs"], 4, 32) | unpack_bits(blocks["qh"], 1, 32) << 4
    assert type is TensorType.Q6_K, f"{type.name} has no grid"
    return unpack_bits(blocks["ql"], 4, 64) | unpack_bits(blocks["qh"], 2, 32) << 4
