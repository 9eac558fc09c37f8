"""Move weights from the rows of a file into tiles, straight from the map and in parallel.

Every layout is a list of fields: items of 1, 2 or 4 bytes that go, item by item, from one row of the file to one lane
of a tile. Only three kinds of field change bytes on the way; none loses any.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError
from localinfer.kernels.cpu.arrays import Arena, address
from localinfer.kernels.cpu.layouts import SIZES, TILE_ROWS, Layout, num_tiles, tile_bytes
from localinfer.kernels.cpu.memory import (
    load_i64,
    load_u8,
    load_u16_anywhere,
    load_u32_anywhere,
    store_u8,
    store_u16,
    store_u32,
)
from localinfer.kernels.cpu.pool import ThreadPool, take_units
from localinfer.kernels.jit import inline, op

_STEP_BYTES = 8 << 20
"""A tensor is packed in steps of about this size, so that little of the file is in memory at once."""

_COPY, _BIAS, _FIFTH_BITS, _SIX_BIT_SCALES = 0, 1, 2, 3

# Per field: bytes per item, offset in the file's unit, items, 1 if it goes to the body, offset there, kind.
_FIELDS: dict[Layout, list[tuple[int, int, int, int, int, int]]] = {
    Layout.F32: [(4, 0, 1, 1, 0, _COPY)],
    Layout.F16: [(2, 0, 1, 1, 0, _COPY)],
    Layout.BF16: [(2, 0, 1, 1, 0, _COPY)],
    Layout.Q8_0: [(2, 0, 1, 0, 0, _COPY), (4, 2, 8, 1, 0, _BIAS)],
    Layout.Q4_0: [(2, 0, 1, 0, 0, _COPY), (4, 2, 4, 1, 0, _COPY)],
    Layout.Q4_1: [(2, 0, 2, 0, 0, _COPY), (4, 4, 4, 1, 0, _COPY)],
    Layout.Q5_0: [(2, 0, 1, 0, 0, _COPY), (4, 6, 4, 1, 0, _COPY), (4, 2, 1, 1, 256, _FIFTH_BITS)],
    Layout.Q5_1: [(2, 0, 2, 0, 0, _COPY), (4, 8, 4, 1, 0, _COPY), (4, 4, 1, 1, 256, _FIFTH_BITS)],
    Layout.Q4_K: [(2, 0, 2, 0, 0, _COPY), (1, 4, 1, 0, 64, _SIX_BIT_SCALES), (4, 16, 32, 1, 0, _COPY)],
    Layout.Q5_K: [(2, 0, 2, 0, 0, _COPY), (1, 4, 1, 0, 64, _SIX_BIT_SCALES), (4, 16, 40, 1, 0, _COPY)],
    Layout.Q6_K: [
        (4, 0, 16, 1, 0, _COPY),
        (4, 64, 16, 1, 1536, _COPY),
        (4, 128, 8, 1, 1024, _COPY),
        (4, 160, 8, 1, 2560, _COPY),
        (1, 192, 16, 0, 32, _COPY),
        (2, 208, 1, 0, 0, _COPY),
    ],
}
_FIELD_TABLES = {layout: np.array(fields, np.int64) for layout, fields in _FIELDS.items()}


@dataclass(frozen=True)
class PackedWeight:
    """A stack of equal matrices in tiles: `data` is uint8[num_experts * expert_bytes], 64-byte aligned."""

    layout: Layout
    num_rows: int
    num_columns: int
    num_experts: int
    data: NDArray[np.uint8]

    @property
    def tile_bytes(self) -> int:
        return tile_bytes(self.layout, self.num_columns)

    @property
    def expert_bytes(self) -> int:
        return self.tile_bytes * num_tiles(self.num_rows)


@inline
def _spread_bits(word: int) -> np.uint32:
    """Bit 4v + c of a row's 32 fifth bits becomes bit v of byte c."""
    result = np.uint32(0)
    for v in range(8):
        for c in range(4):
            result |= ((np.uint32(word) >> np.uint32(4 * v + c)) & np.uint32(1)) << np.uint32(8 * c + v)
    return result


@inline
def scale_code(source: int, index: int) -> np.int64:
    """Six-bit code `index` of the twelve bytes of a K-quant super-block: scales 0..7, minimums 8..15."""
    shift = np.int64(index // 8)
    j = index % 8
    if j < 4:
        return np.int64(load_u8(source + j + 4 * shift)) & 63
    low = (np.int64(load_u8(source + j + 4)) >> (4 * shift)) & 15
    return low | (np.int64(load_u8(source + j - 4 + 4 * shift)) >> 6) << 4


@inline
def _pack_scales(source: int, target: int) -> None:
    for pair in range(4):
        minimum = scale_code(source, 8 + 2 * pair)
        codes = (
            scale_code(source, 2 * pair),
            scale_code(source, 2 * pair + 1),
            scale_code(source, 9 + 2 * pair),
        )
        for i in range(3):
            store_u8(target + 48 * pair + 16 * i, np.uint8(codes[i] | ((minimum >> (2 * i)) & 3) << 6))


@inline
def _pack_field(source: int, target: int, width: int, items: int, kind: int) -> None:
    """One field of one unit of one row; target is lane r of the field's first item."""
    if kind == 3:
        _pack_scales(source, target)
    elif kind == 2:
        store_u32(target, _spread_bits(load_u32_anywhere(source)))
    elif kind == 1:
        for item in range(items):
            store_u32(target + 64 * item, load_u32_anywhere(source + 4 * item) ^ np.uint32(0x80808080))
    elif width == 4:
        for item in range(items):
            store_u32(target + 64 * item, load_u32_anywhere(source + 4 * item))
    elif width == 2:
        for item in range(items):
            store_u16(target + 32 * item, load_u16_anywhere(source + 2 * item))
    else:
        for item in range(items):
            store_u8(target + 16 * item, load_u8(source + item))


@inline
def _clear_row(target: int, width: int, items: int, kind: int) -> None:
    count = 12 if kind == 3 else items
    for item in range(count):
        for byte in range(width):
            store_u8(target + 16 * width * item + byte, np.uint8(0))


@op
def pack_tiles(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Fill tiles; parameters: control, target, source, tiles, rows, units, file, header, body bytes, fields, count."""
    control, target, source = load_i64(parameters), load_i64(parameters + 8), load_i64(parameters + 16)
    tiles, rows, units = load_i64(parameters + 24), load_i64(parameters + 32), load_i64(parameters + 40)
    file_bytes, header_bytes = load_i64(parameters + 48), load_i64(parameters + 56)
    body_bytes, fields, num_fields = load_i64(parameters + 64), load_i64(parameters + 72), load_i64(parameters + 80)
    while True:
        tile = take_units(control, 1)
        if tile >= tiles:
            return
        start = target + tile * units * (header_bytes + body_bytes)
        for index in range(num_fields):
            field = fields + 48 * index
            width, offset, items = load_i64(field), load_i64(field + 8), load_i64(field + 16)
            in_body, place, kind = load_i64(field + 24), load_i64(field + 32), load_i64(field + 40)
            stride = body_bytes if in_body == 1 else header_bytes
            base = start + place + (units * header_bytes if in_body == 1 else 0)
            for lane in range(16):
                row = 16 * tile + lane
                for unit in range(units):
                    lane_target = base + unit * stride + width * lane
                    if row < rows:
                        _pack_field(
                            source + (row * units + unit) * file_bytes + offset, lane_target, width, items, kind
                        )
                    else:
                        _clear_row(lane_target, width, items, kind)


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
    """Pack a stack of matrices stored row after row, as a GGUF tensor is.

    data: contiguous uint8 of exactly the stack's bytes; `done` is told each stretch of it (first byte, end) that has
    been packed, so that the caller can let it go. Raises ShapeError if the bytes are not what the shape needs.
    """
    sizes = SIZES[layout]
    bytes_per_tile = tile_bytes(layout, num_columns)
    row_bytes = num_columns // sizes.unit * sizes.file_bytes
    matrix_bytes = num_rows * row_bytes
    if num_rows <= 0 or num_experts <= 0 or data.dtype != np.uint8 or data.size != num_experts * matrix_bytes:
        raise ShapeError(
            f"{num_experts} x {num_rows} x {num_columns} in {layout.name} take {num_experts * matrix_bytes} bytes, "
            f"found {data.size} of {data.dtype}; pass the tensor's own bytes and shape"
        )
    tiles = num_tiles(num_rows)
    packed = (arena or Arena(0)).take(num_experts * tiles * bytes_per_tile)
    fields = _FIELD_TABLES[layout]
    tiles_per_step = max(1, _STEP_BYTES // bytes_per_tile)
    pending: list[NDArray[np.int64]] = []
    first_byte = 0
    for expert in range(num_experts):
        for tile in range(0, tiles, tiles_per_step):
            count, row = min(tiles_per_step, tiles - tile), tile * TILE_ROWS
            target = address(packed) + (expert * tiles + tile) * bytes_per_tile
            source = data.ctypes.data + expert * matrix_bytes + row * row_bytes
            words = (pool.control_address, target, source, count, num_rows - row, num_columns // sizes.unit)
            layout_words = (sizes.file_bytes, sizes.header_bytes, sizes.body_bytes, address(fields), len(fields))
            pending.append(np.array((*words, *layout_words), np.int64))
            end = expert * matrix_bytes + min(num_rows, row + count * TILE_ROWS) * row_bytes
            if end - first_byte >= _STEP_BYTES or end == data.size:
                ops = np.array([[pack_tiles.address, address(one)] for one in pending], np.int64)
                pool.run(address(ops), len(pending), 0)
                if done is not None:
                    done(first_byte, end)
                pending.clear()
                first_byte = end
    return PackedWeight(layout, num_rows, num_columns, num_experts, packed)
