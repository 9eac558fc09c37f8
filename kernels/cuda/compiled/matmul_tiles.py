"""Products of weights with a few rows of activations on tensor cores, weights read once for all of them.

A block of eight warps takes 16 rows of weights to a tile. Of every 32 units of a row a warp takes four, a lane one, and
the four lanes of a quad then exchange words, so that each unit meets the activations as one product of tiles (two for
Q6_K, whose halves have scales of their own). Every unit keeps its place in the sums of `matmul`, whose bits these have.
"""

from numba import cuda, float32, int64

from localinfer.kernels.cuda.compiled.activations import activate_gate
from localinfer.kernels.cuda.compiled.matmul import GATED, NUM_SLOTS, PLAIN, SLOT
from localinfer.kernels.cuda.compiled.ptx import (
    bits_float,
    block_x,
    fetch_word,
    load_f32,
    load_stream,
    load_u32,
    load_v2,
    load_v4,
    meet,
    multiply_half_signed,
    multiply_half_unsigned,
    multiply_signed,
    shuffle_from,
    shuffle_word,
    store_f32,
    thread,
    to_float,
    wait_for_previous,
)
from localinfer.kernels.cuda.compiled.weights import (
    BYTES,
    FIFTH_BITS,
    half_scales,
    prefetch_rows,
    scales_of,
    spread_bits,
)
from localinfer.kernels.cuda.jit import inline, template
from localinfer.kernels.layouts import Layout

WARPS = 8
THREADS = 32 * WARPS
TILE = 16
"""Rows of weights of a tile; eight rows of activations meet them."""

_BIAS = 0x4B400000
_BIAS_FLOAT = 12582912.0
"""Bits and value of 1.5 * 2^23: a whole number below 2^22 added to these bits is added to the value, exactly."""


@inline
def transposed(a, b, c, d, within):
    """Word number `within` of each lane of a quad, of the four words that each of them holds."""
    is_odd = within % 2 == 1
    word = shuffle_word(a if is_odd else b, 1)
    a, b = (word, b) if is_odd else (a, word)
    word = shuffle_word(c if is_odd else d, 1)
    c, d = (word, d) if is_odd else (c, word)
    is_upper = within >= 2
    word = shuffle_word(a if is_upper else c, 2)
    a, c = (word, c) if is_upper else (a, word)
    word = shuffle_word(b if is_upper else d, 2)
    b, d = (word, d) if is_upper else (b, word)
    return a, b, c, d


@template("qqqqqq" + SLOT * NUM_SLOTS + "qqqq")
def matmul_tiles(layout, batch_rows, tiles, split, kind):
    """Multiply as `matmul.matmul` does, of quantized weights: a grid of [16 * tiles rows of weights].

    batch_rows: rows of activations, all computed, at most 16. split: parts of a row that are summed apart.
    """
    gated = kind == GATED
    matrices = 2 if gated else 1
    num_tiles = tiles * matrices
    tile_rows = TILE * tiles
    lane_rows = 2 * num_tiles
    columns = 2 if batch_rows > 8 else 1
    is_bytes = layout in BYTES
    is_q6 = layout == Layout.Q6_K
    is_q8 = layout == Layout.Q8_0
    has_fifth = layout in FIFTH_BITS
    columns_per_unit = 16 if is_bytes else 32
    words = 4 * lane_rows
    input_words = 8 * columns
    inputs = 2 * columns
    sums_size = 16 * num_tiles * columns
    partial_size = num_tiles * columns * 128
    shared_size = WARPS * partial_size
    outputs = tiles * columns * 128
    turns = -(-outputs // THREADS)
    totals_size = turns * matrices
    scales_at = None if is_q6 else scales_of(layout)

    def kernel(
        x, x_stride, records, records_stride, num_columns, activation,
        codes_0, scales_0, extra_0, supers_0, rows_0,
        out_0, out_stride_0, bias_0, residual_0, residual_stride_0, scale_0,
        codes_1, scales_1, extra_1, supers_1, rows_1,
        out_1, out_stride_1, bias_1, residual_1, residual_stride_1, scale_1,
        codes_2, scales_2, extra_2, supers_2, rows_2,
        out_2, out_stride_2, bias_2, residual_2, residual_stride_2, scale_2,
        codes_bytes, scales_bytes, extra_bytes, supers_bytes,
    ):  # fmt: skip
        lane = thread() % 32
        warp = thread() // 32
        group = lane // 4
        within = lane % 4
        block = block_x()
        codes_place, scales_place, extra_place, supers_place = codes_0, scales_0, extra_0, supers_0
        num_rows, out, out_stride, bias = rows_0, out_0, out_stride_0, bias_0
        residual, residual_stride, scale = residual_0, residual_stride_0, scale_0
        if kind == PLAIN:
            blocks_0 = (rows_0 + tile_rows - 1) // tile_rows
            blocks_1 = (rows_1 + tile_rows - 1) // tile_rows
            if block >= blocks_0 + blocks_1:
                block = block - blocks_0 - blocks_1
                codes_place, scales_place, extra_place, supers_place = codes_2, scales_2, extra_2, supers_2
                num_rows, out, out_stride, bias = rows_2, out_2, out_stride_2, bias_2
                residual, residual_stride, scale = residual_2, residual_stride_2, scale_2
            elif block >= blocks_0:
                block = block - blocks_0
                codes_place, scales_place, extra_place, supers_place = codes_1, scales_1, extra_1, supers_1
                num_rows, out, out_stride, bias = rows_1, out_1, out_stride_1, bias_1
                residual, residual_stride, scale = residual_1, residual_stride_1, scale_1
        first = block * tile_rows
        # All that the block will read of weights, so that it waits for memory once.
        count = min(tile_rows, num_rows - first)
        prefetch_rows(codes_place + first * codes_bytes, count * codes_bytes, THREADS)
        prefetch_rows(scales_place + first * scales_bytes, count * scales_bytes, THREADS)
        prefetch_rows(extra_place + first * extra_bytes, count * extra_bytes, THREADS)
        if gated:
            prefetch_rows(codes_1 + first * codes_bytes, count * codes_bytes, THREADS)
            prefetch_rows(scales_1 + first * scales_bytes, count * scales_bytes, THREADS)
            prefetch_rows(extra_1 + first * extra_bytes, count * extra_bytes, THREADS)
        wait_for_previous()

        codes_at = cuda.local.array(lane_rows, int64)
        scales_at_row = cuda.local.array(lane_rows, int64)
        extra_at = cuda.local.array(lane_rows, int64)
        supers_at = cuda.local.array(lane_rows, int64)
        for r in range(lane_rows):
            # Rows past the end read the last one, and are not stored.
            row = min(first + r // 2 % tiles * TILE + r % 2 * 8 + group, num_rows - 1)
            if gated and r >= 2 * tiles:
                codes_at[r] = codes_1 + row * codes_bytes
                scales_at_row[r] = scales_1 + row * scales_bytes
                extra_at[r] = extra_1 + row * extra_bytes
                supers_at[r] = supers_1 + row * supers_bytes
            else:
                codes_at[r] = codes_place + row * codes_bytes
                scales_at_row[r] = scales_place + row * scales_bytes
                extra_at[r] = extra_place + row * extra_bytes
                supers_at[r] = supers_place + row * supers_bytes

        sums = cuda.local.array(sums_size, float32)
        code = cuda.local.array(words, int64)
        first_scale = cuda.local.array(lane_rows, float32)
        second_scale = cuda.local.array(lane_rows, float32)
        fifth = cuda.local.array(lane_rows, int64)
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
                    loaded = load_stream(codes_at[r] + 16 * unit)
                    for w in range(4):
                        code[4 * r + w] = loaded[w]
                for r in range(lane_rows):
                    if is_q6:
                        first_scale[r], second_scale[r] = half_scales(scales_at_row[r], supers_at[r], unit)
                        fifth[r], upper[r] = load_v2(extra_at[r] + 8 * unit)
                    elif is_bytes:
                        first_scale[r], second_scale[r] = scales_at(scales_at_row[r], unit // 2)
                    else:
                        first_scale[r], second_scale[r] = scales_at(scales_at_row[r], unit)
                        if has_fifth:
                            fifth[r] = load_u32(extra_at[r] + 4 * unit)
                    if quad + within >= num_units:
                        first_scale[r] = float32(0.0)
                        second_scale[r] = float32(0.0)
                for n in range(columns):
                    row_x = x + min(8 * n + group, batch_rows - 1) * x_stride
                    loaded = load_v4(row_x + columns_per_unit * unit)
                    loaded = transposed(loaded[0], loaded[1], loaded[2], loaded[3], within)
                    for w in range(4):
                        given[8 * n + w] = loaded[w]
                    if not is_bytes:
                        loaded = load_v4(row_x + 32 * unit + 16)
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
                        record = load_v2(record_at + row * records_stride)
                        x_scale[c] = bits_float(record[0])
                        left_sum[c] = ((record[1] & 0xFFFF) ^ 0x8000) - 0x8000
                        right_sum[c] = ((record[1] >> 16) ^ 0x8000) - 0x8000
                    for i in range(num_tiles):
                        for r in range(2):
                            factor[r] = shuffle_from(first_scale[2 * i + r], source)
                            if not is_q8:
                                other_factor[r] = shuffle_from(second_scale[2 * i + r], source)
                            word = code[8 * i + 4 * r + j]
                            low[r] = word
                            if not is_bytes:
                                low[r] = word & 0x0F0F0F0F
                                high[r] = (word >> 4) & 0x0F0F0F0F
                            if is_q6:
                                bits = fetch_word(fifth[2 * i + r], source)
                                low[r] = low[r] | (((bits >> (2 * within)) & 0x03030303) << 4)
                                bits = fetch_word(upper[2 * i + r], source)
                                high[r] = high[r] | (((bits >> (2 * within)) & 0x03030303) << 4)
                            if has_fifth:
                                bits = fetch_word(fifth[2 * i + r], source)
                                low[r] = low[r] | spread_bits(bits >> (4 * within))
                                high[r] = high[r] | spread_bits(bits >> (4 * within + 16))
                        for n in range(columns):
                            left = given[8 * n + j]
                            start = int64(_BIAS)
                            if is_q6:
                                even = start - 32 * left_sum[2 * n]
                                odd = start - 32 * left_sum[2 * n + 1]
                                dots = multiply_half_signed(low[0], low[1], left, even, odd, even, odd)
                                even = start - 32 * right_sum[2 * n]
                                odd = start - 32 * right_sum[2 * n + 1]
                                right = given[8 * n + 4 + j]
                                others = multiply_half_signed(high[0], high[1], right, even, odd, even, odd)
                            elif is_q8:
                                dots = multiply_half_signed(low[0], low[1], left, start, start, start, start)
                            elif is_bytes:
                                dots = multiply_half_unsigned(low[0], low[1], left, start, start, start, start)
                            else:
                                right = given[8 * n + 4 + j]
                                dots = multiply_signed(
                                    low[0], low[1], high[0], high[1], left, right, start, start, start, start
                                )
                            for e in range(4):
                                c = 2 * n + e % 2
                                dot = bits_float(dots[e]) - float32(_BIAS_FLOAT)
                                product = factor[e // 2] * dot
                                if is_q6:
                                    dot = bits_float(others[e]) - float32(_BIAS_FLOAT)
                                    product = product + other_factor[e // 2] * dot
                                elif is_bytes and not is_q8:
                                    x_sum = left_sum[c] if j % 2 == 0 else right_sum[c]
                                    product = product + other_factor[e // 2] * to_float(x_sum)
                                elif not is_q8:
                                    product = product + other_factor[e // 2] * to_float(left_sum[c] + right_sum[c])
                                place = ((i * columns + n) * 4 + j) * 4 + e
                                sums[place] = sums[place] + x_scale[c] * product
                quad = quad + 32 * split

            # A unit's number among 32 is that of the lane which holds it in `matmul`: the same sums in the same order.
            for t in range(num_tiles * columns):
                for e in range(4):
                    left_pair = sums[16 * t + e] + sums[16 * t + 4 + e]
                    right_pair = sums[16 * t + 8 + e] + sums[16 * t + 12 + e]
                    partial[warp * partial_size + 128 * t + 32 * e + lane] = left_pair + right_pair
            meet()
            for turn in range(turns):
                for m in range(matrices):
                    at = thread() + THREADS * turn + m * outputs
                    if thread() + THREADS * turn < outputs:
                        pairs = cuda.local.array(4, float32)
                        for w in range(4):
                            pairs[w] = partial[2 * w * partial_size + at] + partial[(2 * w + 1) * partial_size + at]
                        total = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
                        if part > 0:
                            total = totals[turn * matrices + m] + total
                        totals[turn * matrices + m] = total
            meet()
            part = part + 1

        for turn in range(turns):
            at = thread() + THREADS * turn
            tile = at // 128
            row = first + tile // columns * TILE + at % 128 // 64 * 8 + at % 32 // 4
            m = tile % columns * 8 + at % 4 * 2 + at // 32 % 2
            if at < outputs and row < num_rows and m < batch_rows:
                value = totals[turn * matrices]
                if bias != 0:
                    value = value + load_f32(bias + 4 * row)
                if gated:
                    up = totals[turn * matrices + matrices - 1]
                    if bias_1 != 0:
                        up = up + load_f32(bias_1 + 4 * row)
                    value = activate_gate(activation, value, up)
                else:
                    value = scale * value
                    if residual != 0:
                        value = value + load_f32(residual + m * residual_stride + 4 * row)
                store_f32(out + m * out_stride + 4 * row, value)

    return kernel
