"""The NumPy oracle of the encoders: the bytes ggml's quantizer writes, with and without importance.

Without importance the types of 32 columns (but IQ4_NL) take a grid from the extremes of each block and round to it. The
others, and all of them with importance, search for the grid. Types of 256 columns fit every group of
a block by itself, then fit the groups' scales to the few bits they get, and round the codes once more with the scales
as a reader will decode them; a group whose scale decodes to 0 keeps the codes of its own fit. Slow on purpose: kernels
are tested against it.
Source: the reference encoders of the ggml repository (ggml-quants.c).

How the searching encoders choose a grid: NumPy, one group of weights per row, every group at once.

Each function minimises sum(weight * (value - decoded)^2) over grids of one kind, by trying scales around the one that
the extremes give and solving the weighted least squares for each. Sums are float32 and run in order, and products are
taken from left to right, so the choice is the same bit for bit as ggml's (ggml-quants.c), whatever the platform.

Shapes: values, weights and codes float32[groups, n], codes being whole numbers; scales and minimums float32[groups].
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError, ShapeError, UnsupportedFormatError
from localinfer.quant.formats.types import (
    IQ4_VALUES,
    TensorType as T,
    block_dtype,
    block_size,
    pack_bits,
    pack_codes,
    pack_k_scales,
    row_bytes,
)

Values = NDArray[np.float32]

SMALLEST = np.float32(1e-15)
"""A group whose largest magnitude lies below this is encoded as zeros."""

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
    absolute: compare sums of weight * |error| instead of squares.
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


Fields = dict[str, NDArray[Any]]

_SYMMETRIC = {T.Q4_0: 8, T.Q5_0: 16}
"""Types of d * (code - limit), by the limit."""
_WITH_MINIMUM = {T.Q4_1: 15, T.Q5_1: 31}
"""Types of d * code + m, by the highest code."""


class _KType(NamedTuple):
    """A type of 256 columns with scales and minimums, and how it is searched without importance."""

    num_groups: int
    highest_code: int
    highest_scale: int
    search: tuple[float, float, int]


_K_WITH_MINIMUM = {
    T.Q2_K: _KType(16, 3, 15, (-0.5, 0.1, 15)),
    T.Q4_K: _KType(8, 15, 63, (-1, 0.1, 20)),
    T.Q5_K: _KType(8, 31, 63, (-0.5, 0.1, 15)),
}
_SEARCH_BY_IMPORTANCE = (-0.9, 0.05, 36)


def quantize(values: Values, type: T, importance: Values | None = None) -> NDArray[np.uint8]:
    """Encode rows as blocks of a type.

    importance: the weight of the square of an error in each column (the mean square of the column's inputs), finite and
    not negative. Plain numbers, Q8_0 and MXFP4 do not use it.

    Shapes: values float32[..., columns]; importance float32[columns], or any shape that broadcasts to that of values;
        result uint8[..., row bytes].
    Raises: ShapeError if the columns do not fill whole blocks or the importance does not fit, RequestError if a number
        is not finite or too large for the type, UnsupportedFormatError if the type has no encoder.
    """
    if type not in ENCODABLE_TYPES:
        names = ", ".join(encodable.name for encodable in ENCODABLE_TYPES)
        raise UnsupportedFormatError(f"no encoder writes {type.name}; wanted one of {names}")
    if values.dtype != np.float32 or values.ndim == 0:
        raise ShapeError(f"got {values.dtype}{list(values.shape)} to encode; wanted float32 rows")
    num_bytes = row_bytes(type, values.shape[-1])
    if not np.isfinite(values).all():
        raise RequestError("got NaN or infinity to encode; wanted finite weights")
    rows = np.ascontiguousarray(values).reshape(-1, block_size(type))
    weights = None if importance is None else _spread(importance, values).reshape(rows.shape)
    blocks = np.zeros(len(rows), dtype=block_dtype(type))
    with np.errstate(all="ignore"):
        for name, field in _encode(rows, weights, type, values.shape[-1]).items():
            blocks[name] = field.reshape(blocks[name].shape)
    for name in block_dtype(type).names or ():
        if blocks[name].dtype == np.float16 and not np.isfinite(blocks[name]).all():
            raise RequestError(
                f"got weights up to {np.abs(values).max():g}, which float16 numbers of {type.name} cannot hold (they "
                "end at 65504); wanted smaller weights, or the type F32 or BF16"
            )
    return blocks.view(np.uint8).reshape(*values.shape[:-1], num_bytes)


def _encode(rows: Values, importance: Values | None, type: T, columns: int) -> Fields:
    if type in _PLAIN:
        return _PLAIN[type](rows)
    if type in _K_WITH_MINIMUM:
        return _k_with_minimum(rows, importance, type)
    if type in _SEARCHING:
        return _SEARCHING[type](rows, importance)
    weights = None
    if importance is not None:
        per_row = ordered_sum((rows * rows).reshape(-1, columns)) / np.float32(columns)
        mean_square = np.repeat(per_row, columns // block_size(type))[:, None]
        weights = importance * np.sqrt(mean_square + rows * rows)
    if type in _SYMMETRIC:
        limit = _SYMMETRIC[type]
        scale, codes = _signed_extreme(rows, limit) if weights is None else fit_symmetric(rows, weights, limit)
        return {"d": scale, **pack_codes(codes, type)}
    levels = _WITH_MINIMUM[type]
    if weights is None:
        scale, minimum, codes = _extremes(rows, levels)
    else:
        scale, minus_minimum, codes = fit_minimum(rows, weights, levels, *_SEARCH_BY_IMPORTANCE)
        minimum = -minus_minimum
    return {"d": scale, "m": minimum, **pack_codes(codes, type)}


def _spread(importance: Values, values: Values) -> Values:
    """Give every weight its column's importance."""
    try:
        spread = np.broadcast_to(importance, values.shape)
    except ValueError:
        raise ShapeError(
            f"got importance {list(np.shape(importance))} for weights {list(values.shape)}; wanted one number a column"
        ) from None
    if importance.dtype != np.float32:
        raise ShapeError(f"got {importance.dtype} as importance; wanted float32")
    check_mean_squares(importance)
    return np.ascontiguousarray(spread)


def check_mean_squares(importance: Values) -> None:
    """Refuse importance that no squares add up to. Raises: RequestError."""
    if not (np.isfinite(importance).all() and (importance >= 0).all()):
        raise RequestError("got importance that is negative or not finite; wanted mean squares of activations")


def _inverse(scale: Values) -> Values:
    """Return 1 / scale, and 0 where that would overflow: such a block rounds to zeros."""
    is_normal = np.abs(scale) >= np.finfo(np.float32).tiny
    return np.divide(1, scale, out=np.zeros_like(scale), where=is_normal)


def _bf16(values: Values) -> Fields:
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    if (rounded & 0x7F80 == 0x7F80).any():
        raise RequestError(
            f"got weights up to {np.abs(values).max():g}, which round to infinity as BF16; "
            "wanted smaller weights, or the type F32"
        )
    return {"value": rounded}


def _q8_0(values: Values) -> Fields:
    d = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(d)
    codes = np.trunc(scaled)
    # Halves go away from zero.
    codes += np.where(np.abs(scaled - codes) >= np.float32(0.5), np.sign(scaled), np.float32(0))
    return {"d": d, "qs": codes.astype(np.int8)}


def _signed_extreme(values: Values, limit: int) -> tuple[Values, Values]:
    """Scale and codes of d * (code - limit): the value of largest magnitude gets code 0 exactly."""
    # Added to, a negative zero becomes a positive one, whose quotient ggml writes for a block of zeros.
    d = (largest_magnitude(values) + np.float32(0))[:, None] / np.float32(-limit)
    codes = np.trunc(values * _inverse(d) + np.float32(limit + 0.5))
    return d, codes.clip(0, 2 * limit - 1)


def _extremes(values: Values, levels: int) -> tuple[Values, Values, Values]:
    """Scale, minimum and codes of d * code + m, from the smallest value to the largest."""
    minimum, maximum = (extreme[:, None] for extreme in extremes(values))
    d = (maximum - minimum) / np.float32(levels)
    codes = np.trunc((values - minimum) * _inverse(d) + np.float32(0.5))
    return d, minimum, codes.clip(0, levels)


def _iq4_nl(values: Values, importance: Values | None) -> Fields:
    weights = squares = values * values
    if importance is not None:
        weights = importance * np.sqrt(ordered_sum(squares)[:, None] * np.float32(2 / 32) + squares)
    scale = fit_iq4(values, weights)[:, None]
    return {"d": scale, **pack_codes(nearest_iq4(_inverse(scale) * values), T.IQ4_NL)}


_E2M1_MIDDLES = np.array([0.5, 1.5, 2.5, 3.5, 5, 7, 10], np.float32)
"""Between two neighbours of doubled E2M1 numbers: the smaller one is taken there."""


def _mxfp4(values: Values) -> Fields:
    largest = np.abs(values).max(axis=1, keepdims=True)
    # Rounded to float32 as ggml's logarithm is, so that numbers just below a power of two count as that power.
    powers = np.floor(np.log2(largest.astype(np.float64)).astype(np.float32))
    exponents = np.where(largest > 0, np.maximum(powers - 2 + 127, 0), 0).astype(np.int32)
    magnitudes = np.ldexp(np.abs(values), 128 - exponents)
    codes = np.zeros(values.shape, np.uint8)
    for middle in _E2M1_MIDDLES:
        codes += magnitudes > middle
    codes += np.where((values < 0) & (codes > 0), np.uint8(8), np.uint8(0))
    return {"e": exponents.astype(np.uint8), **pack_codes(codes, T.MXFP4)}


def _half(values: Values) -> Values:
    """Round to float16, as the file stores it."""
    return values.astype(np.float16).astype(np.float32)


def _importance_weights(values: Values, importance: Values, factor: int) -> Values:
    """importance * sqrt(factor * mean square of the block + value^2). Shapes: all float32[blocks, 256]."""
    squares = values * values
    mean_square = np.float32(factor) * ordered_sum(squares) / np.float32(256)
    return importance * np.sqrt(mean_square[:, None] + squares)


def _round_codes(values: Values, scale: Values, codes: Values, lowest: int, highest: int) -> Values:
    """Codes from 0 of values over scales; where the scale is 0, the codes given.

    Shapes: values float32[blocks, groups, n], codes as many; scale float32[blocks, groups]; result float32[blocks, 256]
    """
    scale = scale[:, :, None]
    rounded = whole(divide(values, np.broadcast_to(scale, values.shape)), lowest, highest) - np.float32(lowest)
    return np.where(scale != 0, rounded, codes.reshape(values.shape)).reshape(len(values), 256)


def _share(values: Values, levels: int) -> tuple[Values, Values]:
    """Whole multiples of 1 / levels of a block's largest; return that fraction and the multiples."""
    largest = np.maximum(values.max(axis=1), np.float32(0))
    inverse = divide(np.float32(levels), largest)
    return largest / np.float32(levels), whole(inverse[:, None] * values, 0, levels)


def _k_with_minimum(values: Values, importance: Values | None, type: T) -> Fields:
    num_groups, highest, most, search = _K_WITH_MINIMUM[type]
    is_q2 = type is T.Q2_K
    grouped = values.reshape(len(values), num_groups, -1)
    if importance is not None:
        weights = _importance_weights(values, importance, 1 if is_q2 else 2).reshape(grouped.shape)
        search = _SEARCH_BY_IMPORTANCE
    elif is_q2:
        weights = np.abs(grouped)
    else:
        weights = np.sqrt(ordered_sum(grouped * grouped) / np.float32(32))[:, :, None] + np.abs(grouped)
    size, shape = grouped.shape[2], grouped.shape[:2]
    scale, minimum, codes = fit_minimum(
        values.reshape(-1, size), weights.reshape(-1, size), highest, *search, absolute=is_q2 and importance is None
    )
    scale, minimum = scale.reshape(shape), minimum.reshape(shape)
    if importance is None:
        (d, scales), (dmin, minimums) = _share(scale, most), _share(minimum, most)
    else:
        sums = ordered_sum(weights)
        (d, scales), (dmin, minimums) = fit_unsigned(scale, sums, most), fit_unsigned(minimum, sums, most)
    decoded_minimum = (_half(dmin)[:, None] * minimums)[:, :, None]
    codes = _round_codes(grouped + decoded_minimum, _half(d)[:, None] * scales, codes, 0, highest)
    bits = scales.astype(np.uint8), minimums.astype(np.uint8)
    packed = bits[0] | bits[1] << 4 if is_q2 else pack_k_scales(*bits)
    return {"d": d, "dmin": dmin, "scales": packed, **pack_codes(codes, type)}


def _q3_k(values: Values, importance: Values | None) -> Fields:
    groups = values.reshape(-1, 16)
    if importance is None:
        scale, codes = refine_symmetric(groups, 4)
        scale = scale.reshape(-1, 16)
        largest = largest_magnitude(scale)[:, None]
        inverse = divide(np.float32(-32), largest)
        d = divide(np.float32(1), inverse)[:, 0]
        scales: Values = np.where(largest != 0, whole(inverse * scale, -32, 31) + np.float32(32), np.float32(0))
    else:
        weights = _importance_weights(values, importance, 2).reshape(-1, 16)
        scale, codes = fit_symmetric(groups, weights, 4)
        d, scales = fit_symmetric(scale.reshape(-1, 16), ordered_sum(weights.reshape(-1, 16, 16)), 32)
    grid = _half(d)[:, None] * (scales - np.float32(32))
    codes = _round_codes(values.reshape(-1, 16, 16), grid, codes, -4, 3)
    bits = scales.astype(np.uint8)
    packed = np.concatenate([pack_bits(bits & 15, 4, 8), pack_bits(bits >> 4, 2, 4)], axis=1)
    return {"d": d, "scales": packed, **pack_codes(codes, T.Q3_K)}


def _q6_k(values: Values, importance: Values | None) -> Fields:
    weights = values * values if importance is None else importance
    scale, codes = fit_symmetric(values.reshape(-1, 16), weights.reshape(-1, 16), 32)
    scale = scale.reshape(-1, 16)
    largest = largest_magnitude(scale)[:, None]
    is_zero = np.abs(largest) < np.float32(1e-15)
    inverse = np.where(is_zero, np.float32(0), divide(np.float32(-128), largest))
    d = divide(np.float32(1), inverse)
    scales = whole(inverse * scale, -128, 127)
    codes = _round_codes(values.reshape(-1, 16, 16), _half(d) * scales, codes, -32, 31)
    codes = np.where(is_zero, np.float32(0), codes)
    return {"d": d, "scales": scales.astype(np.int8), **pack_codes(codes, T.Q6_K)}


def _iq4_xs(values: Values, importance: Values | None) -> Fields:
    weights = values * values if importance is None else _importance_weights(values, importance, 2)
    scale = fit_iq4(values.reshape(-1, 32), weights.reshape(-1, 32)).reshape(-1, 8)
    d = -largest_magnitude(scale)[:, None] / np.float32(32)
    scales = whole(divide(np.float32(1), d) * scale, -32, 31)
    inverse = divide(np.float32(1), d * scales)
    codes = nearest_iq4(inverse[:, :, None] * values.reshape(-1, 8, 32)).reshape(-1, 256)
    bits = (scales + np.float32(32)).astype(np.uint8)
    low, high = pack_bits(bits & 15, 4, 1), pack_bits(bits >> 4, 2, 1).view("<u2")
    return {"d": d, "scales_l": low, "scales_h": high, **pack_codes(codes, T.IQ4_XS)}


_PLAIN: dict[T, Callable[[Values], Fields]] = {
    T.F32: lambda values: {"value": values},
    T.F16: lambda values: {"value": values.astype(np.float16)},
    T.BF16: _bf16,
    T.Q8_0: _q8_0,
    T.MXFP4: _mxfp4,
}
"""Encoders that importance does not change."""

_SEARCHING: dict[T, Callable[[Values, Values | None], Fields]] = {
    T.IQ4_NL: _iq4_nl,
    T.Q3_K: _q3_k,
    T.Q6_K: _q6_k,
    T.IQ4_XS: _iq4_xs,
}

ENCODABLE_TYPES = tuple(sorted((*_PLAIN, *_SYMMETRIC, *_WITH_MINIMUM, *_K_WITH_MINIMUM, *_SEARCHING)))
"""Every type `quantize` writes."""
