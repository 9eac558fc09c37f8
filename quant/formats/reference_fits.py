"""How the searching encoders choose a grid: NumPy, one group of weights per row, every group at once.

Each function minimises sum(weight * (value - decoded)^2) over grids of one kind, by trying scales around the one that
the extremes give and solving the weighted least squares for each. Sums are float32 and run in order, and products are
taken from left to right, so the choice is the same bit for bit as ggml's (ggml-quants.c), whatever the platform.

Shapes: values, weights and codes float32[groups, n], codes being whole numbers; scales and minimums float32[groups].
"""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]

SMALLEST = np.float32(1e-15)
"""A group whose largest magnitude lies below this is encoded as zeros."""

IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
"""What the 16 codes of IQ4_NL and IQ4_XS stand for."""

_IQ4_MIDDLES = (IQ4_VALUES[1:] + IQ4_VALUES[:-1]) / 2
_TENTH = np.float32(0.1)


def ordered_sum(values: Values) -> Values:
    """Sum the last axis in float32 from first to last; 0 is added to all, so the sum is never -0."""
    return _running_sum(values) + np.float32(0)


def _running_sum(values: Values) -> Values:
    result: Values = np.add.accumulate(values, axis=-1, dtype=np.float32)[..., -1]
    return result


def divide(dividend: Values | np.float32, divisor: Values) -> Values:
    """Divide, and give 0 where the divisor is 0."""
    shape = np.broadcast_shapes(np.shape(dividend), divisor.shape)
    return np.divide(dividend, divisor, out=np.zeros(shape, np.float32), where=divisor != 0)


def whole(values: Values, lowest: float, highest: float) -> Values:
    """Round to the nearest whole number, halves to even, and clamp; what is no number becomes `highest`."""
    rounded = np.rint(values)
    rounded = np.where(rounded < np.float32(highest), rounded, np.float32(highest))
    return np.where(rounded > np.float32(lowest), rounded, np.float32(lowest))


def largest_magnitude(values: Values) -> Values:
    """The value of largest magnitude with its sign; the first of equals."""
    index = np.abs(values).argmax(axis=-1, keepdims=True)
    result: Values = np.take_along_axis(values, index, axis=-1)[..., 0]
    return result


def extremes(values: Values) -> tuple[Values, Values]:
    """The smallest and the largest value; the first of equals, which decides the sign of a zero."""
    indices = (values.argmin(axis=-1, keepdims=True), values.argmax(axis=-1, keepdims=True))
    minimum, maximum = (np.take_along_axis(values, index, axis=-1)[..., 0] for index in indices)
    return minimum, maximum


def fit_symmetric(values: Values, weights: Values, limit: int) -> tuple[Values, Values]:
    """Fit scale * code with codes -limit to limit - 1; return scales, and codes plus `limit`.

    The largest magnitude may take either sign, since the scale may be negative: it sits near code -limit. A group of
    nothing has scale and codes 0.
    """
    largest = largest_magnitude(values)
    is_zero = np.abs(largest) < SMALLEST
    largest = np.where(is_zero, np.float32(1), largest)
    scale = best = inverse = np.zeros_like(largest)
    for step in (0, *range(-9, 0), *range(1, 10)):
        trial = -(np.float32(limit) + _TENTH * np.float32(step)) / largest
        codes = whole(trial[:, None] * values, -limit, limit - 1)
        products = ordered_sum(weights * values * codes)
        squares = ordered_sum(weights * codes * codes)
        is_better = (squares > 0) & (products * products > best * squares) if step else np.True_
        fitted = divide(products, squares)
        scale = np.where(is_better, fitted, scale)
        best = np.where(is_better, fitted * products, best)
        inverse = np.where(is_better, trial, inverse)
    codes = whole(inverse[:, None] * values, -limit, limit - 1) + np.float32(limit)
    return np.where(is_zero, np.float32(0), scale), np.where(is_zero[:, None], np.float32(0), codes)


def _refine(
    values: Values, weights: Values, codes: Values, lowest: int, highest: int, *, others_must_count: bool = False
) -> tuple[Values, Values]:
    """Change `codes` one column after the other while that helps; return the best scale's two sums."""
    products = ordered_sum(weights * values * codes)
    squares = ordered_sum(weights * codes * codes)
    for _ in range(5):
        before = codes.copy()
        for i in range(values.shape[1]):
            weight, value, code = weights[:, i], values[:, i], codes[:, i]
            other_products = products - weight * value * code
            other_squares = squares - weight * code * code
            new = whole(divide(value * other_squares, other_products), lowest, highest)
            new_products = other_products + weight * value * new
            new_squares = other_squares + weight * new * new
            is_better = (other_products > 0) & (new != code) & (new_squares > 0)
            if others_must_count:
                is_better &= other_squares > 0
            is_better &= new_products * new_products * squares > products * products * new_squares
            codes[:, i] = np.where(is_better, new, code)
            products = np.where(is_better, new_products, products)
            squares = np.where(is_better, new_squares, squares)
        if (codes == before).all():
            break
    return products, squares


def refine_symmetric(values: Values, limit: int) -> tuple[Values, Values]:
    """Fit scale * code with weights value^2, by moving one code after the other while that helps.

    Returns: as `fit_symmetric`.
    """
    largest = largest_magnitude(values)
    is_zero = np.abs(largest) < SMALLEST
    inverse = divide(np.float32(-limit), np.where(is_zero, np.float32(1), largest))
    codes = whole(inverse[:, None] * values, -limit, limit - 1)
    weights = values * values
    products, squares = _refine(values, weights, codes, -limit, limit - 1)
    scale = np.where(is_zero, np.float32(0), divide(products, squares))
    return scale, np.where(is_zero[:, None], np.float32(0), codes + np.float32(limit))


def fit_minimum(
    values: Values, weights: Values, levels: int, first: float, step: float, num_steps: int, *, absolute: bool = False
) -> tuple[Values, Values, Values]:
    """Fit scale * code + minimum, codes 0 to `levels`, minimum <= 0; return scales, -minimums and codes.

    Tries num_steps + 1 scales: the inverse is (first + step * i + levels) / (maximum - minimum), with the best minimum
    found so far.
    absolute: compare sums of weight * |error| in place of squares.
    """
    minimum, maximum = extremes(values)
    minimum = np.where(minimum > 0, np.float32(0), minimum)
    is_flat = maximum <= minimum
    maximum = np.where(is_flat, minimum + 1, maximum)
    # These begin with the first column, and may be -0.
    sum_weights, sum_values = _running_sum(weights), _running_sum(weights * values)

    def error(scale: Values, minimum: Values, codes: Values) -> Values:
        difference = scale[:, None] * codes + minimum[:, None] - values
        return ordered_sum(weights * (np.abs(difference) if absolute else difference * difference))

    def code(inverse: Values, minimum: Values) -> Values:
        return whole(inverse[:, None] * (values - minimum[:, None]), 0, levels)

    inverse = np.float32(levels) / (maximum - minimum)
    scale = np.float32(1) / inverse
    best_codes = code(inverse, minimum)
    best = error(scale, minimum, best_codes)
    for i in range(num_steps + 1):
        inverse = (np.float32(first) + np.float32(step) * np.float32(i) + np.float32(levels)) / (maximum - minimum)
        codes = code(inverse, minimum)
        sum_codes = ordered_sum(weights * codes)
        sum_squares = ordered_sum(weights * codes * codes)
        sum_products = ordered_sum(weights * codes * values)
        determinant = sum_weights * sum_squares - sum_codes * sum_codes
        this_scale = divide(sum_weights * sum_products - sum_values * sum_codes, determinant)
        this_minimum = divide(sum_squares * sum_values - sum_codes * sum_products, determinant)
        is_positive = this_minimum > 0
        this_scale = np.where(is_positive, divide(sum_products, sum_squares), this_scale)
        this_minimum = np.where(is_positive, np.float32(0), this_minimum)
        this_error = error(this_scale, this_minimum, codes)
        is_better = (determinant > 0) & (this_error < best)
        best = np.where(is_better, this_error, best)
        scale = np.where(is_better, this_scale, scale)
        minimum = np.where(is_better & ~is_flat, this_minimum, minimum)
        best_codes = np.where(is_better[:, None], codes, best_codes)
    best_codes = np.where(is_flat[:, None], np.float32(0), best_codes)
    return np.where(is_flat, np.float32(0), scale), -minimum, best_codes


def fit_unsigned(values: Values, weights: Values, levels: int) -> tuple[Values, Values]:
    """Fit scale * code to values that are not negative, codes 0 to `levels`; return scales and codes."""
    largest = np.maximum(values.max(axis=1), np.float32(0))
    is_zero = largest < SMALLEST
    largest = np.where(is_zero, np.float32(1), largest)
    best_inverse = best = np.zeros_like(largest)
    for step in (0, *range(-4, 0), *range(1, 5)):
        inverse = divide(_TENTH * np.float32(step) + np.float32(levels), largest)
        difference = values - (np.float32(1) / inverse)[:, None] * whole(inverse[:, None] * values, 0, levels)
        error = ordered_sum(weights * difference * difference)
        is_better = error < best if step else np.True_
        best = np.where(is_better, error, best)
        best_inverse = np.where(is_better, inverse, best_inverse)
    codes = whole(best_inverse[:, None] * values, 0, levels)
    products, squares = _refine(values, weights, codes, 0, levels, others_must_count=True)
    scale = np.where(squares > 0, divide(products, squares), np.float32(0))
    return np.where(is_zero, np.float32(0), scale), np.where(is_zero[:, None], np.float32(0), codes)


def nearest_iq4(values: Values) -> NDArray[np.uint8]:
    """The code whose IQ4 value is nearest; the larger of two that are equally near."""
    codes: NDArray[np.uint8] = np.searchsorted(_IQ4_MIDDLES, values, side="right").astype(np.uint8)
    return codes


def fit_iq4(values: Values, weights: Values) -> Values:
    """Fit scale * IQ4_VALUES[code]; return scales, 0 for a group of nothing."""
    largest = largest_magnitude(values)
    is_zero = np.abs(largest) < SMALLEST
    largest = np.where(is_zero, np.float32(1), largest)
    scale = best = np.zeros_like(largest)
    for step in (None, *range(-7, 8)):
        if step is None:
            inverse = np.float32(1) / (-largest / IQ4_VALUES[0])
        else:
            inverse = (np.float32(step) + IQ4_VALUES[0]) / largest
        decoded = IQ4_VALUES[nearest_iq4(inverse[:, None] * values)]
        products = ordered_sum(weights * decoded * values)
        squares = ordered_sum(weights * decoded * decoded)
        fitted = divide(products, squares)
        is_better = (squares > 0) & (products * products > best * squares) if step is not None else np.True_
        scale = np.where(is_better, fitted, scale)
        best = np.where(is_better, fitted * products, best)
    return np.where(is_zero, np.float32(0), scale)
