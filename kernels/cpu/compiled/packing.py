"""Filling tiles from the rows of a file; what goes where is `localinfer.kernels.cpu.packing`'s to say."""

import numpy as np

from localinfer.kernels.cpu.compiled.memory import (
    load_i64,
    load_u8,
    load_u16_anywhere,
    load_u32_anywhere,
    store_u8,
    store_u16,
    store_u32,
)
from localinfer.kernels.cpu.compiled.pool import take_units
from localinfer.kernels.jit import inline, op


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
