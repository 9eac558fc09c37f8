"""Packing weights from a file's rows into tiles, in parallel and directly from the memory map; checksums.

Every layout is a list of fields: items of 1, 2 or 4 bytes that are copied from one row of the file to one lane of a
tile, consecutively or at steps. Some kinds of field permute bits; none loses any.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.kernel_abi import (
    BYTE_PLANES,
    CHECKSUM_LANES,
    CHECKSUM_MULTIPLIER,
    FIVE_BITS,
    IN_PAIRS,
    IN_SHARED_BYTES,
    SIX_BITS,
)
from localinfer.kernels.cpu.memory import Arena, address, placed
from localinfer.kernels.cpu.parameters import PACK_TILES
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.object_cache import Function, Kernel
from localinfer.kernels.layouts import (
    PAIRED_LAYOUTS,
    SHARED_LAYOUTS,
    SHARED_PAIRED_LAYOUTS,
    SIZES,
    TILE_ROWS,
    Layout,
    check_bytes,
    num_tiles,
    tile_bytes,
)
from localinfer.types import Record

_STEP_BYTES = 8 << 20
"""Bytes of the file that are packed at a time, so that little of it is in memory."""

PACK = Kernel("packing.pack_tiles")
READ = Kernel("packing.read_file")

_COPY, _BIAS, _FIFTH_BITS, _SIX_BIT_SCALES, _EVERY_OTHER = 0, 1, 2, 3, 4
_WORDS, _LOW_BYTES = 5, 6
_MASKS, _EVEN_SIGNS, _NINTH_BITS, _BIT_PAIRS, _BITS = 7, 8, 9, 10, 11
_PAIRS_ACROSS = 12

# TILE_FIELD blocks: bytes per item, offset in the unit of a file's row, items, offset in the unit of a tile, kind, and
# for the kinds that have others than items of that size, the steps from one item to the next in both.
_FIELDS: dict[Layout, list[tuple[int, ...]]] = {
    Layout.F32: [(4, 0, 1, 0, _COPY)],
    Layout.F16: [(2, 0, 1, 0, _COPY)],
    Layout.BF16: [(2, 0, 1, 0, _COPY)],
    Layout.Q8_0: [(2, 0, 1, 0, _COPY), (4, 2, 8, 32, _BIAS)],
    Layout.Q4_0: [(2, 0, 1, 0, _COPY), (4, 2, 4, 32, _COPY)],
    Layout.Q4_1: [(2, 0, 2, 0, _COPY), (4, 4, 4, 64, _COPY)],
    Layout.Q5_0: [(2, 0, 1, 0, _COPY), (4, 6, 4, 32, _COPY), (4, 2, 1, 288, _FIFTH_BITS)],
    Layout.Q5_1: [(2, 0, 2, 0, _COPY), (4, 8, 4, 64, _COPY), (4, 4, 1, 320, _FIFTH_BITS)],
    Layout.Q4_K: [(2, 0, 2, 0, _COPY), (1, 4, 1, 64, _SIX_BIT_SCALES), (4, 16, 32, 256, _COPY)],
    Layout.Q5_K: [(2, 0, 2, 0, _COPY), (1, 4, 1, 64, _SIX_BIT_SCALES), (4, 16, 40, 256, _COPY)],
    Layout.Q6_K: [
        (4, 0, 8, 288, _EVERY_OTHER),
        (4, 32, 8, 1312, _COPY),
        (4, 128, 8, 352, _EVERY_OTHER),
        (4, 64, 8, 1824, _EVERY_OTHER),
        (4, 96, 8, 2848, _COPY),
        (4, 160, 8, 1888, _EVERY_OTHER),
        (1, 192, 16, 32, _COPY),
        (2, 208, 1, 0, _COPY),
    ],
    Layout.INT4_32: [(2, 0, 2, 0, _COPY), (4, 4, 4, 64, _COPY)],
    Layout.INT4_64: [(2, 0, 2, 0, _COPY), (4, 4, 8, 64, _COPY)],
    Layout.INT4_128: [(2, 0, 2, 0, _COPY), (4, 4, 16, 64, _COPY)],
    Layout.INT8_32: [(2, 0, 2, 0, _COPY), (4, 4, 8, 64, _COPY)],
    Layout.MXFP4: [(1, 0, 1, 0, _COPY), (4, 1, 4, 16, _COPY)],
    Layout.NVFP4: [(4, 0, 1, 0, _COPY), (4, 4, 8, 64, _COPY)],
    Layout.IQ4_NL: [(2, 0, 1, 0, _COPY), (4, 2, 4, 32, _COPY)],
    Layout.IQ4_XS: [(2, 0, 2, 0, _COPY), (4, 4, 1, 64, _COPY), (4, 8, 32, 128, _COPY)],
    Layout.Q2_K: [(4, 0, 4, 64, _COPY), (4, 16, 16, 320, _COPY), (2, 80, 2, 0, _COPY)],
    Layout.Q3_K: [(4, 0, 8, 224, _COPY), (4, 32, 16, 736, _COPY), (4, 96, 3, 32, _COPY), (2, 108, 1, 0, _COPY)],
    Layout.TQ2_0: [(4, 0, 16, 32, _COPY), (2, 64, 1, 0, _COPY)],
    Layout.IQ2_XXS: [(2, 0, 1, 0, _COPY), (4, 2, 8, 32, _WORDS, 8, 128), (4, 6, 8, 96, _EVEN_SIGNS, 8, 128)],
    Layout.IQ2_XS: [
        (2, 0, 1, 0, _COPY),
        (4, 2, 8, 160, _LOW_BYTES, 8, 128),
        (4, 2, 8, 224, _NINTH_BITS, 8, 128),
        (4, 66, 2, 32, _COPY),
    ],
    Layout.IQ2_S: [
        (2, 0, 1, 0, _COPY),
        (4, 2, 8, 288, _EVERY_OTHER),
        (4, 34, 8, 352, _MASKS, 4, 128),
        (1, 66, 8, 160, _BIT_PAIRS, 1, 16),
        (4, 74, 2, 32, _COPY),
    ],
    Layout.IQ3_XXS: [(2, 0, 1, 0, _COPY), (4, 2, 16, 32, _COPY), (4, 66, 8, 1056, _EVEN_SIGNS, 4, 64)],
    Layout.IQ3_S: [
        (2, 0, 1, 0, _COPY),
        (4, 2, 16, 224, _COPY),
        (1, 66, 8, 96, _BITS, 1, 16),
        (4, 74, 8, 1248, _MASKS, 4, 64),
        (4, 106, 1, 32, _COPY),
    ],
    Layout.Q1_0: [(2, 0, 1, 0, _COPY), *((4, 2 + 4 * i, 1, 32 + 64 * i, _FIFTH_BITS) for i in range(4))],
    Layout.Q2_0: [(2, 0, 1, 0, _COPY), (4, 2, 4, 32, _PAIRS_ACROSS)],
}


def _with_steps(field: tuple[int, ...]) -> tuple[int, ...]:
    width, kind = field[0], field[4]
    return field if len(field) == 7 else (*field, width, 128 if kind == _EVERY_OTHER else TILE_ROWS * width)


_SIGNED = {(Layout.Q8_0, _BIAS): _COPY, (Layout.INT8_32, _COPY): _BIAS}
"""Kinds of fields whose bytes are multiplied as they are by products of pairs, which take them as signed."""


def _arranged(layout: Layout, field: tuple[int, ...], in_pairs: bool) -> tuple[int, ...]:
    """A field as NEON's products take it, if it is one of vectors of codes."""
    width, file_offset, items, tile_offset, kind, *steps = field
    if width != 4 or items % 2 or tile_offset < SIZES[layout].header_bytes:
        return field
    if in_pairs and layout in PAIRED_LAYOUTS:
        kind = _SIGNED.get((layout, kind), kind) + IN_PAIRS
    if layout in (SHARED_PAIRED_LAYOUTS if in_pairs else SHARED_LAYOUTS):
        kind += IN_SHARED_BYTES
    return width, file_offset, items, tile_offset, kind, *steps


def fields_of(layout: Layout, in_pairs: bool, in_shared_bytes: bool) -> list[tuple[int, ...]]:
    """TILE_FIELD blocks of a layout, as products of `isa.pairs_rows` and `isa.shares_bytes` take it."""
    fields = [_with_steps(field) for field in _FIELDS[layout]]
    if not in_shared_bytes:
        return fields
    fields = [_arranged(layout, field, in_pairs) for field in fields]
    last = {Layout.Q5_K: [FIVE_BITS], Layout.Q6_K: [SIX_BITS], Layout.IQ4_XS: [BYTE_PLANES]}.get(layout, [])
    return fields + [(4, 0, 0, SIZES[layout].header_bytes, kind, 0, 0) for kind in last]


@cache
def _field_table(layout: Layout, in_pairs: bool, in_shared_bytes: bool) -> NDArray[np.int64]:
    return placed(np.array(fields_of(layout, in_pairs, in_shared_bytes), np.int64))


def packing_words(
    control: int, layout: Layout, source: int, target: int, tiles: int, rows: int, num_columns: int
) -> NDArray[np.int64]:
    """A PACK_TILES block: of so many tiles, for which `rows` rows are left; source, target: addresses."""
    sizes, fields = SIZES[layout], _field_table(layout, isa.pairs_rows(), isa.shares_bytes())
    return PACK_TILES.pack(
        control=control, target=target, source=source, tiles=tiles, rows=rows, units=num_columns // sizes.unit,
        file_bytes=sizes.file_bytes, unit_bytes=sizes.unit_bytes, fields=address(fields), num_fields=len(fields),
    )  # fmt: skip


class RowTable(Record):
    """Rows of a GGUF tensor; data: uint8, row after row.

    fill: to be called with the ids, int32, of rows before they are read; None if all are in memory.
    """

    layout: Layout
    num_rows: int
    num_columns: int
    data: NDArray[np.uint8]
    fill: Callable[[NDArray[np.int32]], None] | None = None


class PackedWeight(Record):
    """A stack of matrices in tiles; data: uint8[num_experts * expert_bytes], 64-byte aligned.

    columns: int32[num_columns], the input column of each column; None if they are in order.
    """

    layout: Layout
    num_rows: int
    num_columns: int
    num_experts: int
    data: NDArray[np.uint8]
    columns: NDArray[np.int32] | None = None

    @property
    def tile_bytes(self) -> int:
        return tile_bytes(self.layout, self.num_columns)

    @property
    def expert_bytes(self) -> int:
        return self.tile_bytes * num_tiles(self.num_rows)


def pack(
    pool: ThreadPool,
    layout: Layout,
    data: NDArray[np.uint8],
    num_experts: int,
    num_rows: int,
    num_columns: int,
    *,
    arena: Arena | None = None,
    done: Callable[[int, int], None] | None = None,
) -> PackedWeight:
    """Pack a stack of matrices stored row after row, as in a GGUF tensor.

    data: contiguous uint8 of exactly the stack's bytes. done: called with each packed range (first byte, end), so that
    the caller can release it. Raises: ShapeError if the bytes do not match the shape.
    """
    data = placed(data)
    bytes_per_tile = tile_bytes(layout, num_columns)
    row_bytes = check_bytes(layout, data, num_experts, num_rows, num_columns)
    matrix_bytes = num_rows * row_bytes
    tiles = num_tiles(num_rows)
    packed = (arena or Arena(0)).take(num_experts * tiles * bytes_per_tile)
    tiles_per_step = max(1, _STEP_BYTES // bytes_per_tile)
    pending: list[NDArray[np.int64]] = []
    first_byte = 0
    for expert in range(num_experts):
        for tile in range(0, tiles, tiles_per_step):
            count, row = min(tiles_per_step, tiles - tile), tile * TILE_ROWS
            target = address(packed) + (expert * tiles + tile) * bytes_per_tile
            source = data.ctypes.data + expert * matrix_bytes + row * row_bytes
            words = packing_words(pool.control_address, layout, source, target, count, num_rows - row, num_columns)
            pending.append(words)
            end = expert * matrix_bytes + min(num_rows, row + count * TILE_ROWS) * row_bytes
            if end - first_byte >= _STEP_BYTES or end == data.size:
                ops = np.array([[PACK.address, address(one)] for one in pending], np.int64)
                pool.run(address(ops), len(pending), 0)
                if done is not None:
                    done(first_byte, end)
                pending.clear()
                first_byte = end
    return PackedWeight(layout, num_rows, num_columns, num_experts, packed)


_FOLD = Function("packing.fold", "q", "qqq")
KERNELS = (PACK, READ, _FOLD)
"""Kernels of packing and checksums, to be compiled when a model is loaded."""

_FIRST_LANES: NDArray[np.uint64] = np.arange(1, CHECKSUM_LANES + 1, dtype=np.uint64) * np.uint64(CHECKSUM_MULTIPLIER)


def fold(data: memoryview | bytes) -> bytes:
    """Fold data, whose length is a multiple of 8 bytes, into 8 * CHECKSUM_LANES bytes; releases the GIL.

    Equal data give equal results on every machine that is little-endian.
    """
    words = placed(np.frombuffer(data, np.uint64))
    lanes = _FIRST_LANES.copy()
    _FOLD(address(lanes), address(words), words.size)
    return lanes.tobytes()
