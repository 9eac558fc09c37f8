"""Pooling of texts: means over the rows of a segment."""

from numba import float32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.jit import kernel

THREADS = 128


@kernel()
def mean_rows(out, out_stride, x, x_stride, width, output_rows, page_tables, num_rows):
    """The mean of the rows of the segment that an output row lies in, summed from its first row, of [columns, rows].

    Rows of one segment, and no others, have its page table.
    """
    column = ptx.block_x() * THREADS + ptx.thread()
    if column < width:
        row = ptx.load_i64(output_rows + 8 * ptx.block_y())
        pages = ptx.load_i64(page_tables + 8 * row)
        while row > 0 and ptx.load_i64(page_tables + 8 * (row - 1)) == pages:
            row = row - 1
        total = ptx.load_f32(x + row * x_stride + 4 * column)
        count = 1
        row = row + 1
        while row < num_rows and ptx.load_i64(page_tables + 8 * row) == pages:
            total = total + ptx.load_f32(x + row * x_stride + 4 * column)
            count = count + 1
            row = row + 1
        mean = total * ptx.divide(float32(1.0), ptx.to_float(count))
        ptx.store_f32(out + ptx.block_y() * out_stride + 4 * column, mean)
