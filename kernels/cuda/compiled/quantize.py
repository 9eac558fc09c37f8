"""Activations as whole numbers: per block of 32 columns int8 codes and a record of their scale and sums.

A record is two 32-bit words: the scale, float32, and the sums of the codes of either half of the block as int16, the
first half's in the lower bits. Rounding is that of the CPU's kernels, so both devices multiply the same codes.
"""

from numba import float32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.last_block import is_last_block
from localinfer.kernels.cuda.compiled.reductions import warp_max
from localinfer.kernels.cuda.jit import inline, kernel


@inline
def store_quantized(x, lane, codes, records, column):
    """Quantize a block of 32 columns, one to each lane of a warp; all of its lanes must call it."""
    largest = ptx.maximum(x, -x)
    largest = warp_max(largest)
    inverse = float32(0.0)
    if largest > float32(0.0):
        inverse = ptx.divide(float32(127.0), largest)
    code = ptx.to_int(x * inverse)
    ptx.store_u8(codes + column, code & 255)
    total = code
    for distance in (8, 4, 2, 1):
        total = total + ptx.shuffle_int(total, distance)
    other = ptx.shuffle_int(total, 16)
    if lane == 0:
        record = records + column // 32 * 8
        ptx.store_u32(record, ptx.float_bits(ptx.divide(largest, float32(127.0))))
        ptx.store_u32(record + 4, (total & 0xFFFF) | ((other & 0xFFFF) << 16))


@inline
def quantize_written(x, x_stride, into, block_columns, batch_rows, warps):
    """Quantize 32 columns of `batch_rows` rows, of which every block of the grid has written `block_columns`.

    The last of the blocks of 32 columns does it, with its `warps` warps. into: codes and records with their strides,
    0, and the counters of blocks, uint32 per 32 columns.
    """
    codes, codes_stride, records, records_stride, _, counters = into
    blocks = 32 // block_columns
    block = ptx.block_x() // blocks
    if is_last_block(counters + 4 * block, blocks):
        lane = ptx.thread() % 32
        column = 32 * block + lane
        row = ptx.thread() // 32
        while row < batch_rows:
            value = ptx.load_f32(x + row * x_stride + 4 * column)
            store_quantized(value, lane, codes + row * codes_stride, records + row * records_stride, column)
            row = row + warps


@kernel()
def quantize_rows(x, x_stride, codes, codes_stride, records, records_stride, num_columns):
    """Quantize rows: a warp per block of 32 columns, a grid of [blocks / 4, rows]."""
    lane = ptx.thread() % 32
    column = (ptx.block_x() * 4 + ptx.thread() // 32) * 32 + lane
    row = ptx.block_y()
    if column - lane < num_columns:
        value = ptx.load_f32(x + row * x_stride + 4 * column)
        store_quantized(value, lane, codes + row * codes_stride, records + row * records_stride, column)
