"""The NumPy oracle's encoders of the types with 256 columns per block: Q2_K to Q6_K and IQ4_XS.

Each fits every group of a block by itself, then fits the groups' scales to the few bits they get, and rounds the codes
once more with the scales as a reader will decode them. A group whose scale decodes to 0 keeps the codes of its own fit.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.quant.formats.reference_fits import (
    Values,
    divide,
    fit_iq4,
    fit_minimum,
    fit_symmetric,
    fit_unsigned,
    nearest_iq4,
    ordered_sum,
    refine_symmetric,
    whole,
)
from localinfer.quant.formats.types import TensorType
from localinfer.quant.formats.unpacking import pack_bits, pack_k_scales

Fields = dict[str, NDArray[Any]]


def _half(values: Values) -> Values:
    """Round to float16, as the file stores it."""
    return values.astype(np.float16).astype(np.float32)


def _importance_weights(values: Values, importance: Values, factor: int) -> Values:
    """importance * sqrt(factor * mean square of the block + value^2). Shapes: all float32[blocks, 256]."""
    squares = values * values
    mean_square = np.float32(factor) * ordered_sum(squares) / np.float32(256)
    return importance * np.sqrt(mean_square[:, None] + squares)


def _round_codes(values: Values, scale: Values, minimum: Values, codes: Values, levels: int) -> Values:
    """Codes on the grid scale * code - minimum; where the scale is 0, the codes given.

    Shapes: values and codes float32[blocks, groups, n]; scale and minimum float32[blocks, groups].
    """
    scale, minimum = scale[:, :, None], minimum[:, :, None]
    rounded = whole(divide(values + minimum, np.broadcast_to(scale, values.shape)), 0, levels)
    return np.where(scale != 0, rounded, codes).reshape(len(values), 256)


def _fit_groups(
    values: Values, weights: Values, groups: int, levels: int, search: tuple[float, float, int], absolute: bool = False
) -> tuple[Values, Values, Values]:
    """`fit_minimum` over the groups of each block; returns [blocks, groups] twice, and [blocks, groups, n]."""
    flat_values, flat_weights = values.reshape(-1, 256 // groups), weights.reshape(-1, 256 // groups)
    scale, minimum, codes = fit_minimum(flat_values, flat_weights, levels, *search, absolute=absolute)
    return scale.reshape(-1, groups), minimum.reshape(-1, groups), codes.reshape(-1, groups, 256 // groups)


def _q2_k(values: Values, importance: Values | None) -> Fields:
    grouped = values.reshape(-1, 16, 16)
    if importance is None:
        scale, minimum, codes = _fit_groups(values, np.abs(values), 16, 3, (-0.5, 0.1, 15), absolute=True)
        (d, scales), (dmin, minimums) = _share(scale, 15), _share(minimum, 15)
    else:
        weights = _importance_weights(values, importance, 1)
        scale, minimum, codes = _fit_groups(values, weights, 16, 3, (-0.9, 0.05, 36))
        sums = ordered_sum(weights.reshape(-1, 16, 16))
        (d, scales), (dmin, minimums) = fit_unsigned(scale, sums, 15), fit_unsigned(minimum, sums, 15)
    codes = _round_codes(grouped, _half(d)[:, None] * scales, _half(dmin)[:, None] * minimums, codes, 3)
    packed_scales = scales.astype(np.uint8) | minimums.astype(np.uint8) << 4
    return {"d": d, "dmin": dmin, "scales": packed_scales, "qs": pack_bits(codes.astype(np.uint8), 2, 32)}


def _share(values: Values, levels: int) -> tuple[Values, Values]:
    """Whole multiples of 1 / levels of a block's largest; return that fraction and the multiples."""
    largest = np.maximum(values.max(axis=1), np.float32(0))
    inverse = divide(np.float32(levels), largest)
    return largest / np.float32(levels), whole(inverse[:, None] * values, 0, levels)


def _q3_k(values: Values, importance: Values | None) -> Fields:
    grouped = values.reshape(-1, 16, 16)
    if importance is None:
        scale, codes = refine_symmetric(values.reshape(-1, 16), 4)
        scale = scale.reshape(-1, 16)
        largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
        inverse = divide(np.float32(-32), largest)
        scales = whole(inverse * scale, -32, 31) + np.float32(32)
        d = divide(np.float32(1), inverse)[:, 0]
        scales = np.where(largest != 0, scales, np.float32(0))
    else:
        weights = _importance_weights(values, importance, 2)
        scale, codes = fit_symmetric(values.reshape(-1, 16), weights.reshape(-1, 16), 4)
        sums = ordered_sum(weights.reshape(-1, 16, 16))
        d, scales = fit_symmetric(scale.reshape(-1, 16), sums, 32)
    grid = (_half(d)[:, None] * (scales - np.float32(32)))[:, :, None]
    rounded = whole(divide(grouped, np.broadcast_to(grid, grouped.shape)), -4, 3) + np.float32(4)
    final = np.where(grid != 0, rounded, codes.reshape(grouped.shape)).reshape(-1, 256).astype(np.uint8)
    bits = scales.astype(np.uint8)
    return {
        "d": d,
        "scales": np.concatenate([pack_bits(bits & 15, 4, 8), pack_bits(bits >> 4, 2, 4)], axis=1),
        "hmask": pack_bits(final >> 2, 1, 32),
        "qs": pack_bits(final & 3, 2, 32),
    }


def _k_with_minimum(
    values: Values, importance: Values | None, levels: int, search: tuple[float, float, int]
) -> tuple[Fields, NDArray[np.uint8]]:
    """Q4_K and Q5_K: everything but the codes' places. `search` holds without importance."""
    if importance is None:
        grouped = values.reshape(-1, 8, 32)
        mean_square = ordered_sum(grouped * grouped) / np.float32(32)
        weights = (np.sqrt(mean_square)[:, :, None] + np.abs(grouped)).reshape(-1, 256)
        scale, minimum, codes = _fit_groups(values, weights, 8, levels, search)
        (d, scales), (dmin, minimums) = _share(scale, 63), _share(minimum, 63)
    else:
        weights = _importance_weights(values, importance, 2)
        scale, minimum, codes = _fit_groups(values, weights, 8, levels, (-0.9, 0.05, 36))
        sums = ordered_sum(weights.reshape(-1, 8, 32))
        (d, scales), (dmin, minimums) = fit_unsigned(scale, sums, 63), fit_unsigned(minimum, sums, 63)
    grid_scale, grid_minimum = _half(d)[:, None] * scales, _half(dmin)[:, None] * minimums
    codes = _round_codes(values.reshape(-1, 8, 32), grid_scale, grid_minimum, codes, levels)
    packed = pack_k_scales(scales.astype(np.uint8), minimums.astype(np.uint8))
    return {"d": d, "dmin": dmin, "scales": packed}, codes.astype(np.uint8)


def _q4_k(values: Values, importance: Values | None) -> Fields:
    fields, codes = _k_with_minimum(values, importance, 15, (-1, 0.1, 20))
    return fields | {"qs": pack_bits(codes, 4, 32)}


def _q5_k(values: Values, importance: Values | None) -> Fields:
    fields, codes = _k_with_minimum(values, importance, 31, (-0.5, 0.1, 15))
    return fields | {"qh": pack_bits(codes >> 4, 1, 32), "qs": pack_bits(codes & 15, 4, 32)}


def _q6_k(values: Values, importance: Values | None) -> Fields:
    weights = values * values if importance is None else importance
    scale, codes = fit_symmetric(values.reshape(-1, 16), weights.reshape(-1, 16), 32)
    scale = scale.reshape(-1, 16)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    is_zero = np.abs(largest) < np.float32(1e-15)
    inverse = np.where(is_zero, np.float32(0), divide(np.float32(-128), largest))
    d = divide(np.float32(1), inverse)
    scales = whole(inverse * scale, -128, 127)
    grid = (_half(d) * scales)[:, :, None]
    grouped = values.reshape(-1, 16, 16)
    rounded = whole(divide(grouped, np.broadcast_to(grid, grouped.shape)), -32, 31) + np.float32(32)
    final = np.where(grid != 0, rounded, codes.reshape(grouped.shape)).reshape(-1, 256)
    final = np.where(is_zero, np.float32(0), final).astype(np.uint8)
    return {
        "d": d,
        "scales": scales.astype(np.int8),
        "ql": pack_bits(final & 15, 4, 64),
        "qh": pack_bits(final >> 4, 2, 32),
    }


def _iq4_xs(values: Values, importance: Values | None) -> Fields:
    weights = values * values if importance is None else _importance_weights(values, importance, 2)
    scale = fit_iq4(values.reshape(-1, 32), weights.reshape(-1, 32)).reshape(-1, 8)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)
    d = -largest / np.float32(32)
    scales = whole(divide(np.float32(1), d) * scale, -32, 31)
    inverse = divide(np.float32(1), d * scales)
    codes = nearest_iq4(inverse[:, :, None] * values.reshape(-1, 8, 32)).reshape(-1, 256)
    bits = (scales + np.float32(32)).astype(np.uint8)
    return {
        "d": d,
        "scales_l": pack_bits(bits & 15, 4, 1),
        "scales_h": pack_bits(bits >> 4, 2, 1).view("<u2"),
        "qs": pack_bits(codes, 4, 16),
    }


K_ENCODERS: dict[TensorType, Callable[[Values, Values | None], Fields]] = {
    TensorType.Q2_K: _q2_k,
    TensorType.Q3_K: _q3_k,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
    TensorType.IQ4_XS: _iq4_xs,
}
"""Fields of blocks from float32[blocks, 256], and importance of the same shape or None."""
