"""Writes matrices as FP8, FP4, int8, bitsandbytes and HQQ checkpoints do, with what their numbers mean in float64.

Every decoder here is a table or a loop written from the formats' descriptions, apart from those of the program.
"""

import json
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

from tests.support.checkpoint_files import Array, Stored

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@dataclass(frozen=True)
class Written:
    """The tensors of a module, and float64[R, K]: the weights they stand for."""

    tensors: dict[str, Stored]
    weights: Array


def small_float(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """A minifloat without infinities: sign, exponent, mantissa."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) & 1 else 1.0
    exponent = code >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (code & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    return sign * (fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias))


E4M3 = np.array([small_float(code, 4, 3, 7) if code & 127 != 127 else np.nan for code in range(256)])
E5M2 = np.array([small_float(code, 5, 2, 15) if code & 124 != 124 else np.nan for code in range(256)])
E2M3 = np.array([small_float(code, 2, 3, 1) for code in range(64)])


def nearest(values: Array, table: Array) -> Array:
    """The code of the entry nearest to each value, uint8."""
    order = np.argsort(np.where(np.isnan(table), np.inf, table))
    count = int(np.isfinite(table).sum())
    levels = table[order[:count]]
    edges = (levels[1:] + levels[:-1]) / 2
    return order[np.searchsorted(edges, values)].astype(np.uint8)


def normal(generator: np.random.Generator, shape: tuple[int, int]) -> Array:
    """Weights as wide as those of a trained layer, a few of them far out."""
    values = generator.standard_normal(shape) / sqrt(shape[1])
    values.reshape(-1)[:: max(1, values.size // 5)] *= 6
    return values


def spread(scales: Array, shape: tuple[int, int], rows: int, columns: int) -> Array:
    """One scale per block of so many rows and columns, for every weight."""
    return np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)[: shape[0], : shape[1]]


def fp8(
    values: Array, rows: int, columns: int, *, table: Array = E4M3, leaf: str = "weight_scale", inner: int = 2
) -> Written:
    """FP8 with a float32 scale per block of so many rows and columns; inner: dimensions of the scales' tensor."""
    dtype = "F8_E4M3" if table is E4M3 else "F8_E5M2"
    blocks = (ceil(values.shape[0] / rows), ceil(values.shape[1] / columns))
    scales = np.zeros(blocks, np.float32)
    for r in range(blocks[0]):
        for c in range(blocks[1]):
            block = values[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns]
            scales[r, c] = np.abs(block).max() / np.nanmax(table)
    wide = spread(scales.astype(np.float64), values.shape, rows, columns)
    codes = nearest(values / wide, table)
    stored = scales if inner == 2 else scales.reshape((-1,) if inner == 1 else ())
    return Written({"weight": (dtype, codes), leaf: stored}, table[codes] * wide)


def int8(generator: np.random.Generator, shape: tuple[int, int], bits: int, *, has_zeros: bool = False) -> Written:
    """int8 elements with a float32 scale per row, and perhaps a zero point."""
    half = 1 << (bits - 1)
    codes = generator.integers(-half, half, shape).astype(np.int8)
    scales = (generator.uniform(0.5, 1.0, (shape[0], 1)) / half / sqrt(shape[1])).astype(np.float32)
    zeros = generator.integers(-half, half, (shape[0], 1)).astype(np.int8) if has_zeros else np.zeros((1, 1), np.int8)
    tensors: dict[str, Stored] = {"weight": ("I8", codes), "weight_scale": scales}
    if has_zeros:
        tensors["weight_zero_point"] = ("I8", zeros)
    return Written(tensors, scales.astype(np.float64) * (codes.astype(np.float64) - zeros))


def halves(codes: Array, *, first_is_low: bool = True) -> Array:
    """Codes of four bits, two neighbours to a byte."""
    first, second = codes[..., 0::2], codes[..., 1::2]
    return (first | second << 4 if first_is_low else first << 4 | second).astype(np.uint8)


def mxfp4(values: Array) -> Written:
    """Groups of 32 with a power of two."""
    groups = values.reshape(len(values), -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=2))).astype(int) - 2
    table = np.array([*E2M1, *(-value for value in E2M1)])
    codes = nearest(groups / 2.0 ** exponents[..., None], table)
    weights = (table[codes] * 2.0 ** exponents[..., None]).reshape(values.shape)
    tensors: dict[str, Stored] = {
        "weight_packed": halves(codes.reshape(values.shape)),
        "weight_scale": (exponents + 127).astype(np.uint8),
    }
    return Written(tensors, weights)


def mxfp6(values: Array) -> Written:
    """E2M3 codes, four in three bytes from the lowest bit on, groups of 32 with a power of two."""
    groups = values.reshape(len(values), -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(axis=2))).astype(int) - 2
    codes = nearest(groups / 2.0 ** exponents[..., None], E2M3).reshape(len(values), -1, 4).astype(np.uint32)
    words = codes[..., 0] | codes[..., 1] << 6 | codes[..., 2] << 12 | codes[..., 3] << 18
    data = np.stack([words & 255, words >> 8 & 255, words >> 16], axis=-1).astype(np.uint8)
    weights = E2M3[codes].reshape(groups.shape) * 2.0 ** exponents[..., None]
    tensors: dict[str, Stored] = {
        "weight_packed": data.reshape(len(values), -1),
        "weight_scale": (exponents + 127).astype(np.uint8),
    }
    return Written(tensors, weights.reshape(values.shape))


def nvfp4(values: Array, *, is_modelopt: bool = False) -> Written:
    """Groups of 16 with an E4M3 scale, and one scale of the tensor, which divides or (modelopt) multiplies."""
    groups = values.reshape(len(values), -1, 16)
    whole = np.float32(np.abs(values).max() / (448 * 6))
    stored = whole if is_modelopt else np.float32(1) / whole
    factor = float(stored) if is_modelopt else 1.0 / float(stored)
    scale_codes = nearest(np.abs(groups).max(axis=2) / 6 / factor, np.where(np.arange(256) < 128, E4M3, np.nan))
    scales = E4M3[scale_codes][..., None] * factor
    table = np.array([*E2M1, *(-value for value in E2M1)])
    codes = nearest(np.divide(groups, scales, out=np.zeros_like(groups), where=scales != 0), table)
    names = ("weight", "weight_scale_2") if is_modelopt else ("weight_packed", "weight_global_scale")
    tensors: dict[str, Stored] = {
        names[0]: halves(codes.reshape(values.shape)),
        "weight_scale": ("F8_E4M3", scale_codes),
        names[1]: np.array(stored if is_modelopt else [stored], np.float32),
    }
    return Written(tensors, (table[codes] * scales).reshape(values.shape))


def bitsandbytes(values: Array, kind: str, *, size: int = 64, is_nested: bool = False) -> Written:
    """Codes of a table of 16 numbers, scales per run of the flattened matrix, perhaps quantized themselves."""
    levels = np.linspace(-1, 1, 16) ** 3 if kind == "nf4" else np.array([*E2M1, *(-value for value in E2M1)]) / 6
    table = levels.astype(np.float32).astype(np.float64)
    flat = values.reshape(-1)
    blocks = np.pad(flat, (0, -len(flat) % size)).reshape(-1, size)
    scales = np.abs(blocks).max(axis=1).astype(np.float32)
    tensors: dict[str, Stored] = {}
    state = {"quant_type": kind, "blocksize": size, "dtype": "bfloat16", "shape": list(values.shape)}
    if is_nested:
        offset = float(np.float32(scales.mean()))
        shifted = scales - offset
        outer_levels = (np.linspace(-1, 1, 256)).astype(np.float32)
        outer = np.array([np.abs(shifted[i : i + 256]).max() for i in range(0, len(shifted), 256)], np.float32)
        wide = np.repeat(outer, 256)[: len(shifted)]
        scale_codes = nearest(shifted / wide, outer_levels.astype(np.float64))
        exact = outer_levels[scale_codes].astype(np.float64) * wide + offset
        tensors |= {"weight.absmax": scale_codes, "weight.nested_absmax": outer}
        tensors |= {"weight.nested_quant_map": outer_levels}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        exact = scales.astype(np.float64)
        tensors["weight.absmax"] = scales
    codes = nearest(blocks / exact[:, None], table)
    raw = np.frombuffer(json.dumps(state).encode(), np.uint8)
    tensors |= {
        "weight": halves(codes.reshape(-1)[: len(flat)], first_is_low=False).reshape(-1, 1),
        "weight.quant_map": table.astype(np.float32),
        f"weight.quant_state.bitsandbytes__{kind}": raw,
    }
    return Written(tensors, (table[codes] * exact[:, None]).reshape(-1)[: len(flat)].reshape(values.shape))


def hqq(
    generator: np.random.Generator, shape: tuple[int, int], bits: int, size: int, axis: int, *, is_whole: bool = False
) -> Written:
    """Codes of the reshaped matrix, rows a fixed step apart in one element, the first in the upper bits."""
    count = shape[0] * shape[1] // size
    grid = (count, size) if axis == 1 else (size, count)
    codes = generator.integers(0, 1 << bits, grid)
    one = (count, 1) if axis == 1 else (1, count)
    scales = (generator.uniform(0.5, 1.0, one) / (1 << bits) / sqrt(shape[1])).astype(np.float16)
    zeros = generator.uniform(0, (1 << bits) - 1, one).astype(np.float16)
    if is_whole:
        zeros = np.rint(zeros)
    per_element = {8: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    step = ceil(grid[0] / per_element)
    padded = np.zeros((step * per_element, grid[1]), np.int64)
    padded[: grid[0]] = codes
    packed = np.zeros((step, grid[1]), np.int64)
    for part in range(per_element):
        packed |= padded[part * step : (part + 1) * step] << bits * (per_element - 1 - part)
    tensors: dict[str, Stored] = {
        "W_q": packed.astype(np.int32 if bits == 3 else np.uint8),
        "scale": scales,
        "zero": zeros,
        "shape": np.array(shape, np.int64),
        "nbits": np.array(bits, np.int32),
        "group_size": np.array(size, np.int32),
        "axis": np.array(axis, np.int32),
        "view_as_float": np.array(0, np.uint8),
        "packing": np.frombuffer(b"4bit_u8", np.uint8),
    }
    weights = (codes - zeros.astype(np.float64)) * scales.astype(np.float64)
    return Written(tensors, weights.reshape(shape))
