"""Row by row: looking up embeddings, norms, elementwise functions, RoPE, copies. A grid's second axis is the row."""

from numba import cuda, float32, float64, int64

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.activations import (
    activate,
    activate_gate,
    activate_limited,
    hyperbolic_tangent,
    sigmoid,
    xielu_of,
)
from localinfer.kernels.cuda.compiled.quantize import store_quantized
from localinfer.kernels.cuda.compiled.reductions import warp_sum
from localinfer.kernels.cuda.compiled.weights import row_of, weight_of
from localinfer.kernels.cuda.jit import inline, kernel, template
from localinfer.kernels.ops.attention import NUM_AXES

THREADS = 128

RMS, LAYER = 0, 1
ACTIVATION, GATE, LIMITED_GATE, ADD, TIMES, TIMES_ROW, TIMES_SIGMOID, SCALE, CLAMP, CLAMP_ABOVE, SOFTCAP = range(11)
TO_F32, TO_F16, TO_BF16 = range(3)

WEIGHTS = {"arrays": "codes scales high extra", "row_bytes": "codes_row scales_row high_row extra_row"}
"""Addresses of the four arrays of weights, and the bytes of a row in each."""


@template(floats="scale", tuples=WEIGHTS)
def embed(layout):
    """out[r] = scale * table[indices[r]], or that added to it; a grid of [columns / 128, rows]."""
    weight_at = weight_of(layout)

    def kernel(arrays, row_bytes, indices, out, out_stride, num_columns, num_rows, adds, scale):
        column = ptx.block_x() * THREADS + ptx.thread()
        if column < num_columns:
            row = ptx.load_i64(indices + 8 * ptx.block_y())
            row = min(max(row, 0), num_rows - 1)
            value = scale * weight_at(row_of(arrays, row_bytes, row), column)
            place = out + ptx.block_y() * out_stride + 4 * column
            if adds != 0:
                value = value + ptx.load_f32(place)
            ptx.store_f32(place, value)

    return kernel


@kernel()
def embed_media(x, x_stride, num_columns, embeddings, offset, adds, rows):
    """x[r] = a part of an embedding, or x[r] += it, of [columns / 128, rows]; rows without an embedding stay.

    embeddings: addresses by the row of the batch, 0 for none. offset: bytes before the part. rows: which rows of the
    batch the grid's are; 0 for the same ones.
    """
    column = ptx.block_x() * THREADS + ptx.thread()
    if column < num_columns:
        row = ptx.block_y()
        if rows != 0:
            row = ptx.load_i64(rows + 8 * row)
        embedding = ptx.load_i64(embeddings + 8 * row)
        if embedding != 0:
            value = ptx.load_f32(embedding + offset + 4 * column)
            place = x + ptx.block_y() * x_stride + 4 * column
            if adds != 0:
                value = value + ptx.load_f32(place)
            ptx.store_f32(place, value)


@template(tuples=WEIGHTS)
def convert(layout, kind):
    """Rows of weights (or of float32 activations, as F32) as plain numbers of a kind, for a library's product.

    A grid of [columns / 128, rows]; out is [rows, num_columns].
    """
    weight_at = weight_of(layout)
    is_f32 = kind == TO_F32
    is_f16 = kind == TO_F16

    def kernel(arrays, row_bytes, out, num_columns, first_row):
        column = ptx.block_x() * THREADS + ptx.thread()
        if column < num_columns:
            value = weight_at(row_of(arrays, row_bytes, first_row + ptx.block_y()), column)
            element = ptx.block_y() * num_columns + column
            if is_f32:
                ptx.store_f32(out + 4 * element, value)
            elif is_f16:
                ptx.store_u16(out + 2 * element, ptx.float_to_half(value))
            else:
                bits = ptx.float_bits(value)
                ptx.store_u16(out + 2 * element, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16)

    return kernel


@kernel(floats="scale")
def finish_gemm(out, out_stride, product, product_stride, num_columns, bias, residual, residual_stride, scale):
    """out = residual + scale * (product + bias), of [columns / 128, rows]."""
    column = ptx.block_x() * THREADS + ptx.thread()
    if column < num_columns:
        value = ptx.load_f32(product + ptx.block_y() * product_stride + 4 * column)
        if bias != 0:
            value = value + ptx.load_f32(bias + 4 * column)
        value = scale * value
        if residual != 0:
            value = value + ptx.load_f32(residual + ptx.block_y() * residual_stride + 4 * column)
        ptx.store_f32(out + ptx.block_y() * out_stride + 4 * column, value)


def _norm_bounds(kind, warps, quantizes, rounds, is_shared):
    return 32 * warps, 1


@template(floats="epsilon", bounds=_norm_bounds)
def norm(kind, warps, quantizes, rounds, is_shared):
    """Norm of every group of a row, and its int8 codes if asked for; `warps` warps to a grid of [groups, rows].

    rounds: columns of a thread, which are read at once and kept in registers. is_shared: a grid of [groups * rounds,
    rows], where each of `rounds` blocks sums a whole group and writes one column per thread; not in place.
    """
    step = 32 * warps
    is_layer = kind == LAYER
    own_rounds = 1 if is_shared else rounds

    @inline
    def sum_of_block(value, lane, warp, partial):
        value = warp_sum(value)
        ptx.syncthreads()
        if lane == 0:
            partial[warp] = value
        ptx.syncthreads()
        total = float32(0.0)
        if lane < warps:
            total = partial[lane]
        return warp_sum(total)

    @inline
    def finish(value, weight, bias, out, codes, records, column):
        value = value * weight
        if bias != 0:
            value = value + ptx.load_f32(bias + 4 * column)
        ptx.store_f32(out + 4 * column, value)
        if quantizes:
            store_quantized(value, column % 32, codes, records, column)

    def kernel(
        x, x_stride, out, out_stride, weight, weight_stride, bias, bias_stride, size,
        codes, codes_stride, records, records_stride, epsilon,
    ):  # fmt: skip
        lane = ptx.thread() % 32
        warp = ptx.thread() // 32
        group = ptx.block_x()
        part = int64(0)
        if is_shared:
            part = group % rounds
            group = group // rounds
        row = ptx.block_y()
        if weight != 0:
            weight = weight + group * weight_stride
        if bias != 0:
            bias = bias + group * bias_stride
        codes = codes + row * codes_stride
        records = records + row * records_stride
        x = x + row * x_stride + 4 * group * size
        out = out + row * out_stride + 4 * group * size
        partial = cuda.shared.array(warps, float32)
        values = cuda.local.array(rounds, float32)
        weights = cuda.local.array(own_rounds, float32)
        for index in range(rounds):
            column = min(ptx.thread() + index * step, size - 1)
            values[index] = ptx.load_f32(x + 4 * column)
        for index in range(own_rounds):
            column = min(ptx.thread() + (part + index) * step, size - 1)
            weights[index] = float32(1.0)
            if weight != 0:
                weights[index] = ptx.load_f32(weight + 4 * column)
        own = ptx.load_f32(x + 4 * min(ptx.thread() + part * step, size - 1))
        mean = float32(0.0)
        if is_layer:
            total = float32(0.0)
            for index in range(rounds):
                if ptx.thread() + index * step < size:
                    total = total + values[index]
            mean = ptx.divide(sum_of_block(total, lane, warp, partial), ptx.to_float(size))
        total = float32(0.0)
        for index in range(rounds):
            values[index] = values[index] - mean
            if ptx.thread() + index * step < size:
                total = total + values[index] * values[index]
        square = ptx.divide(sum_of_block(total, lane, warp, partial), ptx.to_float(size))
        factor = ptx.divide(float32(1.0), ptx.square_root(square + epsilon))
        for index in range(own_rounds):
            column = ptx.thread() + (part + index) * step
            if column < size:
                value = own - mean if is_shared else values[index]
                finish(value * factor, weights[index], bias, out, codes, records, column)

    return kernel


@template(floats="scalar")
def elementwise(operation):
    """out = operation(a, b), of [columns / 128, rows]; activation is a number of `activations`."""
    is_activation = operation == ACTIVATION
    is_gate = operation == GATE
    is_limited = operation == LIMITED_GATE
    is_add = operation == ADD
    is_product = operation in (TIMES, TIMES_ROW)
    one_factor = operation == TIMES_ROW
    is_sigmoid = operation == TIMES_SIGMOID
    is_scale = operation == SCALE
    is_clamp = operation == CLAMP
    is_clamp_above = operation == CLAMP_ABOVE

    def kernel(out, out_stride, a, a_stride, b, b_stride, num_columns, activation, scalar):
        column = ptx.block_x() * THREADS + ptx.thread()
        if column < num_columns:
            row = ptx.block_y()
            value = ptx.load_f32(a + row * a_stride + 4 * column)
            if is_activation:
                value = activate(activation, value)
            elif is_gate:
                value = activate_gate(activation, value, ptx.load_f32(b + row * b_stride + 4 * column))
            elif is_add:
                value = value + scalar * ptx.load_f32(b + row * b_stride + 4 * column)
            elif is_limited:
                value = activate_limited(value, ptx.load_f32(b + row * b_stride + 4 * column), scalar)
            elif is_product:
                other = column
                if one_factor:
                    other = 0
                value = value * ptx.load_f32(b + row * b_stride + 4 * other)
            elif is_sigmoid:
                value = value * sigmoid(ptx.load_f32(b + row * b_stride + 4 * column))
            elif is_scale:
                value = scalar * value
            elif is_clamp:
                value = ptx.minimum(ptx.maximum(value, -scalar), scalar)
            elif is_clamp_above:
                value = ptx.minimum(value, scalar)
            else:
                value = scalar * hyperbolic_tangent(ptx.divide(value, scalar))
            ptx.store_f32(out + row * out_stride + 4 * column, value)

    return kernel


@template()
def gate_parts(has_sigmoid):
    """out = x * gate, or x * sigmoid(gate), one for every part_size columns, of [columns / 128, rows]."""

    def kernel(out, out_stride, x, x_stride, gate, gate_stride, num_columns, part_size):
        column = ptx.block_x() * THREADS + ptx.thread()
        if column < num_columns:
            row = ptx.block_y()
            value = ptx.load_f32(gate + row * gate_stride + 4 * (column // part_size))
            if has_sigmoid:
                value = sigmoid(value)
            value = value * ptx.load_f32(x + row * x_stride + 4 * column)
            ptx.store_f32(out + row * out_stride + 4 * column, value)

    return kernel


@kernel(floats="positive negative beta epsilon")
def xielu(out, out_stride, x, x_stride, num_columns, positive, negative, beta, epsilon):
    """out = xIELU(x), of [columns / 128, rows]."""
    column = ptx.block_x() * THREADS + ptx.thread()
    if column < num_columns:
        value = ptx.load_f32(x + ptx.block_y() * x_stride + 4 * column)
        value = xielu_of(value, positive, negative, beta, epsilon)
        ptx.store_f32(out + ptx.block_y() * out_stride + 4 * column, value)


@kernel()
def mix_slots(
    out, out_stride, x, x_stride, weights, weights_stride, residual, residual_stride, num_slots, size, num_columns,
    first_slot,
):  # fmt: skip
    """out[b] = residual[b] + the sum over slots a, in order, of weights[b, a] * x[a], of [columns / 128, rows]."""
    column = ptx.block_x() * THREADS + ptx.thread()
    if column < num_columns:
        row = ptx.block_y()
        slot = column // size
        total = float32(0.0)
        if residual != 0:
            total = ptx.load_f32(residual + row * residual_stride + 4 * column)
        if slot >= first_slot:
            other = 0
            while other < num_slots:
                weight = float32(1.0)
                if weights != 0:
                    weight = ptx.load_f32(weights + row * weights_stride + 4 * (slot * num_slots + other))
                total = total + weight * ptx.load_f32(x + row * x_stride + 4 * (other * size + column % size))
                other = other + 1
        ptx.store_f32(out + row * out_stride + 4 * column, total)


@template(floats="deviations")
def row_statistic(is_top_k):
    """The magnitude of every row, or what exceeds its mean by so many deviations; a warp each, of [1, rows]."""

    def kernel(out, out_stride, x, x_stride, size, deviations):
        lane = ptx.thread()
        row = ptx.block_y()
        x = x + row * x_stride
        out = out + row * out_stride
        mean = float32(0.0)
        if is_top_k:
            value = float32(0.0)
            column = lane
            while column < size:
                value = value + ptx.load_f32(x + 4 * column)
                column = column + 32
            mean = ptx.divide(warp_sum(value), ptx.to_float(size))
        value = float32(0.0)
        column = lane
        while column < size:
            centred = ptx.load_f32(x + 4 * column) - mean
            value = value + centred * centred
            column = column + 32
        total = warp_sum(value)
        if is_top_k:
            least = mean + deviations * ptx.square_root(ptx.divide(total, ptx.to_float(size - 1)))
            column = lane
            while column < size:
                value = ptx.maximum(ptx.load_f32(x + 4 * column) - least, float32(0.0))
                ptx.store_f32(out + 4 * column, value)
                column = column + 32
        elif lane == 0:
            ptx.store_f32(out, ptx.square_root(ptx.divide(total, ptx.to_float(size))))

    return kernel


@kernel(floats="slope")
def scale_by_position(x, x_stride, num_columns, positions, period_and_offset, slope):
    """x *= 1 + slope * ln(1 + floor((position + offset) / period)), of [columns / 128, rows]."""
    column = ptx.block_x() * THREADS + ptx.thread()
    if column < num_columns:
        period = period_and_offset % (1 << 31)
        offset = period_and_offset >> 31
        whole = (ptx.load_i64(positions + 8 * ptx.block_y()) + offset) // period
        factor = float32(1.0) + slope * (float32(0.6931471805599453) * ptx.log2(ptx.to_float(1 + whole)))
        place = x + ptx.block_y() * x_stride + 4 * column
        ptx.store_f32(place, factor * ptx.load_f32(place))


@inline
def cosine_and_sine(angle):
    """Of any angle in radians, float64: whole turns off, then Taylor's series to the 24th power."""
    turns = angle * float64(0.15915494309189535)
    rest = (turns - ptx.round_f64(turns)) * float64(6.283185307179586)
    square = rest * rest
    cosine = float64(1.0)
    sine = float64(1.0)
    for step in range(12):
        power = 24 - 2 * step
        cosine = float64(1.0) - cosine * square / ptx.to_f64(power * (power - 1))
        sine = float64(1.0) - sine * square / ptx.to_f64(power * (power + 1))
    return cosine, sine * rest


@inline
def store_angle(position, frequencies, pair, num_pairs, angles, magnitude):
    """The cosine and sine of a pair of a grid's row at a position."""
    cosine, sine = cosine_and_sine(ptx.to_f64(position) * ptx.load_f64(frequencies + 8 * pair))
    place = angles + (ptx.block_y() * num_pairs + pair) * 8
    ptx.store_f32(place, magnitude * ptx.narrow(cosine))
    ptx.store_f32(place + 4, magnitude * ptx.narrow(sine))


@kernel(floats="magnitude")
def rope_angles(positions, frequencies, num_pairs, angles, magnitude):
    """The cosine and sine of every pair, float32[rows][pairs][2], of [pairs / 128, rows]."""
    pair = ptx.block_x() * THREADS + ptx.thread()
    if pair < num_pairs:
        position = ptx.load_i64(positions + 8 * ptx.block_y())
        store_angle(position, frequencies, pair, num_pairs, angles, magnitude)


@kernel(floats="magnitude")
def rope_angles_by_axis(positions, axes, frequencies, num_pairs, angles, magnitude):
    """The same by positions int64[rows][NUM_AXES], of which each pair's is that on its axis."""
    pair = ptx.block_x() * THREADS + ptx.thread()
    if pair < num_pairs:
        place = ptx.block_y() * NUM_AXES + ptx.load_i64(axes + 8 * pair)
        position = ptx.load_i64(positions + 8 * place)
        store_angle(position, frequencies, pair, num_pairs, angles, magnitude)


ROPE = {"rope": "angles num_pairs halves offset"}
"""RoPE: address of the cosines and sines, pairs, whether pairs are halves apart, and where in a head they begin."""


@inline
def rotated(x, column, rope, row):
    """One column of a head at x after a row's RoPE; columns before its offset and after its pairs stay as they are."""
    angles, num_pairs, halves, offset = rope
    angles = angles + row * num_pairs * 8
    value = ptx.load_f32(x + 4 * column)
    inner = column - offset
    if 0 <= inner < 2 * num_pairs:
        pair = inner // 2
        is_second = inner % 2
        other = column + 1 - 2 * is_second
        if halves != 0:
            is_second = inner // num_pairs
            pair = inner - is_second * num_pairs
            other = column + num_pairs - 2 * is_second * num_pairs
        cosine = ptx.load_f32(angles + 8 * pair)
        sine = ptx.load_f32(angles + 8 * pair + 4)
        if is_second == 0:
            sine = -sine
        value = value * cosine + ptx.load_f32(x + 4 * other) * sine
    return value


@kernel()
def rope(x, x_stride, angles, num_heads, head_size, num_pairs, halves, offset):
    """Rotate pairs in place, a thread to a pair, of [heads * pairs / 128, rows]."""
    index = ptx.block_x() * THREADS + ptx.thread()
    if index < num_heads * num_pairs:
        pair = index % num_pairs
        first = offset + 2 * pair
        second = first + 1
        if halves != 0:
            first = offset + pair
            second = first + num_pairs
        head = x + ptx.block_y() * x_stride + 4 * (index // num_pairs) * head_size
        left = rotated(head, first, (angles, num_pairs, halves, offset), ptx.block_y())
        right = rotated(head, second, (angles, num_pairs, halves, offset), ptx.block_y())
        ptx.store_f32(head + 4 * first, left)
        ptx.store_f32(head + 4 * second, right)


@kernel()
def select_rows(out, out_stride, x, x_stride, num_columns, rows):
    """out[r] = x[rows[r]], of [columns / 128, rows]."""
    column = ptx.block_x() * THREADS + ptx.thread()
    if column < num_columns:
        row = ptx.load_i64(rows + 8 * ptx.block_y())
        ptx.store_f32(out + ptx.block_y() * out_stride + 4 * column, ptx.load_f32(x + row * x_stride + 4 * column))


@kernel()
def gather_columns(out, out_stride, x, x_stride, num_columns, order):
    """out[c] = x[order[c]], int64 order, of [columns / 128, rows]."""
    column = ptx.block_x() * THREADS + ptx.thread()
    if column < num_columns:
        value = ptx.load_f32(x + ptx.block_y() * x_stride + 4 * ptx.load_i64(order + 8 * column))
        ptx.store_f32(out + ptx.block_y() * out_stride + 4 * column, value)


@kernel()
def copy_heads(out, out_stride, x, x_stride, num_heads, width, out_head_size, x_head_size):
    """Copy `width` columns of every head, of [heads * width / 128, rows]; addresses are of the first column copied."""
    index = ptx.block_x() * THREADS + ptx.thread()
    if index < num_heads * width:
        head = index // width
        column = index % width
        value = ptx.load_f32(x + ptx.block_y() * x_stride + 4 * (head * x_head_size + column))
        ptx.store_f32(out + ptx.block_y() * out_stride + 4 * (head * out_head_size + column), value)
