"""Writing rows into the pages of the cache, in the layout of `kernels/kv_layout.py`.

No byte of a page belongs to two positions, so rows may be written in any order.
"""

from numba import cuda, float32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.half_bytes import store_head_half_bytes
from localinfer.kernels.cuda.compiled.rotation import block_scale, code_of, fold, rotation_factor, rotation_stages
from localinfer.kernels.cuda.compiled.rows import ROPE, rotated
from localinfer.kernels.cuda.jit import inline, template
from localinfer.kernels.kv_layout import PAGE_TOKENS, SCALE_BLOCK

THREADS = 128
PAGE = PAGE_TOKENS
HALF_BYTES, CODES, HALVES, FLOATS = 0, 1, 2, 4
"""Kinds of keys and values, by the whole bytes of an element: q4_0, q8_0, f16 and f32."""


@template(tuples=ROPE)
def store_rows(key_kind, value_kind):
    """Write keys, after RoPE if it has pairs, and values, neither of them as codes.

    A thread to an element, of [kv_heads * (key_size + value_columns) / 128, rows]. Rows without a page table stay out.
    """
    key_is_half = key_kind == HALVES
    value_is_half = value_kind == HALVES

    def kernel(
        keys, keys_stride, values, values_stride, positions, page_tables,
        layer_offset, head_bytes, values_offset, num_kv_heads, key_size, value_size, value_columns, rope,
    ):  # fmt: skip
        index = ptx.block_x() * THREADS + ptx.thread()
        row = ptx.block_y()
        pages = ptx.load_i64(page_tables + 8 * row)
        head_columns = key_size + value_columns
        if pages != 0 and index < num_kv_heads * head_columns:
            position = ptx.load_i64(positions + 8 * row)
            within = position % PAGE
            head = index // head_columns
            column = index % head_columns
            place = ptx.load_i64(pages + position // PAGE * 8) + layer_offset + head * head_bytes
            if column < key_size:
                source = keys + row * keys_stride + 4 * head * key_size
                value = rotated(source, column, rope, row)
                element = (within // 16 * key_size + column) * 16 + within % 16
                if key_is_half:
                    ptx.store_u16(place + 2 * element, ptx.float_to_half(value))
                else:
                    ptx.store_f32(place + 4 * element, value)
            else:
                column = column - key_size
                value = float32(0.0)
                if column < value_size:
                    value = ptx.load_f32(values + row * values_stride + 4 * (head * value_size + column))
                element = within * value_columns + column
                if value_is_half:
                    ptx.store_u16(place + values_offset + 2 * element, ptx.float_to_half(value))
                else:
                    ptx.store_f32(place + values_offset + 4 * element, value)

    return kernel


@inline
def store_head_codes(numbers, size, codes, run, run_bytes, flip, scales, scale_bytes):
    """Round a head to codes, `run` of them side by side, and a scale per block."""
    lane = ptx.thread() % 32
    first = ptx.thread() // 32 * SCALE_BLOCK
    while first < size:
        end = min(first + SCALE_BLOCK, size)
        bits = ptx.float_to_half(block_scale(numbers, first, end))
        if lane == 0:
            ptx.store_u16(scales + first // SCALE_BLOCK * scale_bytes, bits)
        column = first + lane
        while column < end:
            code = code_of(numbers[column], ptx.half_to_float(bits))
            ptx.store_u8(codes + column // run * run_bytes + column % run, (code & 255) ^ flip)
            column = column + 32
        first = first + THREADS // 32 * SCALE_BLOCK


def key_words_of(kind, size):
    """Words of four codes of a position's keys of a kind of codes; half bytes, whose words have eight, have pairs."""
    return -(-size // 8) * 2 if kind == HALF_BYTES else -(-size // 4)


def key_group_bytes(kind, size):
    """Bytes of the codes of sixteen positions."""
    return key_words_of(kind, size) * (32 if kind == HALF_BYTES else 64)


def key_store_of(kind, size):
    """Make the function that writes a head's key, after RoPE if that has pairs, with all threads of a block.

    numbers: float32[size] of shared memory, for codes. place: the head in its page. within: number in the page.
    """
    is_codes = kind == CODES
    is_rotated = kind <= CODES
    is_half = kind == HALVES
    stages = rotation_stages(size)
    factor = rotation_factor(size)
    # A group of sixteen positions: bytes of its codes, and of its scales.
    group_bytes = key_group_bytes(kind, size)
    group_scales = 32 * -(-size // SCALE_BLOCK)

    @inline
    def store_key(numbers, source, rope, row, place, within, scales):
        group = within // 16
        slot = within % 16
        column = ptx.thread()
        if is_rotated:
            while column < size:
                numbers[column] = rotated(source, column, rope, row) * float32(factor)
                column = column + THREADS
            fold(numbers, size, stages)
            codes = place + group * group_bytes + 4 * slot
            scales = place + scales + group * group_scales + 2 * slot
            if is_codes:
                store_head_codes(numbers, size, codes, 4, 64, 128, scales, 32)
            else:
                store_head_half_bytes(numbers, size, codes, 4, 1, scales, 32)
        else:
            while column < size:
                value = rotated(source, column, rope, row)
                element = (group * size + column) * 16 + slot
                if is_half:
                    ptx.store_u16(place + 2 * element, ptx.float_to_half(value))
                else:
                    ptx.store_f32(place + 4 * element, value)
                column = column + THREADS

    return store_key


def value_store_of(kind, size, pads):
    """Make the function that writes a head's value, as `key_store_of`.

    place: the head's values. pads: columns that fill up a vector become zero, as on the CPU where nothing is codes.
    """
    is_codes = kind == CODES
    is_rotated = kind <= CODES
    is_half = kind == HALVES
    stages = rotation_stages(size)
    factor = rotation_factor(size)

    @inline
    def store_value(numbers, source, place, within, scales, value_columns):
        column = ptx.thread()
        if is_rotated:
            while column < size:
                numbers[column] = ptx.load_f32(source + 4 * column) * float32(factor)
                column = column + THREADS
            fold(numbers, size, stages)
            if is_codes:
                codes = place + within // 2 * 2 * value_columns + within % 2
                store_head_codes(numbers, size, codes, 1, 2, 0, scales + 2 * within, 64)
            else:
                # The bytes of a column belong to positions 0, 2, 1 and 3.
                byte = within % 2 * 2 + within % 4 // 2
                codes = place + within // 4 * 2 * value_columns + byte
                store_head_half_bytes(numbers, size, codes, 16, 4, scales + 2 * within, 64)
        else:
            while column < (value_columns if pads else size):
                value = float32(0.0)
                if column < size:
                    value = ptx.load_f32(source + 4 * column)
                element = within * value_columns + column
                if is_half:
                    ptx.store_u16(place + 2 * element, ptx.float_to_half(value))
                else:
                    ptx.store_f32(place + 4 * element, value)
                column = column + THREADS

    return store_value


@template(tuples=ROPE)
def store_codes(key_kind, value_kind, key_size, value_size):
    """Write keys, after RoPE if it has pairs, and values, at least one of them as codes.

    A block to a head's keys or values, of [KV heads, rows, 2]. Rows without a page table stay out.
    """
    most = max(key_size, value_size)
    store_key = key_store_of(key_kind, key_size)
    store_value = value_store_of(value_kind, value_size, False)

    def kernel(
        keys, keys_stride, values, values_stride, positions, page_tables,
        layer_offset, head_bytes, key_scales, values_offset, value_scales, value_columns, rope,
    ):  # fmt: skip
        head = ptx.block_x()
        row = ptx.block_y()
        pages = ptx.load_i64(page_tables + 8 * row)
        if pages != 0:
            position = ptx.load_i64(positions + 8 * row)
            within = position % PAGE
            place = ptx.load_i64(pages + position // PAGE * 8) + layer_offset + head * head_bytes
            numbers = cuda.shared.array(most, float32)
            if ptx.block_z() == 0:
                source = keys + row * keys_stride + 4 * head * key_size
                store_key(numbers, source, rope, row, place, within, key_scales)
            else:
                source = values + row * values_stride + 4 * head * value_size
                scales = place + value_scales
                store_value(numbers, source, place + values_offset, within, scales, value_columns)

    return kernel
