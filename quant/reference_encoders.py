"""Plain encoders: round to the nearest code on a grid set by the extremes of each block.

They make valid tensors for tests and small tools. They minimise nothing: no importance, no search
for a better scale. The 32-column types equal the `gguf` package's encoders bit for bit.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError, ShapeError, UnsupportedFormatError
from localinfer.quant.formats import TensorType, block_dtype, block_size, row_bytes
from localinfer.quant.unpacking import pack_bits, pack_k_scales

Values = NDArray[np.float32]
Fields = dict[str, NDArray[Any]]


def quantize(values: Values, type: TensorType) -> NDArray[np.uint8]:
    """Encode float32[..., columns] as uint8[..., row bytes] by the plain rule of the type.

    Raises: ShapeError if the columns do not fill whole blocks, RequestError if a value is not
        finite or too large for the type, UnsupportedFormatError if the type has no plain encoder.
    """
    encode = _ENCODERS.get(type)
    if encode is None:
        names = ", ".join(encodable.name for encodable in _ENCODERS)
        raise UnsupportedFormatError(f"no plain encoder writes {type.name}; wanted one of {names}")
    if values.dtype != np.float32 or values.ndim == 0:
        raise ShapeError(f"got {values.dtype}{list(values.shape)} to encode; wanted float32 rows")
    num_bytes = row_bytes(type, values.shape[-1])
    if not np.isfinite(values).all():
        raise RequestError("got NaN or infinity to encode; wanted finite weights")
    rows = np.ascontiguousarray(values).reshape(-1, block_size(type))
    blocks = np.zeros(len(rows), dtype=block_dtype(type))
    for name, field in encode(rows).items():
        blocks[name] = field.reshape(blocks[name].shape)
    return blocks.view(np.uint8).reshape(*values.shape[:-1], num_bytes)


def _half(values: Values) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise RequestError(
            f"got weights up to {np.abs(values).max():g} where float16 ends at 65504; "
            "wanted smaller weights, or the type F32 or BF16"
        )
    return half


def _inverse(scale: Values) -> Values:
    """Return 1 / scale, and 0 where that would overflow: such a block rounds to zeros."""
    is_normal = np.abs(scale) >= np.finfo(np.float32).tiny
    return np.divide(1, scale, out=np.zeros_like(scale), where=is_normal)


def _f32(values: Values) -> Fields:
    return {"value": values}


def _f16(values: Values) -> Fields:
    return {"value": _half(values)}


def _bf16(values: Values) -> Fields:
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)
    if (rounded & 0x7F80 == 0x7F80).any():
        raise RequestError(
            f"got weights up to {np.abs(values).max():g}, which round to infinity as BF16; "
            "wanted smaller weights, or the type F32"
        )
    return {"value": rounded}


def _signed_max(values: Values, limit: int) -> tuple[NDArray[np.float16], NDArray[np.uint8]]:
    """Encode on d * (code - limit): the value of largest magnitude gets code 0 exactly."""
    largest = np.take_along_axis(values, np.abs(values).argmax(axis=1, keepdims=True), axis=1)
    d = largest / np.float32(-limit)
    codes = np.trunc(values * _inverse(d) + np.float32(limit + 0.5))
    return _half(d), codes.clip(0, 2 * limit - 1).astype(np.uint8)


def _min_max(values: Values, levels: int) -> tuple[NDArray[np.float16], NDArray[np.float16], NDArray[np.uint8]]:
    """Encode on d * code + m, from the smallest value to the largest."""
    minimum = values.min(axis=1, keepdims=True)
    d = (values.max(axis=1, keepdims=True) - minimum) / np.float32(levels)
    codes = np.trunc((values - minimum) * _inverse(d) + np.float32(0.5))
    return _half(d), _half(minimum), codes.clip(0, levels).astype(np.uint8)


def _q4_0(values: Values) -> Fields:
    d, codes = _signed_max(values, 8)
    return {"d": d, "qs": pack_bits(codes, 4, 16)}


def _q4_1(values: Values) -> Fields:
    d, m, codes = _min_max(values, 15)
    return {"d": d, "m": m, "qs": pack_bits(codes, 4, 16)}


def _q5_0(values: Values) -> Fields:
    d, codes = _signed_max(values, 16)
    return {"d": d, "qh": pack_bits(codes >> 4, 1, 1), "qs": pack_bits(codes & 15, 4, 16)}


def _q5_1(values: Values) -> Fields:
    d, m, codes = _min_max(values, 31)
    return {"d": d, "m": m, "qh": pack_bits(codes >> 4, 1, 1), "qs": pack_bits(codes & 15, 4, 16)}


def _q8_0(values: Values) -> Fields:
    d = np.abs(values).max(axis=1, keepdims=True) / np.float32(127)
    scaled = values * _inverse(d)
    codes = np.copysign(np.floor(np.abs(scaled) + np.float32(0.5)), scaled)
    return {"d": _half(d), "qs": codes.astype(np.int8)}


def _k_min_max(values: Values, levels: int) -> tuple[Fields, NDArray[np.uint8]]:
    """Encode groups of 32 from min(0, smallest) to largest, scales and minimums in 6 bits."""
    groups = values.reshape(-1, 8, 32)
    minimum = np.minimum(groups.min(axis=2), 0)
    scale = (groups.max(axis=2) - minimum).clip(0) / np.float32(levels)
    d = _half(scale.max(axis=1, keepdims=True) / np.float32(63))
    dmin = _half(-minimum.min(axis=1, keepdims=True) / np.float32(63))
    scales = _codes(scale, d.astype(np.float32), 63)
    minimums = _codes(-minimum, dmin.astype(np.float32), 63)
    grid_scale = (d.astype(np.float32) * scales)[:, :, None]
    grid_minimum = (dmin.astype(np.float32) * minimums)[:, :, None]
    codes = _codes(groups + grid_minimum, grid_scale, levels).reshape(-1, 256)
    return {"d": d, "dmin": dmin, "scales": pack_k_scales(scales, minimums)}, codes


def _codes(values: Values, scale: Values, maximum: int) -> NDArray[np.uint8]:
    codes: Values = np.rint(values * _inverse(scale)).clip(0, maximum)
    return codes.astype(np.uint8)


def _q4_k_min_max(values: Values) -> Fields:
    fields, codes = _k_min_max(values, 15)
    return fields | {"qs": pack_bits(codes, 4, 32)}


def _q5_k_min_max(values: Values) -> Fields:
    fields, codes = _k_min_max(values, 31)
    return fields | {"qh": pack_bits(codes >> 4, 1, 32), "qs": pack_bits(codes & 15, 4, 32)}


def _q6_k_max_abs(values: Values) -> Fields:
    """Encode groups of 16 symmetrically, each scaled to its largest magnitude."""
    groups = values.reshape(-1, 16, 16)
    scale = np.abs(groups).max(axis=2) / np.float32(31)
    d = _half(scale.max(axis=1, keepdims=True) / np.float32(127))
    scales = _codes(scale, d.astype(np.float32), 127)
    grid_scale = (d.astype(np.float32) * scales)[:, :, None]
    signed = np.rint(groups * _inverse(grid_scale)).clip(-32, 31)
    codes = (signed + 32).astype(np.uint8).reshape(-1, 256)
    return {
        "d": d,
        "scales": scales.astype(np.int8),
        "ql": pack_bits(codes & 15, 4, 64),
        "qh": pack_bits(codes >> 4, 2, 32),
    }


_ENCODERS: dict[TensorType, Callable[[Values], Fields]] = {
    TensorType.F32: _f32,
    TensorType.F16: _f16,
    TensorType.BF16: _bf16,
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q4_K: _q4_k_min_max,
    TensorType.Q5_K: _q5_k_min_max,
    TensorType.Q6_K: _q6_k_max_abs,
}
