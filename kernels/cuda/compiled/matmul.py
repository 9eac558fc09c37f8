"""Products of weights with a few rows of activations, read once for all of them: the kernels of decoding.

A warp takes a few rows of weights, its lanes the units of those rows in turn, 32 units apart; every lane keeps a sum
for each row of weights and of activations, and lanes add theirs in one fixed order. How a row is split depends on the
weights alone, never on how many rows of activations there are: one token and eight of a draft get the same bits, also
where `matmul_tiles` computes those.
"""

from numba import cuda, float32, int64

from localinfer.kernels.cuda.compiled.activations import activate_gate
from localinfer.kernels.cuda.compiled.ptx import (
    bits_float,
    block_x,
    block_y,
    dot_signed,
    dot_unsigned,
    half_to_float,
    load_f32,
    load_stream,
    load_u32,
    load_v2,
    load_v4,
    meet,
    prefetch,
    shuffle,
    store_f32,
    thread,
    to_float,
    to_int,
    wait_for_previous,
)
from localinfer.kernels.cuda.compiled.weights import BYTES, FIFTH_BITS, half_scales, scales_of, spread_bits
from localinfer.kernels.cuda.jit import template
from localinfer.kernels.layouts import Layout

PLAIN, GATED, EXPERTS = 0, 1, 2
"""Kinds of products: up to three weights of one input; gate and up joined by an activation; one expert per slot."""

NUM_SLOTS = 3
SLOT = "qqqqqqqqqqf"
"""Parameters of a weight: its four planes, rows, out and stride, bias, residual and stride, scale."""


@template("qqqqqq" + SLOT * NUM_SLOTS + "qqqqqqqq")
def matmul(layout, batch_rows, weight_rows, split, kind, prefetches=0):
    """Multiply: a block of four warps, `split` of them to a row, a grid of [groups of rows * split / 4, slots].

    layout: of all weights. batch_rows: rows of activations, all computed; outputs have room for as many.
    prefetches: 1 has the first weights on their way before the kernel waits for the one before it; not for EXPERTS.
    weight_rows: rows of each weight to a warp. Plain numbers meet float32 activations, the others quantized ones.
    """
    gated = kind == GATED
    matrices = 2 if gated else 1
    rows = weight_rows * matrices
    size = rows * batch_rows
    is_float = layout <= Layout.BF16
    is_bytes = layout in BYTES
    is_q6 = layout == Layout.Q6_K
    is_q8 = layout == Layout.Q8_0
    is_f32 = layout == Layout.F32
    is_f16 = layout == Layout.F16
    has_fifth = layout in FIFTH_BITS
    columns_per_unit = 4 if is_f32 else 8 if is_float else 16 if is_bytes else 32
    words = 4 * rows
    groups_per_block = 4 // split
    shared_size = 4 * size
    scales_at = None if is_float or is_q6 else scales_of(layout)

    def kernel(
        x, x_stride, records, records_stride, num_columns, activation,
        codes_0, scales_0, extra_0, supers_0, rows_0,
        out_0, out_stride_0, bias_0, residual_0, residual_stride_0, scale_0,
        codes_1, scales_1, extra_1, supers_1, rows_1,
        out_1, out_stride_1, bias_1, residual_1, residual_stride_1, scale_1,
        codes_2, scales_2, extra_2, supers_2, rows_2,
        out_2, out_stride_2, bias_2, residual_2, residual_stride_2, scale_2,
        codes_bytes, scales_bytes, extra_bytes, supers_bytes, expert_ids, expert_stride, num_selected, x_slot_stride,
    ):  # fmt: skip
        lane = thread() % 32
        warp = thread() // 32
        group = block_x() * groups_per_block + warp // split
        part = warp % split
        codes_place, scales_place, extra_place, supers_place = codes_0, scales_0, extra_0, supers_0
        num_rows, out, out_stride, bias = rows_0, out_0, out_stride_0, bias_0
        residual, residual_stride, scale = residual_0, residual_stride_0, scale_0
        if kind == PLAIN:
            groups_0 = (rows_0 + weight_rows - 1) // weight_rows
            groups_1 = (rows_1 + weight_rows - 1) // weight_rows
            # The last block may have warps to spare, which go past the end of the last weight there is.
            if rows_2 > 0 and group >= groups_0 + groups_1:
                group = group - groups_0 - groups_1
                codes_place, scales_place, extra_place, supers_place = codes_2, scales_2, extra_2, supers_2
                num_rows, out, out_stride, bias = rows_2, out_2, out_stride_2, bias_2
                residual, residual_stride, scale = residual_2, residual_stride_2, scale_2
            elif rows_1 > 0 and group >= groups_0:
                group = group - groups_0
                codes_place, scales_place, extra_place, supers_place = codes_1, scales_1, extra_1, supers_1
                num_rows, out, out_stride, bias = rows_1, out_1, out_stride_1, bias_1
                residual, residual_stride, scale = residual_1, residual_stride_1, scale_1
        expert = int64(0)
        if kind == EXPERTS:
            slot = block_y() % num_selected
            row = block_y() // num_selected
            expert = slot
            if expert_ids != 0:
                expert = to_int(load_f32(expert_ids + row * expert_stride + 4 * slot))
            x = x + row * x_stride + slot * x_slot_stride
            records = records + row * records_stride + slot * (x_slot_stride // 32 * 8)
            # Of experts, out_1 is the stride between the outputs of slots and rows_1 that of their biases.
            out = out + row * out_stride + slot * out_1
            bias = bias + expert * rows_1

        first = group * weight_rows
        codes_at = cuda.local.array(rows, int64)
        scales_at_row = cuda.local.array(rows, int64)
        extra_at = cuda.local.array(rows, int64)
        supers_at = cuda.local.array(rows, int64)
        for r in range(rows):
            # Rows past the end read the last one, and are not stored.
            row = expert * num_rows + min(first + r % weight_rows, num_rows - 1)
            if gated and r >= weight_rows:
                codes_at[r] = codes_1 + row * codes_bytes
                scales_at_row[r] = scales_1 + row * scales_bytes
                extra_at[r] = extra_1 + row * extra_bytes
                supers_at[r] = supers_1 + row * supers_bytes
            else:
                codes_at[r] = codes_place + row * codes_bytes
                scales_at_row[r] = scales_place + row * scales_bytes
                extra_at[r] = extra_place + row * extra_bytes
                supers_at[r] = supers_place + row * supers_bytes

        sums = cuda.local.array(size, float32)
        code = cuda.local.array(words, int64)
        first_scale = cuda.local.array(rows, float32)
        second_scale = cuda.local.array(rows, float32)
        fifth = cuda.local.array(rows, int64)
        upper = cuda.local.array(rows, int64)
        for i in range(size):
            sums[i] = float32(0.0)
        num_units = (num_columns + columns_per_unit - 1) // columns_per_unit
        unit = part * 32 + lane
        if prefetches:
            for r in range(rows):
                prefetch(codes_at[r] + 16 * min(unit, num_units - 1))
            wait_for_previous()
        while unit < num_units:
            for r in range(rows):
                loaded = load_stream(codes_at[r] + 16 * unit)
                for w in range(4):
                    code[4 * r + w] = loaded[w]
            if is_float:
                column = unit * columns_per_unit
                for c in range(columns_per_unit):
                    if column + c < num_columns:
                        for m in range(batch_rows):
                            value = load_f32(x + m * x_stride + 4 * (column + c))
                            for r in range(rows):
                                if is_f32:
                                    weight = bits_float(code[4 * r + c])
                                elif is_f16:
                                    weight = half_to_float((code[4 * r + c // 2] >> (c % 2 * 16)) & 0xFFFF)
                                else:
                                    weight = bits_float(((code[4 * r + c // 2] >> (c % 2 * 16)) & 0xFFFF) << 16)
                                sums[m * rows + r] = sums[m * rows + r] + weight * value
            elif is_bytes:
                for r in range(rows):
                    first_scale[r], second_scale[r] = scales_at(scales_at_row[r], unit // 2)
                for m in range(batch_rows):
                    left = load_v4(x + m * x_stride + 16 * unit)
                    record = load_v2(records + m * records_stride + unit // 2 * 8)
                    x_sum = to_float((((record[1] >> (unit % 2 * 16)) & 0xFFFF) ^ 0x8000) - 0x8000)
                    for r in range(rows):
                        dot = int64(0)
                        for w in range(4):
                            if is_q8:
                                dot = dot_signed(code[4 * r + w], left[w], dot)
                            else:
                                dot = dot_unsigned(code[4 * r + w], left[w], dot)
                        product = first_scale[r] * to_float(dot)
                        if not is_q8:
                            product = product + second_scale[r] * x_sum
                        sums[m * rows + r] = sums[m * rows + r] + bits_float(record[0]) * product
            else:
                for r in range(rows):
                    if is_q6:
                        first_scale[r], second_scale[r] = half_scales(scales_at_row[r], supers_at[r], unit)
                        fifth[r], upper[r] = load_v2(extra_at[r] + 8 * unit)
                    else:
                        first_scale[r], second_scale[r] = scales_at(scales_at_row[r], unit)
                        if has_fifth:
                            fifth[r] = load_u32(extra_at[r] + 4 * unit)
                for m in range(batch_rows):
                    left = load_v4(x + m * x_stride + 32 * unit)
                    right = load_v4(x + m * x_stride + 32 * unit + 16)
                    record = load_v2(records + m * records_stride + 8 * unit)
                    left_sum = ((record[1] & 0xFFFF) ^ 0x8000) - 0x8000
                    right_sum = ((record[1] >> 16) ^ 0x8000) - 0x8000
                    for r in range(rows):
                        dot = int64(0)
                        other = int64(0)
                        for w in range(4):
                            low = code[4 * r + w] & 0x0F0F0F0F
                            high = (code[4 * r + w] >> 4) & 0x0F0F0F0F
                            if is_q6:
                                low = low | (((fifth[r] >> (2 * w)) & 0x03030303) << 4)
                                high = high | (((upper[r] >> (2 * w)) & 0x03030303) << 4)
                            if has_fifth:
                                low = low | spread_bits(fifth[r] >> (4 * w))
                                high = high | spread_bits(fifth[r] >> (4 * w + 16))
                            dot = dot_signed(low, left[w], dot)
                            if is_q6:
                                other = dot_signed(high, right[w], other)
                            else:
                                dot = dot_signed(high, right[w], dot)
                        if is_q6:
                            product = first_scale[r] * to_float(dot - 32 * left_sum)
                            product = product + second_scale[r] * to_float(other - 32 * right_sum)
                        else:
                            product = first_scale[r] * to_float(dot) + second_scale[r] * to_float(left_sum + right_sum)
                        sums[m * rows + r] = sums[m * rows + r] + bits_float(record[0]) * product
            unit = unit + 32 * split

        for i in range(size):
            for step in range(5):
                sums[i] = sums[i] + shuffle(sums[i], 1 << step)
        if split > 1:
            partial = cuda.shared.array(shared_size, float32)
            if lane == 0:
                for i in range(size):
                    partial[warp * size + i] = sums[i]
            meet()
            for i in range(size):
                total = partial[(warp - part) * size + i]
                for p in range(1, split):
                    total = total + partial[(warp - part + p) * size + i]
                sums[i] = total
        for m in range(batch_rows):
            for r in range(weight_rows):
                row = first + r
                if part == 0 and lane == (m * weight_rows + r) % 32 and row < num_rows:
                    value = sums[m * rows + r]
                    if bias != 0:
                        value = value + load_f32(bias + 4 * row)
                    if gated:
                        up = sums[m * rows + weight_rows + r]
                        if bias_1 != 0:
                            up = up + load_f32(bias_1 + 4 * row)
                        value = activate_gate(activation, value, up)
                    else:
                        value = scale * value
                        if residual != 0:
                            value = value + load_f32(residual + m * residual_stride + 4 * row)
                    store_f32(out + m * out_stride + 4 * row, value)

    return kernel
