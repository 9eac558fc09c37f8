"""What a quantized cache keeps of a head's row, and what meets it, in NumPy: the same roundings as the kernels', in
float32 where theirs are, so that codes are equal and only the arithmetic after them is float64."""

import math

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.kv_layout import SCALE_BLOCK
from tests.support.oracle_formulas import Float64Array

Float32Array = NDArray[np.float32]


def rotate(rows: Float32Array) -> Float32Array:
    """Orthonormal Walsh-Hadamard transform of float32[..., size], in groups of the largest power of two dividing it."""
    size = rows.shape[-1] & -rows.shape[-1]
    if size == 1:
        return rows
    result = (rows * np.float32(1.0 / math.sqrt(size))).astype(np.float32)
    distance = 1
    while distance < size:
        pairs = result.reshape(*rows.shape[:-1], -1, 2, distance)
        first, second = pairs[..., 0, :].copy(), pairs[..., 1, :].copy()
        pairs[..., 0, :], pairs[..., 1, :] = first + second, first - second
        distance *= 2
    return result


def kept(rows: Float64Array, head_size: int, name: str) -> Float64Array:
    """What a cache of a type gives back of rows [..., heads * head_size] of keys or values."""
    if name in ("f32", "f16"):
        return rows.astype({"f32": np.float32, "f16": np.float16}[name]).astype(np.float64)
    return _rounded(rows, head_size, name)


def kept_query(rows: Float64Array, head_size: int, key_name: str) -> Float64Array:
    """What is left of queries that meet keys of a type: quantized keys meet int8."""
    return rows if key_name in ("f32", "f16") else _rounded(rows, head_size, "int8")


def _rounded(rows: Float64Array, head_size: int, name: str) -> Float64Array:
    heads = rotate(rows.astype(np.float32).reshape(-1, head_size))
    blocks = [_rounded_block(heads[:, first : first + SCALE_BLOCK], name) for first in range(0, head_size, SCALE_BLOCK)]
    # The transform is its own inverse; in float64 it adds nothing to the rounding.
    back = _rotate_float64(np.concatenate(blocks, axis=1))
    return back.reshape(rows.shape)


def _rounded_block(rows: Float32Array, name: str) -> Float64Array:
    if name == "q4_0":
        highest, lowest = rows.max(axis=1, keepdims=True), rows.min(axis=1, keepdims=True)
        scale = np.where(highest > -lowest, highest, lowest) / np.float32(-8)
        least, most = -8, 7
    else:
        scale = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
        least, most = -127, 127
    if name != "int8":
        scale = scale.astype(np.float16).astype(np.float32)
    is_zero = np.abs(scale) < np.float32(1e-36)
    inverse = np.where(is_zero, np.float32(0), np.float32(1) / np.where(is_zero, np.float32(1), scale))
    codes = np.rint(np.clip(rows * inverse, np.float32(least), np.float32(most)))
    return codes.astype(np.float64) * scale.astype(np.float64)


def _rotate_float64(rows: Float64Array) -> Float64Array:
    size = rows.shape[-1] & -rows.shape[-1]
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    groups = rows.reshape(len(rows), -1, size)
    return (groups @ matrix / math.sqrt(size)).reshape(rows.shape)
