"""Encoder kernels of the types with 32 columns per block."""

from typing import Any

import numpy as np

from localinfer.kernels.cpu.compiled.encode.encode import (
    CODES,
    MEAN_SQUARE,
    VALUES,
    WEIGHTS,
    at,
    encoder,
    integer,
    store_half,
    store_nibbles,
    sum_of_squares,
    weigh,
    weigh_by_squares,
)
from localinfer.kernels.cpu.compiled.encode.grid_fits import (
    fit_iq4,
    fit_minimum,
    fit_symmetric,
    largest_magnitude,
    nearest_iq4_code,
)
from localinfer.kernels.cpu.compiled.simd.lanes import (
    absolute,
    bits_from,
    load,
    scatter_words,
    shifted_left,
    splat,
    store,
    truncate,
    where,
)
from localinfer.kernels.jit.numba import inline

_SMALLEST_NORMAL = float(np.finfo(np.float32).tiny)


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
