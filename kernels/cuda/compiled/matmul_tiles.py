"""GEMM with a few rows of activations on tensor cores, for which weights are read once.

A block of eight warps computes a tile of 16 rows of weights. Of every 32 units of a row a warp reads four, a lane one,
and the four lanes of a quad then exchange words, so that each unit is multiplied in one mma (two for Q6_K, whose halves
have scales of their own). Every unit has the same position in the sums as in `matmul`, so the bits are equal.

On an H200 eight rows took 2.3 times as long as one by `matmul`: if `rates` shows no gain, this is to be deleted.
"""

from numba import cuda, float32, int64

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.matmul import GATED, GATED_CODES, PLAIN, ROW_BYTES, SLOTS, finished, pick_slot
from localinfer.kernels.cuda.compiled.quantize import quantize_written
from localinfer.kernels.cuda.compiled.weights import (
    BYTES,
    FIFTH_BITS,
    nibbles_of,
    prefetch_rows,
    row_of,
    signed_halves,
    unit_of,
)
from localinfer.kernels.cuda.jit import inline, template
from localinfer.kernels.cuda.weights import unit_columns
from localinfer.kernels.layouts import Layout

WARPS = 8
THREADS = 32 * WARPS
TILE = 16
"""Rows of weights of a tile, multiplied by eight rows of activations; of gate and up eight each."""

_BIAS = 0x4B400000
_BIAS_FLOAT = 12582912.0
"""Bits and value of 1.5 * 2^23: a whole number below 2^22 added to these bits is added to the value, exactly."""


@inline
def transposed(a, b, c, d, within):
    """Word number `within` of each lane of a quad, of the four words that each of them holds."""
    is_odd = within % 2 == 1
    word = ptx.shuffle_word(a if is_odd else b, 1)
    a, b = (word, b) if is_odd else (a, word)
    word = ptx.shuffle_word(c if is_odd else d, 1)
    c, d = (word, d) if is_odd else (c, word)
    is_upper = within >= 2
    word = ptx.shuffle_word(a if is_upper else c, 2)
    a, c = (word, c) if is_upper else (a, word)
    word = ptx.shuffle_word(b if is_upper else d, 2)
    b, d = (word, d) if is_upper else (b, word)
    return a, b, c, d


def _bounds(layout, batch_rows, tiles, split, kind):
    """Two blocks on a multiprocessor, where the sums of a tile leave registers for that."""
    return (THREADS, 2) if batch_rows <= 8 and tiles == 1 else None


@template(floats="scale", tuples={**SLOTS, **ROW_BYTES}, bounds=_bounds)
def matmul_tiles(layout, batch_rows, tiles, split, kind):
    """Multiply as `matmul.matmul` does, of quantized weights: a grid of [16 * tiles rows of weights, or 8 of both].

    batch_rows: rows of activations, all computed, at most 16. split: parts of a row that are summed apart.
    """
    gated = kind in (GATED, GATED_CODES)
    quantizes = kind == GATED_CODES
    matrices = 2 if gated else 1
    num_tiles = tiles
    tile_rows = TILE * tiles // matrices
    lane_rows = 2 * num_tiles
    columns = 2 if batch_rows > 8 else 1
    is_bytes = layout in BYTES
    is_q6 = layout == Layout.Q6_K
    is_q8 = layout == Layout.Q8_0
    has_bits = is_q6 or layout in FIFTH_BITS
    columns_per_unit = unit_columns(layout)
    words = 4 * lane_rows
    input_words = 8 * columns
    inputs = 2 * columns
    sums_size = 16 * num_tiles * columns
    partial_size = num_tiles * columns * 128
    shared_size = WARPS * partial_size
    half = 128 // matrices
    outputs = tiles * columns * half
    rounds = -(-outputs // THREADS)
    totals_size = rounds * matrices
    fields_at = unit_of(layout)
    nibbles_at = nibbles_of(layout)

    def kernel(
        x, x_stride, records, records_stride, num_columns, activation, slot_0, slot_1, slot_2, row_bytes
    ):  # fmt: skip
        lane = ptx.thread() % 32
        warp = ptx.thread() // 32
        group = lane // 4
        within = lane % 4
        block = ptx.block_x()
        slot = slot_0
        if kind == PLAIN:
            slot, block = pick_slot(block, tile_rows, slot_0, slot_1, slot_2)
        _, _, _, _, num_rows, out, out_stride, bias, residual, residual_stride, scale = slot
        first = block * tile_rows
        # All that the block will read of weights, so that it waits for memory once.
        count = min(tile_rows, num_rows - first)
        prefetch_rows(slot[:4], row_bytes, first, count, THREADS)
        if gated:
            prefetch_rows(slot_1[:4], row_bytes, first, count, THREADS)
        ptx.wait_for_previous()

        codes_at = cuda.local.array(lane_rows, int64)
        scales_at = cuda.local.array(lane_rows, int64)
        extra_at = cuda.local.array(lane_rows, int64)
        supers_at = cuda.local.array(lane_rows, int64)
        for r in range(lane_rows):
            # Rows past the end read the last one, and are not stored.
            row = first + group if gated else first + r // 2 * TILE + r % 2 * 8 + group
            row = min(row, num_rows - 1)
            arrays = slot_1[:4] if gated and r == 1 else slot[:4]
            codes_at[r], scales_at[r], extra_at[r], supers_at[r] = row_of(arrays, row_bytes, row)

        sums = cuda.local.array(sums_size, float32)
        code = cuda.local.array(words, int64)
        first_scale = cuda.local.array(lane_rows, float32)
        second_scale = cuda.local.array(lane_rows, float32)
        lower = cuda.local.array(lane_rows, int64)
        upper = cuda.local.array(lane_rows, int64)
        given = cuda.local.array(input_words, int64)
        x_scale = cuda.local.array(inputs, float32)
        left_sum = cuda.local.array(inputs, int64)
        right_sum = cuda.local.array(inputs, int64)
        factor = cuda.local.array(2, float32)
        other_factor = cuda.local.array(2, float32)
        low = cuda.local.array(2, int64)
        high = cuda.local.array(2, int64)
        totals = cuda.local.array(totals_size, float32)
        partial = cuda.shared.array(shared_size, float32)
        num_units = num_columns // columns_per_unit
        part = 0
        while part < split:
            for i in range(sums_size):
                sums[i] = float32(0.0)
            quad = part * 32 + 4 * warp
            while quad < num_units:
                unit = min(quad + within, num_units - 1)
                for r in range(lane_rows):
                    loaded = ptx.load_stream(codes_at[r] + 16 * unit)
                    for w in range(4):
                        code[4 * r + w] = loaded[w]
                for r in range(lane_rows):
                    fields = fields_at(scales_at[r], extra_at[r], supers_at[r], unit)
                    first_scale[r], second_scale[r], lower[r], upper[r] = fields
                    if quad + within >= num_units:
                        first_scale[r] = float32(0.0)
                        second_scale[r] = float32(0.0)
                for n in range(columns):
                    row_x = x + min(8 * n + group, batch_rows - 1) * x_stride
                    loaded = ptx.load_v4(row_x + columns_per_unit * unit)
                    loaded = transposed(loaded[0], loaded[1], loaded[2], loaded[3], within)
                    for w in range(4):
                        given[8 * n + w] = loaded[w]
                    if not is_bytes:
                        loaded = ptx.load_v4(row_x + 32 * unit + 16)
                        loaded = transposed(loaded[0], loaded[1], loaded[2], loaded[3], within)
                        for w in range(4):
                            given[8 * n + 4 + w] = loaded[w]
                for r in range(lane_rows):
                    loaded = transposed(code[4 * r], code[4 * r + 1], code[4 * r + 2], code[4 * r + 3], within)
                    for w in range(4):
                        code[4 * r + w] = loaded[w]

                for j in range(4):
                    source = lane - within + j
                    record_at = records + 8 * min(quad + j, num_units - 1)
                    if is_bytes:
                        record_at = records + min(quad + j, num_units - 1) // 2 * 8
                    for c in range(inputs):
                        row = min(c // 2 * 8 + 2 * within + c % 2, batch_rows - 1)
                        record = ptx.load_v2(record_at + row * records_stride)
                        x_scale[c] = ptx.bits_float(record[0])
                        left_sum[c], right_sum[c] = signed_halves(record[1])
                    for i in range(num_tiles):
                        for r in range(2):
                            factor[r] = ptx.shuffle_from(first_scale[2 * i + r], source)
                            if not is_q8:
                                other_factor[r] = ptx.shuffle_from(second_scale[2 * i + r], source)
                            word = code[8 * i + 4 * r + j]
                            low[r] = word
                            if not is_bytes:
                                lower_bits = int64(0)
                                upper_bits = int64(0)
                                if has_bits:
                                    lower_bits = ptx.fetch_word(lower[2 * i + r], source)
                                if is_q6:
                                    upper_bits = ptx.fetch_word(upper[2 * i + r], source)
                                low[r], high[r] = nibbles_at(word, lower_bits, upper_bits, within)
                        for n in range(columns):
                            left = given[8 * n + j]
                            start = int64(_BIAS)
                            if is_q6:
                                even = start - 32 * left_sum[2 * n]
                                odd = start - 32 * left_sum[2 * n + 1]
                                dots = ptx.multiply_half_signed(low[0], low[1], left, even, odd, even, odd)
                                even = start - 32 * right_sum[2 * n]
                                odd = start - 32 * right_sum[2 * n + 1]
                                right = given[8 * n + 4 + j]
                                others = ptx.multiply_half_signed(high[0], high[1], right, even, odd, even, odd)
                            elif is_q8:
                                dots = ptx.multiply_half_signed(low[0], low[1], left, start, start, start, start)
                            elif is_bytes:
                                dots = ptx.multiply_half_unsigned(low[0], low[1], left, start, start, start, start)
                            else:
                                right = given[8 * n + 4 + j]
                                dots = ptx.multiply_signed(
                                    low[0], low[1], high[0], high[1], left, right, start, start, start, start
                                )
                            for e in range(4):
                                c = 2 * n + e % 2
                                dot = ptx.bits_float(dots[e]) - float32(_BIAS_FLOAT)
                                product = factor[e // 2] * dot
                                if is_q6:
                                    dot = ptx.bits_float(others[e]) - float32(_BIAS_FLOAT)
                                    product = product + other_factor[e // 2] * dot
                                elif is_bytes and not is_q8:
                                    x_sum = left_sum[c] if j % 2 == 0 else right_sum[c]
                                    product = product + other_factor[e // 2] * ptx.to_float(x_sum)
                                elif not is_q8:
                                    product = product + other_factor[e // 2] * ptx.to_float(left_sum[c] + right_sum[c])
                                place = ((i * columns + n) * 4 + j) * 4 + e
                                sums[place] = sums[place] + x_scale[c] * product
                quad = quad + 32 * split

            # A unit's number among 32 is that of the lane which holds it in `matmul`: the same sums in the same order.
            for t in range(num_tiles * columns):
                for e in range(4):
                    left_pair = sums[16 * t + e] + sums[16 * t + 4 + e]
                    right_pair = sums[16 * t + 8 + e] + sums[16 * t + 12 + e]
                    partial[warp * partial_size + 128 * t + 32 * e + lane] = left_pair + right_pair
            ptx.syncthreads()
            for output_round in range(rounds):
                for m in range(matrices):
                    # Of gate and up, the upper eight rows of a tile are gate's.
                    at = ptx.thread() + THREADS * output_round
                    if at < outputs:
                        at = at // half * 128 + m * half + at % half
                        pairs = cuda.local.array(4, float32)
                        for w in range(4):
                            pairs[w] = partial[2 * w * partial_size + at] + partial[(2 * w + 1) * partial_size + at]
                        total = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
                        if part > 0:
                            total = totals[output_round * matrices + m] + total
                        totals[output_round * matrices + m] = total
            ptx.syncthreads()
            part = part + 1

        for output_round in range(rounds):
            at = ptx.thread() + THREADS * output_round
            tile = at // half
            row = first + tile // columns * TILE + at % half // 64 * 8 + at % 32 // 4
            m = tile % columns * 8 + at % 4 * 2 + at // 32 % 2
            if at < outputs and row < num_rows and m < batch_rows:
                value, up = totals[output_round * matrices], totals[output_round * matrices + matrices - 1]
                value = finished(
                    value, up, gated, activation, bias, slot_1[7], scale, residual, m * residual_stride, row
                )
                ptx.store_f32(out + m * out_stride + 4 * row, value)
        if quantizes:
            quantize_written(out, out_stride, slot_2[:6], tile_rows, batch_rows, WARPS)

    return kernel
