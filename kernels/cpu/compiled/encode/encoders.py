"""Encoder kernels: the types with 256 columns per block, Q2_K to Q6_K and IQ4_XS, then those with 32.

A K-quant fits every group of a block by itself, then fits the groups' scales to the few bits they get, and rounds the
codes once more with the scales as a reader will decode them. A group whose scale decodes to 0 keeps the codes of its
own fit.
"""

from typing import Any

import numpy as np

from localinfer.kernels.cpu.compiled.encode.encode import (
    CODES,
    MEAN_SQUARE,
    MINIMUM_CODES,
    MINIMUMS,
    SCALE_CODES,
    SCALES,
    SUMS,
    VALUES,
    WEIGHTS,
    at,
    encoder,
    integer,
    store_half,
    store_nibbles,
    store_upper_bits,
    sum_of_squares,
    sum_weights,
    weigh,
    weigh_by_squares,
)
from localinfer.kernels.cpu.compiled.encode.grid_fits import (
    SMALLEST,
    divide,
    fit_iq4,
    fit_minimum,
    fit_symmetric,
    fit_unsigned,
    largest_magnitude,
    nearest_iq4_code,
    refine_symmetric,
    share_largest,
    whole,
)
from localinfer.kernels.cpu.compiled.simd.lanes import (
    absolute,
    bits_from,
    load,
    scatter_bytes,
    scatter_shorts,
    scatter_words,
    shifted_left,
    splat,
    square_root,
    store,
    truncate,
    where,
)
from localinfer.kernels.cpu.compiled.simd.memory import load_f32
from localinfer.kernels.jit.numba import inline

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
