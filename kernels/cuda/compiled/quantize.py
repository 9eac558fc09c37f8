"""Activations as whole numbers: per block of 32 columns int8 codes and a record of their scale and sums.

A record is two 32-bit words: the scale, float32, and the sums of the codes of either half of the block as int16, the
first half's in the lower bits. Rounding is that of the CPU's kernels, so both devices multiply the same codes.
"""

from numba import float32

from localinfer.kernels.cuda.compiled.ptx import (
    block_x,
    block_y,
    divide,
    float_bits,
    load_f32,
    maximum,
    shuffle,
    shuffle_int,
    store_u8,
    store_u32,
    thread,
    to_int,
)
from localinfer.kernels.cuda.jit import inline, template


@inline
def store_quantized(x, lane, codes, records, column):
    """Quantize a block of 32 columns, one to each lane of a warp; all of its lanes must call it."""
    largest = maximum(x, -x)
    for distance in (16, 8, 4, 2, 1):
        largest = maximum(largest, shuffle(largest, distance))
    inverse = float32(0.0)
    if largest > float32(0.0):
        inverse = divide(float32(127.0), largest)
    code = to_int(x * inverse)
    store_u8(codes + column, code & 255)
    total = code
    for distance in (8, 4, 2, 1):
        total = total + shuffle_int(total, distance)
    other = shuffle_int(total, 16)
    if lane == 0:
        record = records + column // 32 * 8
        store_u32(record, float_bits(divide(largest, float32(127.0))))
        store_u32(record + 4, (total & 0xFFFF) | ((other & 0xFFFF) << 16))


@template("qqqqqqq")
def quantize_rows():
    """Quantize rows: a warp per block of 32 columns, a grid of [blocks / 4, rows]."""

    def kernel(x, x_stride, codes, codes_stride, records, records_stride, num_columns):
        lane = thread() % 32
        column = (block_x() * 4 + thread() // 32) * 32 + lane
        row = block_y()
        if column - lane < num_columns:
            value = load_f32(x + row * x_stride + 4 * column)
            store_quantized(value, lane, codes + row * codes_stride, records + row * records_stride, column)

    return kernel
