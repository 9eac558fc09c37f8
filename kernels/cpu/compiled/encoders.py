"""Encoder kernels: the types with 256 columns per block, Q2_K to Q6_K and IQ4_XS, those with 32, and GPTQ's loop.

Every encoder handles a block of sixteen rows at a time: from the source, weights, scales, bytes. Its memory (one
stretch per thread) holds columns as lanes: values and weights of a block, codes, and the fits of its groups. Fields of
the file are written row by row from there.

A K-quant fits every group of a block by itself, then fits the groups' scales to the few bits they get, and rounds the
codes once more with the scales as a reader will decode them. A group whose scale decodes to 0 keeps the codes of its
own fit.

The inner loop of GPTQ rounds a block of columns one by one, and later ones absorb the errors so far. Its columns lie
one after the other, with rows as lanes: nothing is summed across them, so a row gets the bits it would get alone.
Products are added one by one in the order of columns.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from localinfer.kernels.cpu.compiled.grid_fits import (
    SMALLEST,
    divide,
    fit_iq4,
    fit_minimum,
    fit_symmetric,
    fit_unsigned,
    largest_magnitude,
    nearest_iq4_code,
    nearest_iq4_value,
    refine_symmetric,
    share_largest,
    total,
    whole,
)
from localinfer.kernels.cpu.compiled.lanes import (
    LANE_BYTES,
    absolute,
    any_lane,
    bits_from,
    half_bits,
    half_values,
    load,
    load_bfloat_columns,
    load_float_columns,
    load_half_columns,
    scatter_bytes,
    scatter_shorts,
    scatter_words,
    shifted_left,
    splat,
    square_root,
    store,
    to_integers,
    truncate,
    where,
)
from localinfer.kernels.cpu.compiled.memory import load_f32, load_i64, store_i64
from localinfer.kernels.cpu.compiled.pool import take_units
from localinfer.kernels.cpu.kernel_abi import (
    ENCODER_MEMORY_BYTES,
    ENCODER_STATUS,
    ROWS_PER_ENCODER_UNIT,
    SOURCE_BF16,
    SOURCE_F16,
    STATUS_NOT_FINITE,
    STATUS_TOO_LARGE,
)
from localinfer.kernels.cpu.parameters import ENCODE, ROUND_COLUMNS
from localinfer.kernels.jit.numba import Source, entry, inline, op

_BLOCK = 256 * LANE_BYTES
VALUES, WEIGHTS, CODES = 0, _BLOCK, 2 * _BLOCK
"""Lanes of up to 256 columns each."""
SCALES, MINIMUMS, SUMS, SCALE_CODES, MINIMUM_CODES = (3 * _BLOCK + 16 * LANE_BYTES * i for i in range(5))
"""Lanes of up to 16 groups each."""
MEAN_SQUARE = 3 * _BLOCK + 80 * LANE_BYTES
"""Lanes: the mean square of each whole row."""
assert MEAN_SQUARE + LANE_BYTES <= ENCODER_STATUS, "the protocol's memory must hold all of it"


@inline
def at(base: int, column: int) -> int:
    """Address of a column's lanes."""
    return base + LANE_BYTES * column


@inline
def store_half(memory: int, target: int, stride: int, last: int, value: Any) -> Any:
    """Write lanes as float16, one a row; return what was written. Notes a number that float16 cannot hold."""
    bits = half_bits(value)
    scatter_shorts(target, stride, last, bits)
    rounded = half_values(bits)
    is_wrong = (absolute(rounded) > splat(65504.0)) | (rounded != rounded)
    if any_lane(is_wrong) and load_i64(memory + ENCODER_STATUS) == 0:
        store_i64(memory + ENCODER_STATUS, STATUS_TOO_LARGE)
    return rounded


@inline
def integer(lanes: int, column: int) -> Any:
    """A column of whole numbers as integers."""
    return to_integers(load(at(lanes, column)))


@inline
def _nibbles(codes: int, low: int, high: int) -> Any:
    return bits_from(integer(codes, low), 0, 15) | shifted_left(bits_from(integer(codes, high), 0, 15), 4)


@inline
def store_nibbles(codes: int, run: int, count: int, target: int, stride: int, last: int) -> None:
    """Write the low four bits of `count` codes: in runs of 2 * `run`, byte j holds code j low and code j + run high."""
    for word in range(count // 8):
        first = word * 4 // run * 2 * run + word * 4 % run
        bits = _nibbles(codes, first, first + run)
        for byte in range(1, 4):
            bits = bits | shifted_left(_nibbles(codes, first + byte, first + byte + run), 8 * byte)
        scatter_words(target + 4 * word, stride, last, bits)


@inline
def store_upper_bits(
    codes: int, count: int, first_bit: int, num_bits: int, target: int, stride: int, last: int
) -> None:
    """Write `num_bits` bits of each code from `first_bit` on, in runs of 32 bytes: byte j has code j lowest."""
    per_byte = 8 // num_bits
    for run in range(count // (32 * per_byte)):
        for word in range(8):
            bits = bits_from(integer(codes, 0), 31, 0)
            for byte in range(4):
                for part in range(per_byte):
                    code = integer(codes, run * 32 * per_byte + part * 32 + 4 * word + byte)
                    field = bits_from(code, first_bit, (1 << num_bits) - 1)
                    bits = bits | shifted_left(field, 8 * byte + num_bits * part)
            scatter_words(target + 32 * run + 4 * word, stride, last, bits)


@inline
def weigh(memory: int, importance: int, count: int, mean_square: Any) -> None:
    """Write weights importance * sqrt(mean_square + value^2)."""
    for i in range(count):
        value = load(at(memory + VALUES, i))
        weight = splat(load_f32(importance + 4 * i)) * square_root(mean_square + value * value)
        store(at(memory + WEIGHTS, i), weight)


@inline
def weigh_by_squares(memory: int, count: int) -> None:
    """Write weights value^2."""
    for i in range(count):
        value = load(at(memory + VALUES, i))
        store(at(memory + WEIGHTS, i), value * value)


@inline
def sum_of_squares(memory: int, first: int, count: int) -> Any:
    """Sum value^2 over some columns, in order."""
    result = splat(0.0)
    for i in range(first, first + count):
        value = load(at(memory + VALUES, i))
        result = result + value * value
    return result


@inline
def sum_weights(memory: int, groups: int, columns: int) -> None:
    """Write the sum of each group's weights."""
    for group in range(groups):
        store(at(memory + SUMS, group), total(at(memory + WEIGHTS, group * columns), columns))


@inline
def _load_block(source: int, kind: int, stride: int, last: int, columns: int, memory: int) -> None:
    wrong = 0
    for column in range(0, columns, 16):
        target = at(memory + VALUES, column)
        if kind == SOURCE_F16:
            wrong |= load_half_columns(source + 2 * column, stride, last, target)
        elif kind == SOURCE_BF16:
            wrong |= load_bfloat_columns(source + 2 * column, stride, last, target)
        else:
            wrong |= load_float_columns(source + 4 * column, stride, last, target)
    if wrong != 0:
        store_i64(memory + ENCODER_STATUS, STATUS_NOT_FINITE)


def encoder(block_columns: int, block_bytes: int, *, needs_row_mean: bool = False) -> Callable[[Any], Source]:
    """Make the op that encodes rows with a function of (memory, importance, target, stride, last).

    The function finds a block's values in memory and writes its bytes for rows 0 to `last` from `target` on, a stride
    apart; importance is the address of its columns' float32, or 0. needs_row_mean: with importance, the mean square of
    the whole row stands ready.
    """

    def decorate(function: Any) -> Source:
        encode_block = inline(function)

        @op
        def encode(parameters: int, batch: int, thread: int, num_threads: int) -> None:
            p = ENCODE.load(parameters)
            memory = p.memory + thread * ENCODER_MEMORY_BYTES
            item_bytes = 2 if p.kind in (SOURCE_F16, SOURCE_BF16) else 4
            while True:
                row = take_units(p.control, 1) * ROWS_PER_ENCODER_UNIT
                if row >= p.rows:
                    return
                last = min(ROWS_PER_ENCODER_UNIT, p.rows - row) - 1
                start = p.source + row * p.stride
                if needs_row_mean and p.importance != 0:
                    squares = splat(0.0)
                    for column in range(0, p.columns, 32):
                        _load_block(start + item_bytes * column, p.kind, p.stride, last, 32, memory)
                        for i in range(32):
                            value = load(at(memory + VALUES, i))
                            squares = squares + value * value
                    store(memory + MEAN_SQUARE, squares / splat(np.float32(p.columns)))
                for block in range(p.columns // block_columns):
                    first = block * block_columns
                    _load_block(start + item_bytes * first, p.kind, p.stride, last, block_columns, memory)
                    block_importance = p.importance + 4 * first if p.importance != 0 else 0
                    place = p.target + row * p.target_stride + block * block_bytes
                    encode_block(memory, block_importance, place, p.target_stride, last)

        return encode

    return decorate


@inline
def _nearest(value: Any, lowest: int, highest: int) -> Any:
    """The nearest whole number of a range, or of IQ4's table where the range is empty."""
    if lowest > highest:
        return nearest_iq4_value(value)
    return whole(value, splat(np.float32(lowest)), splat(np.float32(highest)))


@entry("q", "q")
def round_block(parameters: int) -> int:
    """Round some columns; return 0.

    Parameters: first column, end, vectors of rows, bytes from column to column, wanted, given, errors, levels, decoded,
    weights, bytes from row to row of them, group of each column, position of each column, scales, minimums, lowest
    level, highest level.
    """
    p = ROUND_COLUMNS.load(parameters)
    for part in range(p.vectors):
        lane = LANE_BYTES * part
        for i in range(p.first, p.end):
            column = i * p.stride + lane
            value = load(p.wanted + column)
            for j in range(p.first, i):
                weight = splat(load_f32(p.weights + i * p.weights_stride + 4 * j))
                value = value + weight * load(p.errors + j * p.stride + lane)
            grid = load_i64(p.groups + 8 * i) * p.stride + lane
            scale, minimum = load(p.scales + grid), load(p.minimums + grid)
            level = _nearest(divide(value - minimum, scale), p.lowest, p.highest)
            found = scale * level + minimum
            store(p.errors + column, load(p.given + column) - found)
            store(p.wanted + column, value - found)
            place = load_i64(p.places + 8 * i) * p.stride + lane
            store(p.levels + place, level)
            store(p.decoded + place, found)
    return 0


_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


@inline
def _fit_with_importance(
    memory: int, importance: int, columns: int, levels: int, scale_levels: int, factor: int
) -> Any:
    """Fit groups of `columns` and their scales; return d and dmin."""
    groups = 256 // columns
    mean_square = splat(np.float32(factor)) * sum_of_squares(memory, 0, 256) / splat(256.0)
    weigh(memory, importance, 256, mean_square)
    sum_weights(memory, groups, columns)
    for group in range(groups):
        first = group * columns
        scale, minimum = fit_minimum(
            at(memory + VALUES, first), at(memory + WEIGHTS, first), columns, levels, -0.9, 0.05, 36, 0,
            at(memory + CODES, first),
        )  # fmt: skip
        store(at(memory + SCALES, group), scale)
        store(at(memory + MINIMUMS, group), minimum)
    d = fit_unsigned(memory + SCALES, memory + SUMS, groups, scale_levels, memory + SCALE_CODES)
    dmin = fit_unsigned(memory + MINIMUMS, memory + SUMS, groups, scale_levels, memory + MINIMUM_CODES)
    return d, dmin


@inline
def _fit_plainly(
    memory: int, columns: int, levels: int, scale_levels: int, first_step: float, step: float, num_steps: int
) -> Any:
    """As `_fit_with_importance` without any; groups of 16 compare absolute errors weighed by magnitude."""
    groups = 256 // columns
    is_absolute = 1 if columns == 16 else 0
    for group in range(groups):
        first = group * columns
        offset = splat(0.0)
        if columns == 32:
            offset = square_root(sum_of_squares(memory, first, 32) / splat(32.0))
        for i in range(first, first + columns):
            store(at(memory + WEIGHTS, i), offset + absolute(load(at(memory + VALUES, i))))
        scale, minimum = fit_minimum(
            at(memory + VALUES, first), at(memory + WEIGHTS, first), columns, levels, first_step, step, num_steps,
            is_absolute, at(memory + CODES, first),
        )  # fmt: skip
        store(at(memory + SCALES, group), scale)
        store(at(memory + MINIMUMS, group), minimum)
    d = share_largest(memory + SCALES, groups, scale_levels, memory + SCALE_CODES)
    dmin = share_largest(memory + MINIMUMS, groups, scale_levels, memory + MINIMUM_CODES)
    return d, dmin


@inline
def _round_with_minimum(memory: int, columns: int, levels: int, d: Any, dmin: Any) -> None:
    zero, highest = splat(0.0), splat(np.float32(levels))
    for group in range(256 // columns):
        scale = d * load(at(memory + SCALE_CODES, group))
        minimum = dmin * load(at(memory + MINIMUM_CODES, group))
        has_scale = scale != zero
        for i in range(group * columns, (group + 1) * columns):
            code = whole((load(at(memory + VALUES, i)) + minimum) / scale, zero, highest)
            store(at(memory + CODES, i), where(has_scale, code, load(at(memory + CODES, i))))


@inline
def _round_symmetric(memory: int, limit: int, d: Any) -> None:
    """Round groups of 16 on d * scale * (code - limit)."""
    zero, lowest, highest = splat(0.0), splat(np.float32(-limit)), splat(np.float32(limit - 1))
    for group in range(16):
        scale = d * load(at(memory + SCALE_CODES, group))
        has_scale = scale != zero
        for i in range(16 * group, 16 * group + 16):
            code = whole(load(at(memory + VALUES, i)) / scale, lowest, highest) + splat(np.float32(limit))
            store(at(memory + CODES, i), where(has_scale, code, load(at(memory + CODES, i))))


@inline
def _encode_with_minimum(
    memory: int, importance: int, columns: int, levels: int, scale_levels: int, factor: int, first_step: float,
    num_steps: int, target: int, stride: int, last: int,
) -> None:  # fmt: skip
    """Fit d * scale * code - dmin * minimum, write d and dmin at target, and round the codes with them."""
    if importance != 0:
        d, dmin = _fit_with_importance(memory, importance, columns, levels, scale_levels, factor)
    else:
        d, dmin = _fit_plainly(memory, columns, levels, scale_levels, first_step, 0.1, num_steps)
    d = store_half(memory, target, stride, last, d)
    dmin = store_half(memory, target + 2, stride, last, dmin)
    _round_with_minimum(memory, columns, levels, d, dmin)


@encoder(256, 84)
def q2_k(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    _encode_with_minimum(memory, importance, 16, 3, 15, 1, -0.5, 15, target + 80, stride, last)
    for group in range(16):
        both = integer(memory + SCALE_CODES, group) | shifted_left(integer(memory + MINIMUM_CODES, group), 4)
        scatter_bytes(target + group, stride, last, both)
    store_upper_bits(memory + CODES, 256, 0, 2, target + 16, stride, last)


@inline
def _store_k_scales(memory: int, target: int, stride: int, last: int) -> None:
    """Eight scales and minimums of six bits in twelve bytes."""
    for i in range(4):
        scale, later_scale = integer(memory + SCALE_CODES, i), integer(memory + SCALE_CODES, i + 4)
        minimum, later_minimum = integer(memory + MINIMUM_CODES, i), integer(memory + MINIMUM_CODES, i + 4)
        scatter_bytes(target + i, stride, last, scale | shifted_left(bits_from(later_scale, 4, 3), 6))
        scatter_bytes(target + 4 + i, stride, last, minimum | shifted_left(bits_from(later_minimum, 4, 3), 6))
        low = bits_from(later_scale, 0, 15) | shifted_left(bits_from(later_minimum, 0, 15), 4)
        scatter_bytes(target + 8 + i, stride, last, low)


@encoder(256, 144)
def q4_k(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    _encode_with_minimum(memory, importance, 32, 15, 63, 2, -1.0, 20, target, stride, last)
    _store_k_scales(memory, target + 4, stride, last)
    store_nibbles(memory + CODES, 32, 256, target + 16, stride, last)


@encoder(256, 176)
def q5_k(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    _encode_with_minimum(memory, importance, 32, 31, 63, 2, -0.5, 15, target, stride, last)
    _store_k_scales(memory, target + 4, stride, last)
    store_upper_bits(memory + CODES, 256, 4, 1, target + 16, stride, last)
    store_nibbles(memory + CODES, 32, 256, target + 48, stride, last)


@encoder(256, 110)
def q3_k(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    zero, offset = splat(0.0), splat(32.0)
    scales, scale_codes = memory + SCALES, memory + SCALE_CODES
    if importance != 0:
        weigh(memory, importance, 256, splat(2.0) * sum_of_squares(memory, 0, 256) / splat(256.0))
        sum_weights(memory, 16, 16)
    for group in range(16):
        values, weights = at(memory + VALUES, 16 * group), at(memory + WEIGHTS, 16 * group)
        codes = at(memory + CODES, 16 * group)
        if importance != 0:
            store(at(scales, group), fit_symmetric(values, weights, 16, 4, codes))
        else:
            store(at(scales, group), refine_symmetric(values, weights, 16, 4, codes))
    if importance != 0:
        d = fit_symmetric(scales, memory + SUMS, 16, 32, scale_codes)
    else:
        largest = largest_magnitude(scales, 16)
        inverse = divide(splat(-32.0), largest)
        d = divide(splat(1.0), inverse)
        for group in range(16):
            code = whole(inverse * load(at(scales, group)), splat(-32.0), splat(31.0)) + offset
            store(at(scale_codes, group), where(largest != zero, code, zero))
    for i in range(4):
        first, second = integer(scale_codes, i), integer(scale_codes, i + 4)
        third, fourth = integer(scale_codes, i + 8), integer(scale_codes, i + 12)
        scatter_bytes(target + 96 + i, stride, last, bits_from(first, 0, 15) | shifted_left(bits_from(third, 0, 15), 4))
        scatter_bytes(
            target + 100 + i, stride, last, bits_from(second, 0, 15) | shifted_left(bits_from(fourth, 0, 15), 4)
        )
        upper = bits_from(first, 4, 3) | shifted_left(bits_from(second, 4, 3), 2)
        upper = upper | shifted_left(bits_from(third, 4, 3), 4) | shifted_left(bits_from(fourth, 4, 3), 6)
        scatter_bytes(target + 104 + i, stride, last, upper)
    d = store_half(memory, target + 108, stride, last, d)
    for group in range(16):
        store(at(scale_codes, group), load(at(scale_codes, group)) - offset)
    _round_symmetric(memory, 4, d)
    store_upper_bits(memory + CODES, 256, 2, 1, target, stride, last)
    store_upper_bits(memory + CODES, 256, 0, 2, target + 32, stride, last)


@encoder(256, 210)
def q6_k(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    zero = splat(0.0)
    if importance != 0:
        for i in range(256):
            store(at(memory + WEIGHTS, i), splat(load_f32(importance + 4 * i)))
    else:
        weigh_by_squares(memory, 256)
    for group in range(16):
        values, weights = at(memory + VALUES, 16 * group), at(memory + WEIGHTS, 16 * group)
        scale = fit_symmetric(values, weights, 16, 32, at(memory + CODES, 16 * group))
        store(at(memory + SCALES, group), scale)
    largest = largest_magnitude(memory + SCALES, 16)
    is_zero = absolute(largest) < splat(SMALLEST)
    inverse = where(is_zero, zero, divide(splat(-128.0), largest))
    for group in range(16):
        code = whole(inverse * load(at(memory + SCALES, group)), splat(-128.0), splat(127.0))
        store(at(memory + SCALE_CODES, group), code)
        scatter_bytes(target + 192 + group, stride, last, integer(memory + SCALE_CODES, group))
    d = store_half(memory, target + 208, stride, last, divide(splat(1.0), inverse))
    _round_symmetric(memory, 32, d)
    for i in range(256):
        store(at(memory + CODES, i), where(is_zero, zero, load(at(memory + CODES, i))))
    store_nibbles(memory + CODES, 64, 256, target, stride, last)
    store_upper_bits(memory + CODES, 256, 4, 2, target + 128, stride, last)


@encoder(256, 136)
def iq4_xs(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    if importance != 0:
        weigh(memory, importance, 256, sum_of_squares(memory, 0, 256) * splat(2.0 / 256.0))
    else:
        weigh_by_squares(memory, 256)
    for group in range(8):
        first = 32 * group
        store(at(memory + SCALES, group), fit_iq4(at(memory + VALUES, first), at(memory + WEIGHTS, first), 32))
    d = largest_magnitude(memory + SCALES, 8) / splat(-32.0)
    inverse = divide(splat(1.0), d)
    store_half(memory, target, stride, last, d)
    for group in range(8):
        code = whole(inverse * load(at(memory + SCALES, group)), splat(-32.0), splat(31.0))
        store(at(memory + SCALE_CODES, group), code + splat(32.0))
        group_inverse = divide(splat(1.0), d * code)
        for i in range(32 * group, 32 * group + 32):
            store(at(memory + CODES, i), nearest_iq4_code(group_inverse * load(at(memory + VALUES, i))))
    upper = bits_from(integer(memory + SCALE_CODES, 0), 4, 3)
    for group in range(1, 8):
        upper = upper | shifted_left(bits_from(integer(memory + SCALE_CODES, group), 4, 3), 2 * group)
    scatter_shorts(target + 2, stride, last, upper)
    for pair in range(4):
        low = bits_from(integer(memory + SCALE_CODES, 2 * pair), 0, 15)
        high = bits_from(integer(memory + SCALE_CODES, 2 * pair + 1), 0, 15)
        scatter_bytes(target + 4 + pair, stride, last, low | shifted_left(high, 4))
    store_nibbles(memory + CODES, 16, 256, target + 8, stride, last)


@inline
def _inverse(scale: Any) -> Any:
    """1 / scale, and 0 where that would overflow: such a block rounds to zeros."""
    return where(absolute(scale) < splat(_SMALLEST_NORMAL), splat(0.0), splat(1.0) / scale)


@inline
def _truncated(x: Any, highest: int) -> Any:
    """x without its fraction, clamped to 0 and `highest`."""
    code = truncate(x)
    code = where(code < splat(np.float32(highest)), code, splat(np.float32(highest)))
    return where(code > splat(0.0), code, splat(0.0))


@inline
def _fit_signed(memory: int, importance: int, limit: int) -> Any:
    """Write codes on d * (code - limit) and return d; without importance the largest magnitude gets code 0."""
    values, codes = memory + VALUES, memory + CODES
    if importance != 0:
        weigh(memory, importance, 32, load(memory + MEAN_SQUARE))
        return fit_symmetric(values, memory + WEIGHTS, 32, limit, codes)
    # Added to, a negative zero becomes a positive one, whose quotient ggml writes for a block of zeros.
    d = (largest_magnitude(values, 32) + splat(0.0)) / splat(np.float32(-limit))
    inverse = _inverse(d)
    for i in range(32):
        code = _truncated(load(at(values, i)) * inverse + splat(np.float32(limit + 0.5)), 2 * limit - 1)
        store(at(codes, i), code)
    return d


@inline
def _fit_with_minimum(memory: int, importance: int, levels: int) -> Any:
    """Write codes on d * code + m and return d and m; without importance from the smallest value to the largest."""
    values, codes = memory + VALUES, memory + CODES
    if importance != 0:
        weigh(memory, importance, 32, load(memory + MEAN_SQUARE))
        scale, minus_minimum = fit_minimum(values, memory + WEIGHTS, 32, levels, -0.9, 0.05, 36, 0, codes)
        return scale, splat(-0.0) - minus_minimum
    minimum = maximum = load(values)
    for i in range(1, 32):
        value = load(at(values, i))
        minimum = where(value < minimum, value, minimum)
        maximum = where(value > maximum, value, maximum)
    d = (maximum - minimum) / splat(np.float32(levels))
    inverse = _inverse(d)
    for i in range(32):
        store(at(codes, i), _truncated((load(at(values, i)) - minimum) * inverse + splat(0.5), levels))
    return d, minimum


@inline
def _store_fifth_bits(memory: int, target: int, stride: int, last: int) -> None:
    codes = memory + CODES
    bits = bits_from(integer(codes, 0), 4, 1)
    for i in range(1, 32):
        bits = bits | shifted_left(bits_from(integer(codes, i), 4, 1), i)
    scatter_words(target, stride, last, bits)


@encoder(32, 34)
def q8_0(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    values = memory + VALUES
    d = absolute(largest_magnitude(values, 32)) / splat(127.0)
    inverse = _inverse(d)
    store_half(memory, target, stride, last, d)
    for i in range(32):
        scaled = load(at(values, i)) * inverse
        code = truncate(scaled)
        # Halves go away from zero.
        away = where(scaled < splat(0.0), splat(-1.0), splat(1.0))
        code = where(absolute(scaled - code) < splat(0.5), code, code + away)
        store(at(memory + CODES, i), code)
    for word in range(8):
        bits = bits_from(integer(memory + CODES, 4 * word), 0, 255)
        for byte in range(1, 4):
            bits = bits | shifted_left(bits_from(integer(memory + CODES, 4 * word + byte), 0, 255), 8 * byte)
        scatter_words(target + 2 + 4 * word, stride, last, bits)


@encoder(32, 18, needs_row_mean=True)
def q4_0(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    store_half(memory, target, stride, last, _fit_signed(memory, importance, 8))
    store_nibbles(memory + CODES, 16, 32, target + 2, stride, last)


@encoder(32, 22, needs_row_mean=True)
def q5_0(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    store_half(memory, target, stride, last, _fit_signed(memory, importance, 16))
    _store_fifth_bits(memory, target + 2, stride, last)
    store_nibbles(memory + CODES, 16, 32, target + 6, stride, last)


@encoder(32, 20, needs_row_mean=True)
def q4_1(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    d, m = _fit_with_minimum(memory, importance, 15)
    store_half(memory, target, stride, last, d)
    store_half(memory, target + 2, stride, last, m)
    store_nibbles(memory + CODES, 16, 32, target + 4, stride, last)


@encoder(32, 24, needs_row_mean=True)
def q5_1(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    d, m = _fit_with_minimum(memory, importance, 31)
    store_half(memory, target, stride, last, d)
    store_half(memory, target + 2, stride, last, m)
    _store_fifth_bits(memory, target + 4, stride, last)
    store_nibbles(memory + CODES, 16, 32, target + 8, stride, last)


@encoder(32, 18)
def iq4_nl(memory: int, importance: int, target: int, stride: int, last: int) -> None:
    values = memory + VALUES
    if importance != 0:
        weigh(memory, importance, 32, sum_of_squares(memory, 0, 32) * splat(2.0 / 32.0))
    else:
        weigh_by_squares(memory, 32)
    d = fit_iq4(values, memory + WEIGHTS, 32)
    store_half(memory, target, stride, last, d)
    inverse = _inverse(d)
    for i in range(32):
        store(at(memory + CODES, i), nearest_iq4_code(inverse * load(at(values, i))))
    store_nibbles(memory + CODES, 16, 32, target + 2, stride, last)
