"""Searches for an encoder's grid, for sixteen rows at once: the compiled twin of `quant.formats.reference_encoders`.

Groups lie in memory column after column, each the sixteen lanes of one column. Sums run in that order and products are
taken from left to right, so that every lane gets the oracle's bits.
"""

from typing import Any

import numpy as np

from localinfer.kernels.cpu.compiled.lanes import LANE_BYTES, absolute, any_lane, load, round_even, splat, store, where
from localinfer.kernels.jit.numba import inline

SMALLEST = 1e-15
"""A group whose largest magnitude lies below this is encoded as zeros."""

IQ4_VALUES = (-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0)
"""Values of the 16 codes of IQ4_NL and IQ4_XS."""


@inline
def whole(x: Any, lowest: Any, highest: Any) -> Any:
    """Round to the nearest whole number, halves to even, and clamp; what is no number becomes `highest`."""
    rounded = round_even(x)
    rounded = where(rounded < highest, rounded, highest)
    return where(rounded > lowest, rounded, lowest)


@inline
def divide(dividend: Any, divisor: Any) -> Any:
    """Divide, and give 0 where the divisor is 0."""
    zero = splat(0.0)
    return where(divisor != zero, dividend / divisor, zero)


@inline
def largest_magnitude(values: int, count: int) -> Any:
    """The value of largest magnitude with its sign; the first of equals."""
    largest = load(values)
    magnitude = absolute(largest)
    for i in range(1, count):
        value = load(values + LANE_BYTES * i)
        is_larger = absolute(value) > magnitude
        largest = where(is_larger, value, largest)
        magnitude = where(is_larger, absolute(value), magnitude)
    return largest


@inline
def _largest(values: int, count: int) -> Any:
    """The largest value, or 0 if all are negative."""
    largest = splat(0.0)
    for i in range(count):
        value = load(values + LANE_BYTES * i)
        largest = where(value > largest, value, largest)
    return largest


@inline
def total(values: int, count: int) -> Any:
    """Sum in order."""
    result = load(values)
    for i in range(1, count):
        result = result + load(values + LANE_BYTES * i)
    return result


@inline
def _weigh_codes(values: int, weights: int, codes: int, count: int) -> Any:
    """Weighted sums of value * code and code * code, for codes in memory."""
    products, squares = splat(0.0), splat(0.0)
    for i in range(count):
        weight, code = load(weights + LANE_BYTES * i), load(codes + LANE_BYTES * i)
        products = products + weight * load(values + LANE_BYTES * i) * code
        squares = squares + weight * code * code
    return products, squares


@inline
def _weigh_symmetric(values: int, weights: int, count: int, limit: int, inverse: Any) -> Any:
    """As `_weigh_codes`, for the codes that inverse * value rounds to."""
    lowest, highest = splat(np.float32(-limit)), splat(np.float32(limit - 1))
    products, squares = splat(0.0), splat(0.0)
    for i in range(count):
        weight, value = load(weights + LANE_BYTES * i), load(values + LANE_BYTES * i)
        code = whole(inverse * value, lowest, highest)
        products = products + weight * value * code
        squares = squares + weight * code * code
    return products, squares


@inline
def fit_symmetric(values: int, weights: int, count: int, limit: int, codes: int) -> Any:
    """Fit scale * code with codes -limit to limit - 1; return the scale, write codes plus `limit`.

    A group of nothing has scale and codes 0.
    """
    zero = splat(0.0)
    largest = largest_magnitude(values, count)
    is_zero = absolute(largest) < splat(SMALLEST)
    largest = where(is_zero, splat(1.0), largest)
    inverse = splat(np.float32(-limit)) / largest
    products, squares = _weigh_symmetric(values, weights, count, limit, inverse)
    scale = divide(products, squares)
    best = scale * products
    for step in range(-9, 10):
        if step == 0:
            continue
        trial = splat(-(np.float32(limit) + np.float32(0.1) * np.float32(step))) / largest
        products, squares = _weigh_symmetric(values, weights, count, limit, trial)
        is_better = (squares > zero) & (products * products > best * squares)
        fitted = divide(products, squares)
        scale = where(is_better, fitted, scale)
        best = where(is_better, fitted * products, best)
        inverse = where(is_better, trial, inverse)
    lowest, highest = splat(np.float32(-limit)), splat(np.float32(limit - 1))
    for i in range(count):
        code = whole(inverse * load(values + LANE_BYTES * i), lowest, highest) + splat(np.float32(limit))
        store(codes + LANE_BYTES * i, where(is_zero, zero, code))
    return where(is_zero, zero, scale)


@inline
def _refine(
    values: int, weights: int, count: int, lowest: Any, highest: Any, others_must_count: int, codes: int
) -> Any:
    """Move one code after the other while that helps; return the best scale's two sums."""
    zero = splat(0.0)
    products, squares = _weigh_codes(values, weights, codes, count)
    for _ in range(5):
        has_changed = False
        for i in range(count):
            weight, value = load(weights + LANE_BYTES * i), load(values + LANE_BYTES * i)
            code = load(codes + LANE_BYTES * i)
            other_products = products - weight * value * code
            other_squares = squares - weight * code * code
            new = whole(divide(value * other_squares, other_products), lowest, highest)
            new_products = other_products + weight * value * new
            new_squares = other_squares + weight * new * new
            is_better = (other_products > zero) & (new != code) & (new_squares > zero)
            if others_must_count != 0:
                is_better = is_better & (other_squares > zero)
            is_better = is_better & (new_products * new_products * squares > products * products * new_squares)
            store(codes + LANE_BYTES * i, where(is_better, new, code))
            products = where(is_better, new_products, products)
            squares = where(is_better, new_squares, squares)
            has_changed = has_changed or any_lane(is_better)
        if not has_changed:
            break
    return products, squares


@inline
def refine_symmetric(values: int, weights: int, count: int, limit: int, codes: int) -> Any:
    """As `fit_symmetric` with weights value^2, which are written; moves one code after the other."""
    zero = splat(0.0)
    largest = largest_magnitude(values, count)
    is_zero = absolute(largest) < splat(SMALLEST)
    inverse = splat(np.float32(-limit)) / where(is_zero, splat(1.0), largest)
    lowest, highest = splat(np.float32(-limit)), splat(np.float32(limit - 1))
    for i in range(count):
        value = load(values + LANE_BYTES * i)
        store(weights + LANE_BYTES * i, value * value)
        store(codes + LANE_BYTES * i, whole(inverse * value, lowest, highest))
    products, squares = _refine(values, weights, count, lowest, highest, 0, codes)
    for i in range(count):
        code = load(codes + LANE_BYTES * i) + splat(np.float32(limit))
        store(codes + LANE_BYTES * i, where(is_zero, zero, code))
    return where(is_zero, zero, divide(products, squares))


@inline
def fit_unsigned(values: int, weights: int, count: int, levels: int, codes: int) -> Any:
    """Fit scale * code to values that are not negative, codes 0 to `levels`; return the scale, write the codes."""
    zero, one, highest = splat(0.0), splat(1.0), splat(np.float32(levels))
    largest = _largest(values, count)
    is_zero = largest < splat(SMALLEST)
    largest = where(is_zero, one, largest)
    best, best_inverse = zero, zero
    for index in range(9):
        step = 0 if index == 0 else index - 5 if index < 5 else index - 4
        inverse = splat(np.float32(0.1) * np.float32(step) + np.float32(levels)) / largest
        scale = one / inverse
        error = zero
        for i in range(count):
            value = load(values + LANE_BYTES * i)
            difference = value - scale * whole(inverse * value, zero, highest)
            error = error + load(weights + LANE_BYTES * i) * difference * difference
        if index == 0:
            best, best_inverse = error, inverse
        else:
            is_better = error < best
            best = where(is_better, error, best)
            best_inverse = where(is_better, inverse, best_inverse)
    for i in range(count):
        store(codes + LANE_BYTES * i, whole(best_inverse * load(values + LANE_BYTES * i), zero, highest))
    products, squares = _refine(values, weights, count, zero, highest, 1, codes)
    for i in range(count):
        store(codes + LANE_BYTES * i, where(is_zero, zero, load(codes + LANE_BYTES * i)))
    return where(is_zero, zero, where(squares > zero, divide(products, squares), zero))


@inline
def share_largest(values: int, count: int, levels: int, codes: int) -> Any:
    """Write values as whole multiples of 1 / levels of their largest; return that fraction of it."""
    zero, highest = splat(0.0), splat(np.float32(levels))
    largest = _largest(values, count)
    inverse = divide(highest, largest)
    for i in range(count):
        store(codes + LANE_BYTES * i, whole(inverse * load(values + LANE_BYTES * i), zero, highest))
    return largest / highest


@inline
def _minimum_error(
    values: int, weights: int, codes: int, count: int, scale: Any, minimum: Any, is_absolute: int
) -> Any:
    error = splat(0.0)
    for i in range(count):
        difference = scale * load(codes + LANE_BYTES * i) + minimum - load(values + LANE_BYTES * i)
        size = absolute(difference) if is_absolute != 0 else difference * difference
        error = error + load(weights + LANE_BYTES * i) * size
    return error


@inline
def fit_minimum(
    values: int, weights: int, count: int, levels: int, first: float, step: float, num_steps: int, is_absolute: int,
    codes: int,
) -> Any:  # fmt: skip
    """Fit scale * code + minimum, codes 0 to `levels`, minimum <= 0; return scale and -minimum, write the codes.

    Tries num_steps + 1 scales: the inverse is (first + step * i + levels) / (maximum - minimum), with the best minimum
    found so far. is_absolute: compare sums of weight * |error| instead of squares.
    """
    zero, one, highest = splat(0.0), splat(1.0), splat(np.float32(levels))
    minimum = maximum = load(values)
    sum_weights = load(weights)
    sum_values = sum_weights * minimum
    for i in range(1, count):
        value, weight = load(values + LANE_BYTES * i), load(weights + LANE_BYTES * i)
        minimum = where(value < minimum, value, minimum)
        maximum = where(value > maximum, value, maximum)
        sum_weights = sum_weights + weight
        sum_values = sum_values + weight * value
    minimum = where(minimum > zero, zero, minimum)
    is_flat = maximum <= minimum
    maximum = where(is_flat, minimum + one, maximum)
    inverse = highest / (maximum - minimum)
    best_inverse, inverse_minimum = inverse, minimum
    scale = one / inverse
    for i in range(count):
        value = load(values + LANE_BYTES * i)
        store(codes + LANE_BYTES * i, whole(inverse * (value - minimum), zero, highest))
    best = _minimum_error(values, weights, codes, count, scale, minimum, is_absolute)
    for index in range(num_steps + 1):
        offset = np.float32(first) + np.float32(step) * np.float32(index) + np.float32(levels)
        inverse = splat(offset) / (maximum - minimum)
        sum_codes, sum_squares, sum_products = zero, zero, zero
        for i in range(count):
            value, weight = load(values + LANE_BYTES * i), load(weights + LANE_BYTES * i)
            code = whole(inverse * (value - minimum), zero, highest)
            store(codes + LANE_BYTES * i, code)
            weighted = weight * code
            sum_codes = sum_codes + weighted
            sum_squares = sum_squares + weighted * code
            sum_products = sum_products + weighted * value
        determinant = sum_weights * sum_squares - sum_codes * sum_codes
        this_scale = divide(sum_weights * sum_products - sum_values * sum_codes, determinant)
        this_minimum = divide(sum_squares * sum_values - sum_codes * sum_products, determinant)
        is_positive = this_minimum > zero
        this_scale = where(is_positive, divide(sum_products, sum_squares), this_scale)
        this_minimum = where(is_positive, zero, this_minimum)
        error = _minimum_error(values, weights, codes, count, this_scale, this_minimum, is_absolute)
        is_better = (determinant > zero) & (error < best)
        best = where(is_better, error, best)
        scale = where(is_better, this_scale, scale)
        best_inverse = where(is_better, inverse, best_inverse)
        inverse_minimum = where(is_better, minimum, inverse_minimum)
        minimum = where(is_flat, minimum, where(is_better, this_minimum, minimum))
    for i in range(count):
        code = whole(best_inverse * (load(values + LANE_BYTES * i) - inverse_minimum), zero, highest)
        store(codes + LANE_BYTES * i, where(is_flat, zero, code))
    return where(is_flat, zero, scale), splat(-0.0) - minimum


@inline
def nearest_iq4_value(x: Any) -> Any:
    """The IQ4 value nearest to x; the larger of two that are equally near."""
    result = splat(IQ4_VALUES[0])
    for i in range(1, 16):
        middle = splat((IQ4_VALUES[i - 1] + IQ4_VALUES[i]) * 0.5)
        result = where(x < middle, result, splat(IQ4_VALUES[i]))
    return result


@inline
def nearest_iq4_code(x: Any) -> Any:
    """The code of `nearest_iq4_value`, as a float."""
    result = splat(0.0)
    for i in range(1, 16):
        middle = splat((IQ4_VALUES[i - 1] + IQ4_VALUES[i]) * 0.5)
        result = where(x < middle, result, splat(np.float32(i)))
    return result


@inline
def _weigh_iq4(values: int, weights: int, count: int, inverse: Any) -> Any:
    products, squares = splat(0.0), splat(0.0)
    for i in range(count):
        weight, value = load(weights + LANE_BYTES * i), load(values + LANE_BYTES * i)
        decoded = nearest_iq4_value(inverse * value)
        products = products + weight * decoded * value
        squares = squares + weight * decoded * decoded
    return products, squares


@inline
def fit_iq4(values: int, weights: int, count: int) -> Any:
    """Fit scale * IQ4_VALUES[code]; return the scale, 0 for a group of nothing."""
    zero = splat(0.0)
    largest = largest_magnitude(values, count)
    is_zero = absolute(largest) < splat(SMALLEST)
    largest = where(is_zero, splat(1.0), largest)
    scale = (zero - largest) / splat(IQ4_VALUES[0])
    products, squares = _weigh_iq4(values, weights, count, splat(1.0) / scale)
    scale = divide(products, squares)
    best = scale * products
    for step in range(-7, 8):
        inverse = splat(np.float32(step) + np.float32(IQ4_VALUES[0])) / largest
        products, squares = _weigh_iq4(values, weights, count, inverse)
        is_better = (squares > zero) & (products * products > best * squares)
        fitted = divide(products, squares)
        scale = where(is_better, fitted, scale)
        best = where(is_better, fitted * products, best)
    return where(is_zero, zero, scale)
