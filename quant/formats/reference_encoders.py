"""The NumPy oracle of the encoders: the bytes ggml's quantizer writes, with and without importance.

Without importance the types of 32 columns (but IQ4_NL) take a grid from the extremes of each block and round to it. The
others, and all of them with importance, search for the grid (`reference_fits`). Slow on purpose: kernels are tested
against it.
Source: the reference encoders of the ggml repository (ggml-quants.c).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError, ShapeError, UnsupportedFormatError
from localinfer.quant.formats.reference_fits import (
    Values,
    extremes,
    fit_iq4,
    fit_minimum,
    fit_symmetric,
    largest_magnitude,
    nearest_iq4,
    ordered_sum,
)
from localinfer.quant.formats.reference_k_encoders import K_ENCODERS
from localinfer.quant.formats.types import TensorType, block_dtype, block_size, row_bytes
from localinfer.quant.formats.unpacking import pack_bits

Fields = dict[str, NDArray[Any]]


def quantize(values: Values, type: TensorType, importance: Values | None = None) -> NDArray[np.uint8]:
    """Encode rows as blocks of a type.

    importance: how much the square of an error in each column weighs (the mean square of what the column is multiplied
    with), finite and not negative. Plain numbers and Q8_0 do not use it.

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


def _encode(rows: Values, importance: Values | None, type: TensorType, columns: int) -> Fields:
    if type in K_ENCODERS:
        return K_ENCODERS[type](rows, importance)
    if type is TensorType.IQ4_NL:
        return _iq4_nl(rows, importance)
    if importance is None or type not in _SEARCHING:
        return _PLAIN[type](rows)
    per_row = ordered_sum((rows * rows).reshape(-1, columns)) / np.float32(columns)
    mean_square = np.repeat(per_row, columns // block_size(type))[:, None]
    return _SEARCHING[type](rows, importance * np.sqrt(mean_square + rows * rows))


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
    if not (np.isfinite(importance).all() and (importance >= 0).all()):
        raise RequestError("got importance that is negative or not finite; wanted mean squares of activations")
    return np.ascontiguousarray(spread)


def _inverse(scale: Values) -> Values:
    """Return 1 / scale, and 0 where that would overflow: such a block rounds to zeros."""
    is_normal = np.abs(scale) >= np.finfo(np.float32).tiny
    return np.divide(1, scale, out=np.zeros_like(scale), where=is_normal)


def _f32(values: Values) -> Fields:
    return {"value": values}


def _f16(values: Values) -> Fields:
    return {"value": values.astype(np.float16)}


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


def _searched_minimum(values: Values, weights: Values, levels: int) -> tuple[Values, Values, Values]:
    scale, minus_minimum, codes = fit_minimum(values, weights, levels, -0.9, 0.05, 36)
    return scale, -minus_minimum, codes


def _iq4_nl(values: Values, importance: Values | None) -> Fields:
    weights = squares = values * values
    if importance is not None:
        weights = importance * np.sqrt(ordered_sum(squares)[:, None] * np.float32(2 / 32) + squares)
    scale = fit_iq4(values, weights)[:, None]
    return _four_bits(scale, nearest_iq4(_inverse(scale) * values))


def _four_bits(scale: Values, codes: NDArray[Any]) -> Fields:
    return {"d": scale, "qs": pack_bits(codes, 4, 16)}


def _five_bits(scale: Values, codes: NDArray[Any]) -> Fields:
    bits = codes.astype(np.uint8)
    return {"d": scale, "qh": pack_bits(bits >> 4, 1, 1), "qs": pack_bits(bits & 15, 4, 16)}


def _four_bits_and_minimum(scale: Values, minimum: Values, codes: Values) -> Fields:
    return {"m": minimum, **_four_bits(scale, codes)}


def _five_bits_and_minimum(scale: Values, minimum: Values, codes: Values) -> Fields:
    return {"m": minimum, **_five_bits(scale, codes)}


_PLAIN: dict[TensorType, Callable[[Values], Fields]] = {
    TensorType.F32: _f32,
    TensorType.F16: _f16,
    TensorType.BF16: _bf16,
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_0: lambda values: _four_bits(*_signed_extreme(values, 8)),
    TensorType.Q4_1: lambda values: _four_bits_and_minimum(*_extremes(values, 15)),
    TensorType.Q5_0: lambda values: _five_bits(*_signed_extreme(values, 16)),
    TensorType.Q5_1: lambda values: _five_bits_and_minimum(*_extremes(values, 31)),
}

_SEARCHING: dict[TensorType, Callable[[Values, Values], Fields]] = {
    TensorType.Q4_0: lambda values, weights: _four_bits(*fit_symmetric(values, weights, 8)),
    TensorType.Q4_1: lambda values, weights: _four_bits_and_minimum(*_searched_minimum(values, weights, 15)),
    TensorType.Q5_0: lambda values, weights: _five_bits(*fit_symmetric(values, weights, 16)),
    TensorType.Q5_1: lambda values, weights: _five_bits_and_minimum(*_searched_minimum(values, weights, 31)),
}
"""What importance turns the plain encoders of 32 columns into."""

ENCODABLE_TYPES = (*_PLAIN, TensorType.IQ4_NL, *K_ENCODERS)
"""Every type `quantize` writes."""
