"""Blocks of GGUF tensors to float32, in NumPy: the meaning of a quantized tensor's bytes.

Slow and obvious on purpose. Kernels are tested against `dequantize`, and `dequantize` is tested bit
for bit against the `gguf` package (tests/quant/formats/test_dequantize.py), so every expression keeps that
package's order of float32 operations. Most types are `scale * level + minimum` by group of columns (`group_scales`,
`levels_of`); codes of IQ1, IQ2 and IQ3 are indices into a grid of vectors. The grids are constants of the format,
taken from the `gguf` package when first needed.
Source: the block formats of the ggml repository (ggml-common.h, ggml-quants.c).
"""

from collections.abc import Callable
from functools import cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError, UnsupportedFormatError
from localinfer.kernels.layouts import grid_vectors
from localinfer.quant.formats.types import (
    IQ4_VALUES,
    Blocks,
    TensorType,
    bfloat16_values,
    block_dtype,
    row_bytes,
    unpack_bits,
    unpack_codes,
    unpack_k_scales,
    unpack_signed_scales,
)
from localinfer.types import FloatArray

E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
"""Twice the values of the 16 codes of MXFP4 and NVFP4; their scales are halved to match."""

_LEVELS: dict[TensorType, FloatArray] = {
    **dict.fromkeys((TensorType.IQ4_NL, TensorType.IQ4_XS), IQ4_VALUES),
    **dict.fromkeys((TensorType.MXFP4, TensorType.NVFP4), E2M1_VALUES),
    TensorType.Q1_0: np.array([-1, 1], np.float32),
}
"""Values of codes, where they are not numbers themselves."""

LEVEL_OFFSETS = {
    TensorType.Q4_0: 8,
    TensorType.Q5_0: 16,
    TensorType.Q3_K: 4,
    TensorType.Q6_K: 32,
    **dict.fromkeys((TensorType.Q2_0, TensorType.TQ1_0, TensorType.TQ2_0), 1),
}
"""Offsets that are subtracted from codes that are numbers, 0 elsewhere."""

SUBTRACTS_MINIMUM = (TensorType.Q2_K, TensorType.Q4_K, TensorType.Q5_K)
"""Types that decode to scale * level - minimum, not + minimum."""


def dequantize(data: NDArray[np.uint8], type: TensorType, shape: tuple[int, ...]) -> FloatArray:
    """Decode the bytes of a tensor.

    Infinite and NaN scales pass through to the weights they scale.

    Shapes: data uint8, of any shape, row after row; result float32[shape], columns last.
    Raises: ShapeError if the bytes do not fit the shape, UnsupportedFormatError for the types that
        only hold activations (Q8_1, Q8_K).
    """
    blocks = tensor_blocks(data, type, shape)
    if type in (TensorType.Q8_1, TensorType.Q8_K):
        raise activation_type(type)
    with np.errstate(invalid="ignore", over="ignore"):
        return _decode(blocks, type).reshape(shape)


def tensor_blocks(data: NDArray[np.uint8], type: TensorType, shape: tuple[int, ...]) -> Blocks:
    """View the bytes of a tensor as blocks. Raises: ShapeError if they do not fit the shape."""
    num_bytes = prod(shape[:-1]) * row_bytes(type, shape[-1])
    if data.dtype != np.uint8 or data.size != num_bytes:
        raise ShapeError(
            f"got {data.dtype}[{data.size}] for a {type.name} tensor of shape {list(shape)}; "
            f"wanted uint8[{num_bytes}]: pass the tensor's bytes as they are in the file"
        )
    return np.ascontiguousarray(data).reshape(-1).view(block_dtype(type))


def activation_type(type: TensorType) -> UnsupportedFormatError:
    """An error, to be raised by the caller, for a type that holds no weights."""
    return UnsupportedFormatError(
        f"{type.name} only ever holds activations; wanted a weight type such as Q8_0: convert the model again"
    )


def _decode(blocks: Blocks, type: TensorType) -> FloatArray:
    if type is TensorType.BF16:
        return bfloat16_values(blocks["value"])
    if blocks.dtype.names == ("value",):
        return _float(blocks["value"])
    if type in _GRID_DECODERS:
        return _GRID_DECODERS[type](blocks)
    scale, minimum = group_scales(blocks, type)
    values: FloatArray = scale[:, :, None] * levels_of(blocks, type).reshape(*scale.shape, -1)
    if minimum is None:
        return values
    return values - minimum[:, :, None] if type in SUBTRACTS_MINIMUM else values + minimum[:, :, None]


def levels_of(blocks: Blocks, type: TensorType) -> FloatArray:
    """Values of codes before they are scaled, float32[blocks, columns of a block]."""
    codes = unpack_codes(blocks, type)
    if type in _LEVELS:
        return _LEVELS[type][codes]
    return _float(codes) - LEVEL_OFFSETS[type] if type in LEVEL_OFFSETS else _float(codes)


def group_scales(blocks: Blocks, type: TensorType) -> tuple[FloatArray, FloatArray | None]:
    """Scales and minimums of each group of columns, float32[blocks, groups of a block]; None where minimums are 0."""
    if type is TensorType.MXFP4:
        return np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128).astype(np.float32)[:, None], None
    if type is TensorType.NVFP4:
        return _e4m3(blocks["d"].astype(np.int32)), None
    d = _column(blocks["d"])
    if type in (TensorType.Q4_1, TensorType.Q5_1):
        return d, _column(blocks["m"])
    if type is TensorType.Q6_K:
        return d * _float(blocks["scales"]), None
    if type in (TensorType.Q3_K, TensorType.IQ4_XS):
        return d * (_float(unpack_signed_scales(blocks, type)) - 32), None
    if type not in SUBTRACTS_MINIMUM:
        return d, None
    packed = blocks["scales"]
    scales, minimums = (packed & 15, packed >> 4) if type is TensorType.Q2_K else unpack_k_scales(packed)
    return d * _float(scales), _column(blocks["dmin"]) * _float(minimums)


def _column(field: NDArray[np.float16]) -> FloatArray:
    """One float32 per block as a column."""
    return _float(field)[:, None]


def _float(values: Blocks) -> FloatArray:
    return values.astype(np.float32)


def _e4m3(code: NDArray[np.int32]) -> FloatArray:
    """Half of unsigned E4M3 numbers with bias 7; exponent 0 is subnormal, and 0x7F is read as zero."""
    exponent, mantissa = code >> 3 & 15, code & 7
    halved = np.where(
        exponent == 0,
        np.ldexp(mantissa.astype(np.float32), -10),
        np.ldexp((8 + mantissa).astype(np.float32), exponent - 11),
    )
    return np.where(code == 0x7F, np.float32(0), halved)


# A 7-bit sign code stands for 8 signs whose number of minuses is even.
_EVEN_SIGNS = np.array([code | (code.bit_count() & 1) << 7 for code in range(128)], dtype=np.uint8)


@cache
def grid(type: TensorType) -> FloatArray:
    """Return float32[entries, 4 or 8], the vectors that codes of this type select."""
    vectors: FloatArray = grid_vectors(type.name).astype(np.float32)
    vectors.flags.writeable = False
    return vectors


def _signs(sign_bytes: NDArray[np.uint8]) -> FloatArray:
    """Return float32[..., 8]: -1 where a bit of the byte is set, else 1."""
    bits = sign_bytes[..., None] >> np.arange(8, dtype=np.uint8) & 1
    return np.where(bits == 1, np.float32(-1), np.float32(1))


def _even_signs(words: NDArray[np.uint32]) -> FloatArray:
    """Expand the four 7-bit sign codes of each word: uint32[n, 8] gives float32[n, 8, 4, 8]."""
    codes = words[..., None] >> np.array([0, 7, 14, 21], dtype=np.uint32) & 127
    return _signs(_EVEN_SIGNS[codes])


def _scaled(scale: FloatArray, vectors: FloatArray, signs: FloatArray) -> FloatArray:
    """Multiply vectors and signs of a block by one scale per equal share of them."""
    shape = (*scale.shape, -1)
    return scale[..., None] * vectors.reshape(shape) * signs.reshape(shape)


def _nibble_scale(blocks: Blocks) -> FloatArray:
    nibbles = unpack_bits(blocks["scales"], 4, 1).astype(np.float32)
    return _column(blocks["d"]) * (np.float32(0.5) + nibbles) * np.float32(0.25)


def _iq2_xxs(blocks: Blocks) -> FloatArray:
    words = blocks["qs"]
    codes = np.ascontiguousarray(words[..., 0]).view(np.uint8)
    top = (words[..., 1] >> 28).astype(np.float32)
    scale = _column(blocks["d"]) * (np.float32(0.5) + top) * np.float32(0.25)
    return _scaled(scale, grid(TensorType.IQ2_XXS)[codes], _even_signs(words[..., 1]))


def _iq2_xs(blocks: Blocks) -> FloatArray:
    words = blocks["qs"]
    vectors = grid(TensorType.IQ2_XS)[words & 511]
    return _scaled(_nibble_scale(blocks), vectors, _signs(_EVEN_SIGNS[words >> 9]))


def _iq2_s(blocks: Blocks) -> FloatArray:
    high = unpack_bits(blocks["qh"], 2, 1).astype(np.uint16)
    vectors = grid(TensorType.IQ2_S)[blocks["qs"] | high << 8]
    return _scaled(_nibble_scale(blocks), vectors, _signs(blocks["signs"]))


def _iq3_xxs(blocks: Blocks) -> FloatArray:
    top = (blocks["signs"] >> 28).astype(np.float32)
    scale = _column(blocks["d"]) * (np.float32(0.5) + top) * np.float32(0.5)
    return _scaled(scale, grid(TensorType.IQ3_XXS)[blocks["qs"]], _even_signs(blocks["signs"]))


def _iq3_s(blocks: Blocks) -> FloatArray:
    scale = _column(blocks["d"]) * (1 + 2 * unpack_bits(blocks["scales"], 4, 1)).astype(np.float32)
    high = unpack_bits(blocks["qh"], 1, 1).astype(np.uint16)
    vectors = grid(TensorType.IQ3_S)[blocks["qs"] | high << 8]
    return _scaled(scale, vectors, _signs(blocks["signs"]))


def iq1_scales(blocks: Blocks) -> NDArray[np.float16]:
    """Scales of IQ1 blocks, one each."""
    if "d" in (blocks.dtype.names or ()):
        found: NDArray[np.float16] = blocks["d"]
        return found
    # IQ1_M: the four top nibbles together, lowest nibble first.
    nibbles = blocks["scales"] >> 12 << np.array([0, 4, 8, 12], dtype=np.uint16)
    joined: NDArray[np.float16] = np.bitwise_or.reduce(nibbles, axis=1).view(np.float16)
    return joined


def iq1_codes(blocks: Blocks, type: TensorType) -> tuple[NDArray[np.uint8], NDArray[np.int8]]:
    """Return uint8[blocks, 256], 32 + eight times the levels of IQ1, and int8[blocks, 16], factors of 16 columns."""
    shifts = np.array([0, 3, 6, 9], dtype=np.uint16)
    if type is TensorType.IQ1_S:
        words = blocks["qh"]
        high, is_minus = words[..., None] >> shifts & 7, np.repeat(words >> 15, 4, axis=1)
        factors = np.repeat(words >> 12 & 7, 2, axis=1)
    else:
        nibbles = unpack_bits(blocks["qh"], 4, 1)
        high, is_minus = nibbles & 7, nibbles >> 3
        factors = (blocks["scales"][..., None] >> shifts & 7).reshape(len(blocks), -1)
    indices = blocks["qs"] | high.reshape(len(blocks), -1).astype(np.uint16) << 8
    # Eight levels at a time, as bytes of one number: each is moved by an eighth, up or down.
    ones = 0x0101010101010101
    moved = _iq1_table()[indices] + np.array([ones, (1 << 64) - ones], np.uint64)[is_minus]
    return moved.view(np.uint8), (2 * factors + 1).astype(np.int8)


@cache
def _iq1_table() -> NDArray[np.uint64]:
    """Entries of the grid: 32 + 8 * level of eight columns, 24 or more, so that no byte borrows from the next one."""
    return (32 + 8 * grid_vectors("IQ1_S")).astype(np.uint8).reshape(-1).view(np.uint64)


def _iq1(blocks: Blocks, type: TensorType) -> FloatArray:
    codes, factors = iq1_codes(blocks, type)
    scale = _column(iq1_scales(blocks)) * factors.astype(np.float32)
    levels = (codes.astype(np.float32) - 32) * np.float32(0.125)
    return scale[..., None] * levels.reshape(len(blocks), 16, 16)


_GRID_DECODERS: dict[TensorType, Callable[[Blocks], FloatArray]] = {
    TensorType.IQ2_XXS: _iq2_xxs,
    TensorType.IQ2_XS: _iq2_xs,
    TensorType.IQ2_S: _iq2_s,
    TensorType.IQ3_XXS: _iq3_xxs,
    TensorType.IQ3_S: _iq3_s,
    TensorType.IQ1_S: lambda blocks: _iq1(blocks, TensorType.IQ1_S),
    TensorType.IQ1_M: lambda blocks: _iq1(blocks, TensorType.IQ1_M),
}
