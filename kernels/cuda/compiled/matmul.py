"""GEMM with a few rows of activations, for which weights are read once: the kernels of decoding.

A warp computes a few rows of weights, each lane every 32nd unit; every lane has a sum for each row of weights and of
activations, and lanes are added in one fixed order. The split of a row depends only on the weights, never on the number
of rows of activations: one token and eight of a draft get the same bits, also from `matmul_tiles`.
"""

from numba import cuda, float32, int64

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.activations import activate_gate
from localinfer.kernels.cuda.compiled.quantize import quantize_written
from localinfer.kernels.cuda.compiled.weights import BYTES, FIFTH_BITS, nibbles_of, row_of, signed_halves, unit_of
from localinfer.kernels.cuda.jit import inline, template
from localinfer.kernels.cuda.weights import unit_columns
from localinfer.kernels.layouts import Layout

PLAIN, GATED, EXPERTS, GATED_CODES = range(4)
"""Kinds of products: up to three weights of one input; gate and up joined by an activation; one expert per slot; gate
and up whose result is quantized too, where the third slot has codes and records with their strides, 0 and counters."""

_SLOT = "codes scales high extra num_rows out out_stride bias residual residual_stride scale"
ROW_BYTES = {"row_bytes": "codes_row scales_row high_row extra_row"}
SLOTS = {"slot_0": _SLOT, "slot_1": _SLOT, "slot_2": _SLOT}
"""Parameters of three weights."""


@inline
def pick_slot(part, size, slot_0, slot_1, slot_2):
    """The weight that a part of `size` rows belongs to, and its number there; parts count through all three weights."""
    first = (slot_0[4] + size - 1) // size
    second = (slot_1[4] + size - 1) // size
    slot = slot_0
    # The last block may have warps to spare, which go past the end of the last weight there is.
    if slot_2[4] > 0 and part >= first + second:
        slot = slot_2
        part = part - first - second
    elif slot_1[4] > 0 and part >= first:
        slot = slot_1
        part = part - first
    return slot, part


@inline
def finished(value, up, gated, activation, bias, up_bias, scale, residual, residual_offset, row):
    """A product with its bias, as the gate of `up`, or scaled and added to a residual; addresses may be 0."""
    if bias != 0:
        value = value + ptx.load_f32(bias + 4 * row)
    if gated:
        if up_bias != 0:
            up = up + ptx.load_f32(up_bias + 4 * row)
        value = activate_gate(activation, value, up)
    else:
        value = scale * value
        if residual != 0:
            value = value + ptx.load_f32(residual + residual_offset + 4 * row)
    return value


def _bounds(layout, batch_rows, weight_rows, split, kind, prefetches=0):
    """Registers enough to load every weight of a unit before the first is used, for up to four rows of activations."""
    blocks = {1: 4, 2: 3, 4: 3 if layout == Layout.Q6_K or layout in FIFTH_BITS else 4}
    return (128, blocks[batch_rows]) if batch_rows in blocks else None


@template(floats="scale", tuples={**SLOTS, **ROW_BYTES}, bounds=_bounds)
def matmul(layout, batch_rows, weight_rows, split, kind, prefetches=0):
    """Multiply: a block of four warps, `split` of them to a row, a grid of [groups of rows * split / 4, slots].

    layout: of all weights. batch_rows: rows of activations, all computed; outputs have room for as many.
    prefetches: 1 requests the first weights before the kernel waits for the one before it; not for EXPERTS.
    weight_rows: rows of each weight per warp. Float weights are multiplied by float32 activations, others by codes.
    """
    gated = kind in (GATED, GATED_CODES)
    quantizes = kind == GATED_CODES
    matrices = 2 if gated else 1
    rows = weight_rows * matrices
    size = rows * batch_rows
    is_float = layout <= Layout.BF16
    is_bytes = layout in BYTES
    is_q6 = layout == Layout.Q6_K
    is_q8 = layout == Layout.Q8_0
    is_f32 = layout == Layout.F32
    is_f16 = layout == Layout.F16
    columns_per_unit = unit_columns(layout)
    words = 4 * rows
    groups_per_block = 4 // split
    block_rows = groups_per_block * weight_rows
    shared_size = 4 * size
    fields_at = None if is_float else unit_of(layout)
    nibbles_at = nibbles_of(layout)

    def kernel(
        x, x_stride, records, records_stride, num_columns, activation,
        slot_0, slot_1, slot_2, row_bytes, expert_ids, expert_stride, num_selected, x_slot_stride,
    ):  # fmt: skip
        lane = ptx.thread() % 32
        warp = ptx.thread() // 32
        group = ptx.block_x() * groups_per_block + warp // split
        part = warp % split
        slot = slot_0
        if kind == PLAIN:
            slot, group = pick_slot(group, weight_rows, slot_0, slot_1, slot_2)
        _, _, _, _, num_rows, out, out_stride, bias, residual, residual_stride, scale = slot
        expert = int64(0)
        if kind == EXPERTS:
            chosen = ptx.block_y() % num_selected
            row = ptx.block_y() // num_selected
            expert = chosen
            if expert_ids != 0:
                expert = ptx.to_int(ptx.load_f32(expert_ids + row * expert_stride + 4 * chosen))
            x = x + row * x_stride + chosen * x_slot_stride
            records = records + row * records_stride + chosen * (x_slot_stride // 32 * 8)
            # Of experts, the second weight's out is the stride between outputs and its rows that between biases.
            out = out + row * out_stride + chosen * slot_1[5]
            bias = bias + expert * slot_1[4]

        first = group * weight_rows
        codes_at = cuda.local.array(rows, int64)
        scales_at = cuda.local.array(rows, int64)
        extra_at = cuda.local.array(rows, int64)
        supers_at = cuda.local.array(rows, int64)
        for r in range(rows):
            # Rows past the end read the last one, and are not stored.
            row = expert * num_rows + min(first + r % weight_rows, num_rows - 1)
            arrays = slot_1[:4] if gated and r >= weight_rows else slot[:4]
            codes_at[r], scales_at[r], extra_at[r], supers_at[r] = row_of(arrays, row_bytes, row)

        sums = cuda.local.array(size, float32)
        code = cuda.local.array(words, int64)
        first_scale = cuda.local.array(rows, float32)
        second_scale = cuda.local.array(rows, float32)
        lower = cuda.local.array(rows, int64)
        upper = cuda.local.array(rows, int64)
        for i in range(size):
            sums[i] = float32(0.0)
        num_units = (num_columns + columns_per_unit - 1) // columns_per_unit
        unit = part * 32 + lane
        if prefetches:
            for r in range(rows):
                ptx.prefetch(codes_at[r] + 16 * min(unit, num_units - 1))
            ptx.wait_for_previous()
        while unit < num_units:
            for r in range(rows):
                loaded = ptx.load_stream(codes_at[r] + 16 * unit)
                for w in range(4):
                    code[4 * r + w] = loaded[w]
            if is_float:
                column = unit * columns_per_unit
                for c in range(columns_per_unit):
                    if column + c < num_columns:
                        for m in range(batch_rows):
                            value = ptx.load_f32(x + m * x_stride + 4 * (column + c))
                            for r in range(rows):
                                if is_f32:
                                    weight = ptx.bits_float(code[4 * r + c])
                                elif is_f16:
                                    weight = ptx.half_to_float((code[4 * r + c // 2] >> (c % 2 * 16)) & 0xFFFF)
                                else:
                                    weight = ptx.bits_float(((code[4 * r + c // 2] >> (c % 2 * 16)) & 0xFFFF) << 16)
                                sums[m * rows + r] = sums[m * rows + r] + weight * value
            else:
                for r in range(rows):
                    fields = fields_at(scales_at[r], extra_at[r], supers_at[r], unit)
                    first_scale[r], second_scale[r], lower[r], upper[r] = fields
            if is_bytes:
                for m in range(batch_rows):
                    left = ptx.load_v4(x + m * x_stride + 16 * unit)
                    record = ptx.load_v2(records + m * records_stride + unit // 2 * 8)
                    x_sum = ptx.to_float((((record[1] >> (unit % 2 * 16)) & 0xFFFF) ^ 0x8000) - 0x8000)
                    for r in range(rows):
                        dot = int64(0)
                        for w in range(4):
                            if is_q8:
                                dot = ptx.dot_signed(code[4 * r + w], left[w], dot)
                            else:
                                dot = ptx.dot_unsigned(code[4 * r + w], left[w], dot)
                        product = first_scale[r] * ptx.to_float(dot)
                        if not is_q8:
                            product = product + second_scale[r] * x_sum
                        sums[m * rows + r] = sums[m * rows + r] + ptx.bits_float(record[0]) * product
            elif not is_float:
                for m in range(batch_rows):
                    left = ptx.load_v4(x + m * x_stride + 32 * unit)
                    right = ptx.load_v4(x + m * x_stride + 32 * unit + 16)
                    record = ptx.load_v2(records + m * records_stride + 8 * unit)
                    left_sum, right_sum = signed_halves(record[1])
                    for r in range(rows):
                        dot = int64(0)
                        other = int64(0)
                        for w in range(4):
                            low, high = nibbles_at(code[4 * r + w], lower[r], upper[r], w)
                            dot = ptx.dot_signed(low, left[w], dot)
                            if is_q6:
                                other = ptx.dot_signed(high, right[w], other)
                            else:
                                dot = ptx.dot_signed(high, right[w], dot)
                        if is_q6:
                            product = first_scale[r] * ptx.to_float(dot - 32 * left_sum)
                            product = product + second_scale[r] * ptx.to_float(other - 32 * right_sum)
                        else:
                            x_sum = ptx.to_float(left_sum + right_sum)
                            product = first_scale[r] * ptx.to_float(dot) + second_scale[r] * x_sum
                        sums[m * rows + r] = sums[m * rows + r] + ptx.bits_float(record[0]) * product
            unit = unit + 32 * split

        for i in range(size):
            for step in range(5):
                sums[i] = sums[i] + ptx.shuffle(sums[i], 1 << step)
        if split > 1:
            partial = cuda.shared.array(shared_size, float32)
            if lane == 0:
                for i in range(size):
                    partial[warp * size + i] = sums[i]
            ptx.syncthreads()
            for i in range(size):
                total = partial[(warp - part) * size + i]
                for p in range(1, split):
                    total = total + partial[(warp - part + p) * size + i]
                sums[i] = total
        for m in range(batch_rows):
            for r in range(weight_rows):
                row = first + r
                if part == 0 and lane == (m * weight_rows + r) % 32 and row < num_rows:
                    value, up = sums[m * rows + r], sums[m * rows + rows - weight_rows + r]
                    value = finished(
                        value, up, gated, activation, bias, slot_1[7], scale, residual, m * residual_stride, row
                    )
                    ptx.store_f32(out + m * out_stride + 4 * row, value)
        if quantizes:
            quantize_written(out, out_stride, slot_2[:6], block_rows, batch_rows, 4)

    return kernel
