"""Packing the rows of a file into tiles, as described by the fields in `localinfer.kernels.cpu.weights`."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from localinfer.kernels.cpu.compiled.emit import (
    ADDRESS,
    I8,
    I16,
    I32,
    I64,
    LITERAL,
    VOID,
    Emitter,
    Value,
    emitted,
    vector,
)
from localinfer.kernels.cpu.compiled.memory import (
    int64_pointer,
    load_i64,
    load_u8,
    load_u16_anywhere,
    load_u32_anywhere,
    store_i64,
    store_u8,
    store_u16,
    store_u32,
)
from localinfer.kernels.cpu.compiled.pool import take_units
from localinfer.kernels.cpu.kernel_abi import (
    BYTE_PLANES,
    CHECKSUM_LANES,
    CHECKSUM_MULTIPLIER,
    FIVE_BITS,
    IN_PAIRS,
    IN_SHARED_BYTES,
    SIX_BITS,
)
from localinfer.kernels.cpu.parameters import PACK_TILES, READ_FILE, TILE_FIELD
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.numba import compose, entry, inline, op, outline

_BYTES_AT_ONCE = 4096
_READ_BYTES = 64 << 10
_FIELD_BYTES = TILE_FIELD.num_bytes


@emitted(VOID, LITERAL, *[types.int64] * 3)
def _transpose(emit: Emitter, width: int, start: Value, stride: Value, out: Value) -> None:
    """Sixteen columns of sixteen rows, `width` (literal 2 or 4) bytes each, to sixteen vectors of one column."""
    element = {2: I16, 4: I32}[width]
    vector_bytes = 16 * width
    b = emit.builder
    rows = [emit.load(b.add(start, b.mul(stride, emit.i64(row))), vector(element), align=width) for row in range(16)]
    for column, value in enumerate(emit.transpose(rows)):
        emit.store(value, out, vector_bytes * column, align=32)


@emitted(VOID, *[types.int64] * 5)
def _transpose_words(
    emit: Emitter, start: Value, stride: Value, out: Value, distance: Value, changed_bits: Value
) -> None:
    """Four words of sixteen rows to four vectors of one word each, `step` bytes apart; `flip` is xored to each word."""
    b = emit.builder
    rows = [emit.load(b.add(start, b.mul(stride, emit.i64(row))), vector(I32, 4), align=1) for row in range(16)]

    def joined(left: Any, right: Any, lanes: list[int]) -> Any:
        return b.shuffle_vector(left, right, ir.Constant(vector(I32, len(lanes)), lanes))

    pairs = [joined(rows[i], rows[i + 1], list(range(8))) for i in range(0, 16, 2)]
    fours = [joined(pairs[i], pairs[i + 1], list(range(16))) for i in range(0, 8, 2)]
    mask = emit.splat(b.trunc(changed_bits, I32))
    # Words 2i and 2i + 1 of eight rows side by side, then one word of all sixteen.
    for i in range(2):
        lanes = [4 * row + word for word in (2 * i, 2 * i + 1) for row in range(8)]
        upper, lower = joined(fours[0], fours[1], lanes), joined(fours[2], fours[3], lanes)
        for word in range(2):
            lanes_of_word = [16 * half + 8 * word + lane for half in range(2) for lane in range(8)]
            value = b.xor(joined(upper, lower, lanes_of_word), mask)
            # A field may follow sixteen bytes of scales.
            emit.store(value, b.add(out, b.mul(distance, emit.i64(2 * i + word))), align=16)


@emitted(VOID, *[types.int64] * 3)
def _gather_halves(emit: Emitter, start: Value, stride: Value, out: Value) -> None:
    """One number of two bytes of each of sixteen rows to one vector."""
    b = emit.builder
    value = emit.zeros(I16)
    for row in range(16):
        half = emit.load(b.add(start, b.mul(stride, emit.i64(row))), I16, align=1)
        value = b.insert_element(value, half, emit.i32(row))
    # A field may follow sixteen bytes of scales.
    emit.store(value, out, align=16)


@inline
def _transpose_tile(source: int, row_bytes: int, columns: int, width: int, target: int) -> int:
    """Transpose whole blocks of sixteen columns of a full tile of plain numbers; returns how many columns that was."""
    done = columns // 16 * 16
    for column in range(0, done, 16):
        if width == 2:
            _transpose(2, source + 2 * column, row_bytes, target + 32 * column)
        else:
            _transpose(4, source + 4 * column, row_bytes, target + 64 * column)
    return done


@inline
def _spread_bits(word: int) -> np.uint32:
    """Bit 4v + c of a row's 32 fifth bits becomes bit v of byte c."""
    result = np.uint32(0)
    for v in range(8):
        for c in range(4):
            result |= ((np.uint32(word) >> np.uint32(4 * v + c)) & np.uint32(1)) << np.uint32(8 * c + v)
    return result


@inline
def _spread_pairs(word: int) -> np.uint32:
    """Pair 4v + c of a row's sixteen pairs of bits becomes pair v of byte c."""
    result = np.uint32(0)
    for v in range(4):
        for c in range(4):
            result |= ((np.uint32(word) >> np.uint32(8 * v + 2 * c)) & np.uint32(3)) << np.uint32(8 * c + 2 * v)
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
def _low_bytes(source: int) -> np.uint32:
    """The low bytes of four numbers of 16 bits."""
    result = np.uint32(0)
    for i in range(4):
        result |= np.uint32(load_u8(source + 2 * i)) << np.uint32(8 * i)
    return result


@inline
def _mask_bits(source: int, kind: int) -> np.uint32:
    """Bits of a row in the masks of one block, four bits to each; see `weights.py` for the kinds."""
    if kind == 7:
        return load_u32_anywhere(source)
    if kind == 11:
        return np.uint32(load_u8(source))
    result = np.uint32(0)
    if kind == 8:
        # Four codes of seven signs, and the four bits of the scale.
        word = load_u32_anywhere(source)
        for i in range(4):
            signs = (word >> np.uint32(7 * i)) & np.uint32(127)
            result |= (signs | ((word >> np.uint32(28 + i)) & np.uint32(1)) << np.uint32(7)) << np.uint32(8 * i)
    elif kind == 9:
        # Four numbers of a low byte, a ninth bit and seven signs.
        for i in range(4):
            upper = np.uint32(load_u8(source + 2 * i + 1))
            result |= (upper >> np.uint32(1) | (upper & np.uint32(1)) << np.uint32(7)) << np.uint32(8 * i)
    else:
        pairs = np.uint32(load_u8(source))
        for i in range(4):
            result |= ((pairs >> np.uint32(2 * i)) & np.uint32(1)) << np.uint32(i)
            result |= ((pairs >> np.uint32(2 * i + 1)) & np.uint32(1)) << np.uint32(4 + i)
    return result


@outline
def _pack_masks(source: int, row_bytes: int, rows: int, target: int, num_masks: int, kind: int) -> None:
    """Masks of one block of sixteen rows, of which `rows` exist."""
    for mask in range(num_masks):
        store_i64(target + 8 * mask, 0)
    for row in range(min(16, rows)):
        bits = np.int64(_mask_bits(source + row * row_bytes, kind))
        for mask in range(num_masks):
            place = target + 8 * mask
            store_i64(place, load_i64(place) | ((bits >> (4 * mask)) & 15) << (4 * row))


@outline
def _pack_field(source: int, target: int, width: int, items: int, kind: int, file_step: int, tile_step: int) -> None:
    """One field of one unit of one row; target is lane r of the field's first item."""
    if kind == 5:
        for item in range(items):
            store_u32(target + tile_step * item, load_u32_anywhere(source + file_step * item))
    elif kind == 12:
        for item in range(items):
            store_u32(target + 64 * item, _spread_pairs(load_u32_anywhere(source + 4 * item)))
    elif kind == 6:
        for item in range(items):
            store_u32(target + tile_step * item, _low_bytes(source + file_step * item))
    elif kind == 3:
        _pack_scales(source, target)
    elif kind == 2:
        store_u32(target, _spread_bits(load_u32_anywhere(source)))
    elif kind == 1:
        for item in range(items):
            store_u32(target + 64 * item, load_u32_anywhere(source + 4 * item) ^ np.uint32(0x80808080))
    elif width == 4:
        for item in range(items):
            store_u32(target + tile_step * item, load_u32_anywhere(source + 4 * item))
    elif width == 2:
        for item in range(items):
            store_u16(target + 32 * item, load_u16_anywhere(source + 2 * item))
    else:
        for item in range(items):
            store_u8(target + 16 * item, load_u8(source + item))


@inline
def _clear_row(target: int, width: int, items: int, kind: int, step: int) -> None:
    count = 12 if kind == 3 else items
    for item in range(count):
        for byte in range(width):
            store_u8(target + step * item + byte, np.uint8(0))


if isa.shares_bytes():

    @inline
    def _kind(kind: int) -> int:
        return kind & (IN_PAIRS - 1)

    @emitted(VOID, *[types.int64] * 2)
    def _pair_vectors(emit: Emitter, first: Value, second: Value) -> None:
        """Two vectors of a column of sixteen rows each to one of both columns of eight rows, and of the other eight."""
        vectors = [emit.load(address, vector(I32), align=16) for address in (first, second)]
        for half, address in enumerate((first, second)):
            lanes = [8 * half + lane // 2 + 16 * (lane % 2) for lane in range(16)]
            emit.store(emit.builder.shuffle_vector(*vectors, emit.constants(I32, lanes)), address, align=16)

    @emitted(VOID, types.int64)
    def _share_bytes(emit: Emitter, address: Value) -> None:
        """Of every 32 bytes give the first 16 all codes of columns of lower nibbles, the others those of upper ones.

        Lower nibbles come from the first 16 bytes and upper ones from the others, so that a byte has codes of two rows.
        Where products are of signed numbers, upper codes are stored less 8.
        """
        b = emit.builder
        low, high, four = (emit.splat_constant(I8, value, 16) for value in (15, 240, 4))
        for place in range(0, 64, 32):
            first, second = (emit.load(address, vector(I8, 16), place + offset, align=16) for offset in (0, 16))
            lower = b.or_(b.and_(first, low), b.shl(second, four))
            upper = b.or_(b.lshr(first, four), b.and_(second, high))
            for offset, value in ((0, lower), (16, upper)):
                if not isa.pairs_rows():
                    value = b.xor(value, emit.splat_constant(I8, 128, 16))
                emit.store(value, address, place + offset, align=16)

    def _bits(emit: Emitter, value: Value, start: int, count: int, target: int) -> Value:
        """Bits of 64 bytes from `start` on, moved to `target`."""
        b = emit.builder
        moved = b.lshr(value, emit.splat_constant(I8, start, 64))
        kept = b.and_(moved, emit.splat_constant(I8, (1 << count) - 1, 64))
        return b.shl(kept, emit.splat_constant(I8, target, 64))

    @emitted(VOID, *[types.int64] * 3)
    def _whole_six_bits(emit: Emitter, first: Value, second: Value, third: Value) -> None:
        """Vectors with nibbles of blocks 0 and 2, of blocks 1 and 3, and with the upper bits of all four.

        A byte of them gets a code of block 0, 1 or 2, and above it two bits of one of block 3, the lowest first.
        """
        b, addresses = emit.builder, (first, second, third)
        even, odd, upper = (emit.load(address, vector(I8, 64), align=32) for address in addresses)
        lower = (_bits(emit, even, 0, 4, 0), _bits(emit, odd, 0, 4, 0), _bits(emit, even, 4, 4, 0))
        rest = (_bits(emit, odd, 4, 2, 6), _bits(emit, odd, 6, 2, 6), _bits(emit, upper, 6, 2, 6))
        for block, address in enumerate(addresses):
            whole = b.or_(lower[block], _bits(emit, upper, 2 * block, 2, 4))
            emit.store(b.or_(whole, rest[block]), address, align=32)

    @emitted(VOID, *[types.int64] * 2)
    def _whole_five_bits(emit: Emitter, fifth: Value, nibbles: Value) -> None:
        """A vector with the fifth bits of eight blocks, and four with nibbles of blocks 2p and 2p + 1.

        A byte of the latter gets a code of block 2p, and above it three bits of one of block 2p + 1, whose upper two
        are bits 2p of the former.
        """
        b = emit.builder
        bits, rest = emit.load(fifth, vector(I8, 64), align=32), emit.zeros(I8, 64)
        for pair in range(4):
            both = emit.load(nibbles, vector(I8, 64), 512 * pair, align=32)
            first = b.or_(_bits(emit, both, 0, 4, 0), _bits(emit, bits, 2 * pair, 1, 4))
            emit.store(b.or_(first, _bits(emit, both, 4, 3, 5)), nibbles, 512 * pair, align=32)
            upper = b.or_(_bits(emit, both, 7, 1, 0), _bits(emit, bits, 2 * pair + 1, 1, 1))
            rest = b.or_(rest, b.shl(upper, emit.splat_constant(I8, 2 * pair, 64)))
        emit.store(rest, fifth, align=32)

    @emitted(VOID, types.int64)
    def _byte_planes(emit: Emitter, body: Value) -> None:
        """Sixteen numbers of two bytes and sixteen of four, which lie before a body, to planes of one byte of all."""
        for size, offset in ((2, -96), (4, -64)):
            numbers = emit.load(body, vector(I8, 16 * size), offset, align=32)
            planes = [size * row + byte for byte in range(size) for row in range(16)]
            emit.store(emit.shuffle(numbers, planes), body, offset, align=32)

    @inline
    def _arrange(kind: int, start: int, units: int, unit_bytes: int, items: int, step: int) -> None:
        """Put a field's vectors in pairs, and codes of two rows in a byte, if they are to be."""
        if kind & IN_PAIRS:
            for unit in range(units):
                for item in range(0, items, 2):
                    place = start + unit * unit_bytes + step * item
                    _pair_vectors(place, place + step)
        for unit in range(units if kind == BYTE_PLANES else 0):
            _byte_planes(start + unit * unit_bytes)
        for unit in range(units if kind == FIVE_BITS else 0):
            for j in range(8):
                place = start + unit * unit_bytes + 64 * j
                _whole_five_bits(place, place + 512)
        for half in range(2 * units if kind == SIX_BITS else 0):
            start_of_half = start + half // 2 * unit_bytes + half % 2 * 1536
            for j in range(8):
                place = start_of_half + 128 * j
                _whole_six_bits(place, start_of_half + 1024 + 64 * j, place + 64)
        if kind & IN_SHARED_BYTES:
            for unit in range(units):
                for item in range(items):
                    _share_bytes(start + unit * unit_bytes + step * item)

else:

    @compose
    def _kind(kind: int) -> int:
        return kind

    @compose
    def _arrange(kind: int, start: int, units: int, unit_bytes: int, items: int, step: int) -> None:
        """Vectors stay as they are."""


@op
def pack_tiles(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Fill tiles; parameters: control, target, source, tiles, rows, units, file bytes, unit bytes, fields, count."""
    # A few units of all sixteen rows at a time, so that written lines stay in the first-level cache.
    p = PACK_TILES.load(parameters)
    step = max(1, _BYTES_AT_ONCE // p.unit_bytes)
    while True:
        tile = take_units(p.control, 1)
        if tile >= p.tiles:
            return
        start = p.target + tile * p.units * p.unit_bytes
        for index in range(p.num_fields):
            field = TILE_FIELD.load(p.fields + _FIELD_BYTES * index)
            width, items, kind = field.width, field.items, _kind(field.kind)
            base = start + field.tile_offset
            done = 0
            if 7 <= kind <= 11:
                row_bytes = p.units * p.file_bytes
                first_source = p.source + 16 * tile * row_bytes + field.file_offset
                for unit in range(p.units):
                    for item in range(items):
                        item_source = first_source + unit * p.file_bytes + item * field.file_step
                        item_target = base + unit * p.unit_bytes + item * field.tile_step
                        _pack_masks(item_source, row_bytes, p.rows - 16 * tile, item_target, 2 * width, kind)
                continue
            if p.file_bytes == width and 16 * tile + 16 <= p.rows:
                done = _transpose_tile(p.source + 16 * tile * p.units * width, p.units * width, p.units, width, base)
            if width == 4 and items % 4 == 0 and (kind <= 1 or kind == 4) and 16 * tile + 16 <= p.rows:
                row_bytes = p.units * p.file_bytes
                first_source = p.source + 16 * tile * row_bytes + field.file_offset
                distance, flip = field.tile_step, 0x80808080 if kind == 1 else 0
                for unit in range(p.units):
                    unit_source, unit_target = first_source + unit * p.file_bytes, base + unit * p.unit_bytes
                    for item in range(0, items, 4):
                        _transpose_words(
                            unit_source + 4 * item, row_bytes, unit_target + distance * item, distance, flip
                        )
                done = p.units
            if width == 2 and kind == 0 and p.file_bytes > width and 16 * tile + 16 <= p.rows:
                row_bytes = p.units * p.file_bytes
                first_source = p.source + 16 * tile * row_bytes + field.file_offset
                for unit in range(p.units):
                    for item in range(items):
                        place = base + unit * p.unit_bytes + 32 * item
                        _gather_halves(first_source + unit * p.file_bytes + 2 * item, row_bytes, place)
                done = p.units
            for first in range(done, p.units, step):
                for lane in range(16):
                    row = 16 * tile + lane
                    for unit in range(first, min(first + step, p.units)):
                        lane_target = base + unit * p.unit_bytes + width * lane
                        if row < p.rows:
                            lane_source = p.source + (row * p.units + unit) * p.file_bytes + field.file_offset
                            _pack_field(lane_source, lane_target, width, items, kind, field.file_step, field.tile_step)
                        else:
                            _clear_row(lane_target, width, items, kind, field.tile_step)
            _arrange(field.kind, base, p.units, p.unit_bytes, items, field.tile_step)


@emitted(types.int64, ADDRESS, *[types.int64] * 4)
def _pread(emit: Emitter, function: Value, descriptor: Value, target: Value, count: Value, offset: Value) -> Value:
    kind = ir.FunctionType(I64, [I64] * 4)
    arguments = [descriptor, target, count, offset]
    return emit.builder.call(emit.builder.inttoptr(function, kind.as_pointer()), arguments)


@op
def read_file(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Copy bytes of a file, which may be shorter by now: then `failed` is set, and the rest is left as it is."""
    p = READ_FILE.load(parameters)
    while True:
        at = _READ_BYTES * take_units(p.control, 1)
        if at >= p.bytes:
            return
        end = min(at + _READ_BYTES, p.bytes)
        while at < end:
            count = _pread(p.pread, p.descriptor, p.target + at, end - at, p.offset + at)
            if count <= 0:
                store_i64(p.failed, 1)
                return
            at += count


_MULTIPLIER = np.uint64(CHECKSUM_MULTIPLIER)
_HALF = np.uint64(32)


@entry("q", "qqq")
def fold(lanes_address: int, data_address: int, num_words: int) -> int:
    """Fold num_words words into the CHECKSUM_LANES lanes of a checksum, at memory bandwidth; return 0.

    Word i of the data goes into lane i modulo CHECKSUM_LANES: the lane is xored with it and multiplied by an odd
    number, and its upper half is xored into its lower one. Each of these is a bijection of the lane, so a change of
    one word is always detected, and changes of several cancel with probability 2^-64. Intent is not detected.
    """
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
