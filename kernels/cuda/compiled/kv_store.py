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


@template("qqqqqqqqqqqqq" + ROPE)
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


@inline
def store_head_floats(numbers, size, place, stride, is_half):
    """Write a head as plain numbers, `stride` elements apart."""
    column = ptx.thread()
    while column < size:
        if is_half:
            ptx.store_u16(place + 2 * stride * column, ptx.float_to_half(numbers[column]))
        else:
            ptx.store_f32(place + 4 * stride * column, numbers[column])
        column = column + THREADS


@template("qqqqqqqqqqqq" + ROPE)
def store_codes(key_kind, value_kind, key_size, value_size):
    """Write keys, after RoPE if it has pairs, and values, at least one of them as codes.

    A block to a head's keys or values, of [KV heads, rows, 2]. Rows without a page table stay out.
    """
    key_is_codes = key_kind == CODES
    value_is_codes = value_kind == CODES
    key_is_half_bytes = key_kind == HALF_BYTES
    value_is_half_bytes = value_kind == HALF_BYTES
    most = max(key_size, value_size)
    key_stages = rotation_stages(key_size) if key_kind <= CODES else 0
    value_stages = rotation_stages(value_size) if value_kind <= CODES else 0
    key_factor = rotation_factor(key_size) if key_kind <= CODES else 1.0
    value_factor = rotation_factor(value_size) if value_kind <= CODES else 1.0
    key_blocks = -(-key_size // SCALE_BLOCK)
    # A group of sixteen positions of keys: bytes of it where they are codes, else elements.
    group_size = 16 * (-(-key_size // 4) * 4 if key_is_codes else key_size)
    if key_is_half_bytes:
        group_size = -(-key_size // 8) * 64

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
            group = within // 16
            slot = within % 16
            place = ptx.load_i64(pages + position // PAGE * 8) + layer_offset + head * head_bytes
            numbers = cuda.shared.array(most, float32)
            column = ptx.thread()
            if ptx.block_z() == 0:
                source = keys + row * keys_stride + 4 * head * key_size
                while column < key_size:
                    value = rotated(source, column, rope, row)
                    numbers[column] = value * float32(key_factor)
                    column = column + THREADS
                fold(numbers, key_size, key_stages)
                if key_is_codes:
                    scales = place + key_scales + group * 32 * key_blocks + 2 * slot
                    codes = place + group * group_size + 4 * slot
                    store_head_codes(numbers, key_size, codes, 4, 64, 128, scales, 32)
                elif key_is_half_bytes:
                    scales = place + key_scales + group * 32 * key_blocks + 2 * slot
                    codes = place + group * group_size + 4 * slot
                    store_head_half_bytes(numbers, key_size, codes, 4, 1, scales, 32)
                else:
                    first = place + (group * group_size + slot) * key_kind
                    store_head_floats(numbers, key_size, first, 16, key_kind == HALVES)
            else:
                source = values + row * values_stride + 4 * head * value_size
                while column < value_size:
                    numbers[column] = ptx.load_f32(source + 4 * column) * float32(value_factor)
                    column = column + THREADS
                fold(numbers, value_size, value_stages)
                if value_is_codes:
                    codes = place + values_offset + within // 2 * 2 * value_columns + within % 2
                    store_head_codes(numbers, value_size, codes, 1, 2, 0, place + value_scales + 2 * within, 64)
                elif value_is_half_bytes:
                    # The bytes of a column belong to positions 0, 2, 1 and 3.
                    byte = within % 2 * 2 + within % 4 // 2
                    codes = place + values_offset + within // 4 * 2 * value_columns + byte
                    store_head_half_bytes(numbers, value_size, codes, 16, 4, place + value_scales + 2 * within, 64)
                else:
                    first = place + values_offset + within * value_columns * value_kind
                    store_head_floats(numbers, value_size, first, 1, value_kind == HALVES)

    return kernel
