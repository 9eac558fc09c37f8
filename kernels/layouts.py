"""Weight layouts of the CPU kernels: tiles of sixteen rows, at the density of the file.

A tile is a sequence of units, each a header and a body, and tiles are contiguous, so that a thread reads memory
sequentially, which hardware prefetchers follow best. Lane r of every vector belongs to row r of the tile. A block is 32
columns.

Body vectors are 64 bytes: lane r has four adjacent code bytes of row r, as in a row of the file.

| layout | unit | header | body |
|---|---|---|---|
| F32 F16 BF16 | column | - | 16 values |
| Q4_0 | block | d f16[16] | 4 vectors of nibbles (low: column k, high: k + 16) |
| Q4_1 | block | d, m f16[16] | as Q4_0 |
| Q5_0 Q5_1 | block | as Q4_0, Q4_1 | 4 vectors of nibbles, 1 vector of fifth bits (bit v of byte c: column 4v + c) |
| Q8_0 | block | d f16[16] | 8 vectors of codes + 128 |
| Q4_K | super-block of 256 | d, dmin f16[16], 4 x 48 bytes of 6-bit scales | 64 columns: 8 vectors (low: first 32) |
| Q5_K | super-block | as Q4_K | 8 vectors of fifth bits (bit b: block b), then as Q4_K |
| Q6_K | super-block | d f16[16], 16 x int8[16] scales | 128 columns: 8 x (nibbles, upper bit pairs), 8 nibbles |
| Q2_K | super-block | d, dmin f16[16], 4 vectors of scales | 128 columns: 8 vectors of bit pairs (pair k: block k) |
| Q3_K | super-block | d f16[16], 3 vectors of scales | 8 vectors of third bits (bit b: block b), then as Q2_K |
| TQ2_0 | super-block | d f16[16] | as Q2_K |
| Q1_0 | 128 columns | d f16[16] | per block: 1 vector of bits (bit v of byte c: column 4v + c) |
| Q2_0 | 64 columns | d f16[16] | per 16 columns: 1 vector of bit pairs (pair v of byte c: column 4v + c) |
| MXFP4 | block | e u8[16] | as Q4_0 |
| IQ4_NL | block | d f16[16] | as Q4_0 |
| IQ4_XS | super-block | d f16[16], scales_h u16[16], 1 vector of scales_l | 8 blocks as Q4_0 |
| NVFP4 | 64 columns | 1 vector of scales | 16 columns: 2 vectors of nibbles (low: column k, high: k + 8) |
| IQ2_XXS | super-block | d f16[16] | per block: vector of indices, masks of signs |
| IQ2_XS | super-block | d f16[16], 2 vectors of scales | as IQ2_XXS |
| IQ2_S | super-block | d f16[16], 2 vectors of scales, per block masks of bits 8 and 9 of indices | as IQ2_XXS |
| IQ3_XXS | super-block | d f16[16] | 8 x 2 vectors of indices, 8 x masks of signs |
| IQ3_S | super-block | d f16[16], vector of scales, per block masks of bit 8 of indices | as IQ3_XXS |

The INT layouts are those of checkpoints: w = d * (code - zero), one scale and one integer zero point per group of
columns. Checkpoints store codes and zero points apart, so `quant/checkpoint/grouped_layouts.py` joins them first.

The 48 bytes hold, for blocks 2p and 2p + 1 of a super-block, three byte[16]: s0 | m0 << 6, s1 | (m0 >> 2) << 6 and
m1 | (m0 >> 4) << 6 (each byte keeps two bits of m0 in its upper end), where w = d * s * q - dmin * m. Vectors of scales
have the file's bytes in the file's order, four of a row in its lane, as vectors of codes do.

A mask is 64 bits, 4 * r + c for row r and column, or index, c of four. A block has eight masks of signs. Where a file
stores seven signs of eight columns (IQ2_XXS, IQ2_XS, IQ3_XXS), the eighth follows from their number; in its bits are
the four of the block's scale, of IQ2_XS bit 8 of the four indices.
"""

import math
from enum import IntEnum
from functools import cache

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError
from localinfer.system.extras import require
from localinfer.types import Record

TILE_ROWS = 16


class Layout(IntEnum):
    """A weight layout of the kernels."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10
    INT4_32 = 11
    INT4_64 = 12
    INT4_128 = 13
    INT8_32 = 14
    MXFP4 = 15
    NVFP4 = 16
    IQ4_NL = 17
    IQ4_XS = 18
    Q2_K = 19
    Q3_K = 20
    TQ2_0 = 21
    IQ2_XXS = 22
    IQ2_XS = 23
    IQ2_S = 24
    IQ3_XXS = 25
    IQ3_S = 26
    Q1_0 = 27
    Q2_0 = 28


GGUF_LAYOUTS = tuple(layout for layout in Layout if not layout.name.startswith("INT"))
"""Layouts of rows in GGUF files: all of them have CPU kernels, and one that looks rows up."""

PAIRED_LAYOUTS = tuple(layout for layout in Layout if Layout.Q8_0 <= layout <= Layout.IQ4_XS)
"""Layouts whose codes are whole bytes or nibbles, vectors of which lie in pairs in a tile where `isa.pairs_rows`."""

SHARED_LAYOUTS = (Layout.Q4_0, Layout.Q4_1, Layout.Q4_K, Layout.INT4_32, Layout.INT4_64, Layout.INT4_128)
"""Layouts whose codes are numbers of four bits: two rows of weights have them in a byte where `isa.shares_bytes`."""
SHARED_PAIRED_LAYOUTS = (Layout.Q4_0, Layout.Q4_1, Layout.Q4_K)
"""The same where `isa.pairs_rows` too: zero points that differ between the rows take there what is saved."""

WHOLE_LAYOUTS = (Layout.Q5_K, Layout.Q6_K)
"""Layouts of five and six bits a code: a byte has a whole one and bits of another one where `isa.shares_bytes`."""

CUDA_LAYOUTS = tuple(layout for layout in Layout if layout <= Layout.INT8_32)
"""Layouts that CUDA kernels read."""


class LayoutSizes(Record):
    """Columns of a unit, bytes of its header in a tile, and its bytes in one row of the file."""

    unit: int
    header_bytes: int
    file_bytes: int

    @property
    def unit_bytes(self) -> int:
        """Bytes of a unit of a tile: the same as of its rows in the file."""
        return TILE_ROWS * self.file_bytes


SIZES: dict[Layout, LayoutSizes] = {
    Layout.F32: LayoutSizes(1, 0, 4),
    Layout.F16: LayoutSizes(1, 0, 2),
    Layout.BF16: LayoutSizes(1, 0, 2),
    Layout.Q8_0: LayoutSizes(32, 32, 34),
    Layout.Q4_0: LayoutSizes(32, 32, 18),
    Layout.Q4_1: LayoutSizes(32, 64, 20),
    Layout.Q5_0: LayoutSizes(32, 32, 22),
    Layout.Q5_1: LayoutSizes(32, 64, 24),
    Layout.Q4_K: LayoutSizes(256, 256, 144),
    Layout.Q5_K: LayoutSizes(256, 256, 176),
    Layout.Q6_K: LayoutSizes(256, 288, 210),
    Layout.INT4_32: LayoutSizes(32, 64, 20),
    Layout.INT4_64: LayoutSizes(64, 64, 36),
    Layout.INT4_128: LayoutSizes(128, 64, 68),
    Layout.INT8_32: LayoutSizes(32, 64, 36),
    Layout.MXFP4: LayoutSizes(32, 16, 17),
    Layout.NVFP4: LayoutSizes(64, 64, 36),
    Layout.IQ4_NL: LayoutSizes(32, 32, 18),
    Layout.IQ4_XS: LayoutSizes(256, 128, 136),
    Layout.Q2_K: LayoutSizes(256, 320, 84),
    Layout.Q3_K: LayoutSizes(256, 224, 110),
    Layout.TQ2_0: LayoutSizes(256, 32, 66),
    Layout.IQ2_XXS: LayoutSizes(256, 32, 66),
    Layout.IQ2_XS: LayoutSizes(256, 160, 74),
    Layout.IQ2_S: LayoutSizes(256, 288, 82),
    Layout.IQ3_XXS: LayoutSizes(256, 32, 98),
    Layout.IQ3_S: LayoutSizes(256, 224, 110),
    Layout.Q1_0: LayoutSizes(128, 32, 18),
    Layout.Q2_0: LayoutSizes(64, 32, 18),
}


LARGEST_STEP = ((1 << 22) - 1) // (32 * 127)
"""The most by which a code of an INT layout may differ from its zero point: kernels of NEON and NVIDIA count the
products of a block, 32 such steps by activations of at most 127, in bits of a float32 which hold less than 2^22."""


def is_float(layout: Layout) -> bool:
    """True if weights are floating point, multiplied by float32 activations."""
    return layout <= Layout.BF16


def num_tiles(num_rows: int) -> int:
    """Tiles for this many rows; the last is padded with zero weights."""
    return -(-num_rows // TILE_ROWS)


def stored_row_bytes(layout: Layout, num_columns: int) -> int:
    """Bytes of a row as a file stores it; raises ShapeError if the columns are not whole units."""
    sizes = SIZES[layout]
    if num_columns <= 0 or num_columns % sizes.unit:
        raise ShapeError(
            f"{layout.name} needs a positive multiple of {sizes.unit} columns, found {num_columns}; "
            "store such a matrix as F16"
        )
    return num_columns // sizes.unit * sizes.file_bytes


def tile_bytes(layout: Layout, num_columns: int) -> int:
    """Bytes of one tile; raises ShapeError if the columns are not whole units."""
    return TILE_ROWS * stored_row_bytes(layout, num_columns)


def check_bytes(layout: Layout, data: NDArray[np.uint8], *shape: int) -> int:
    """Bytes of a row of a matrix, or a stack of them, that is stored in just these bytes; raises ShapeError if not."""
    size = stored_row_bytes(layout, shape[-1])
    needed = math.prod(shape[:-1]) * size
    if needed <= 0 or data.dtype != np.uint8 or data.size != needed:
        raise ShapeError(
            f"{' x '.join(map(str, shape))} in {layout.name} take {needed} bytes, found {data.size} of {data.dtype}; "
            "pass the tensor's own bytes and shape"
        )
    return size


@cache
def grid_vectors(name: str) -> NDArray[np.int8]:
    """Return int8[entries, 4 or 8], the vectors that codes of a type select, by the type's name in the format."""
    require("gguf", f"the table of {name}")
    import gguf.quants  # imports for a quarter of a second, and few models need it

    table = getattr(gguf.quants, name)
    table.init_grid()
    vectors: NDArray[np.int8] = table.grid[0, 0].astype(np.int8)
    vectors.flags.writeable = False
    return vectors
