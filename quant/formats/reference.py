"""The NumPy oracle: what the bytes of a quantized tensor mean, and plain encoders to make some.

Slow and obvious on purpose. Kernels are tested against `dequantize`, and `dequantize` is tested bit
for bit against the `gguf` package (tests/quant/formats/test_reference.py), so every expression keeps that
package's order of float32 operations.
Source: the block formats of the ggml repository (ggml-common.h, ggml-quants.c).
"""

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError, UnsupportedFormatError
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.reference_fits import IQ4_VALUES
from localinfer.quant.formats.reference_grids import GRID_DECODERS
from localinfer.quant.formats.types import TensorType, block_dtype, row_bytes
from localinfer.quant.formats.unpacking import unpack_bits, unpack_k_scales

__all__ = ["IQ4_VALUES", "dequantize", "quantize"]

Blocks = NDArray[Any]
Decoder = Callable[[Blocks], NDArray[np.float32]]


E2M1_VALUES = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)
"""Twice what the 16 codes of MXFP4 and NVFP4 stand for; their scales are halved to match."""


def dequantize(data: NDArray[np.uint8], type: TensorType, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Decode the bytes of a tensor.

    Infinite and NaN scales pass through to the weights they scale.

    Shapes: data uint8, of any shape, row after row; result float32[shape], columns last.
    Raises: ShapeError if the bytes do not fit the shape, UnsupportedFormatError for the types that
        only hold activations (Q8_1, Q8_K).
    """
    num_bytes = prod(shape[:-1]) * row_bytes(type, shape[-1])
    if data.dtype != np.uint8 or data.size != num_bytes:
        raise ShapeError(
            f"got {data.dtype}[{data.size}] for a {type.name} tensor of shape {list(shape)}; "
            f"wanted uint8[{num_bytes}]: pass the tensor's bytes as they are in the file"
        )
    decode = _DECODERS.get(type)
    if decode is None:
        raise UnsupportedFormatError(
            f"{type.name} only ever holds activations; wanted a weight type such as Q8_0: convert the model again"
        )
    blocks = np.ascontiguousarray(data).reshape(-1).view(block_dtype(type))
    with np.errstate(invalid="ignore", over="ignore"):
        return decode(blocks).reshape(shape)


def _column(field: NDArray[Any]) -> NDArray[np.float32]:
    """Return one float32 per block as a column, ready to multiply the block's codes."""
    return _float(field).reshape(len(field), 1)


def _float(values: NDArray[Any]) -> NDArray[np.float32]:
    return values.astype(np.float32)


def _by_group(values: NDArray[np.float32], group_size: int) -> NDArray[np.float32]:
    return values.reshape(len(values), -1, group_size)


def _plain(blocks: Blocks) -> NDArray[np.float32]:
    return _float(blocks["value"])


def _bf16(blocks: Blocks) -> NDArray[np.float32]:
    bits: NDArray[np.uint32] = blocks["value"].astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def _q4_0(blocks: Blocks) -> NDArray[np.float32]:
    return _column(blocks["d"]) * (_float(unpack_bits(blocks["qs"], 4, 16)) - 8)


def _q4_1(blocks: Blocks) -> NDArray[np.float32]:
    return _column(blocks["d"]) * _float(unpack_bits(blocks["qs"], 4, 16)) + _column(blocks["m"])


def _q5_codes(blocks: Blocks) -> NDArray[np.float32]:
    return _float(unpack_bits(blocks["qs"], 4, 16) | unpack_bits(blocks["qh"], 1, 1) << 4)


def _q5_0(blocks: Blocks) -> NDArray[np.float32]:
    return _column(blocks["d"]) * (_q5_codes(blocks) - 16)


def _q5_1(blocks: Blocks) -> NDArray[np.float32]:
    return _column(blocks["d"]) * _q5_codes(blocks) + _column(blocks["m"])


def _q8_0(blocks: Blocks) -> NDArray[np.float32]:
    return _column(blocks["d"]) * _float(blocks["qs"])


def _q2_k(blocks: Blocks) -> NDArray[np.float32]:
    scale = _column(blocks["d"]) * _float(blocks["scales"] & 15)
    minimum = _column(blocks["dmin"]) * _float(blocks["scales"] >> 4)
    codes = _float(unpack_bits(blocks["qs"], 2, 32))
    return scale[:, :, None] * _by_group(codes, 16) - minimum[:, :, None]


def _q3_k(blocks: Blocks) -> NDArray[np.float32]:
    packed = blocks["scales"]
    scales = unpack_bits(packed[:, :8], 4, 8) | unpack_bits(packed[:, 8:], 2, 4) << 4
    scale = _column(blocks["d"]) * (_float(scales) - 32)
    # The mask bit is stored inverted: set means that nothing is subtracted.
    offset = 4 - 4 * _float(unpack_bits(blocks["hmask"], 1, 32))
    codes = _float(unpack_bits(blocks["qs"], 2, 32)) - offset
    return scale[:, :, None] * _by_group(codes, 16)


def _q4_k(blocks: Blocks) -> NDArray[np.float32]:
    return _scale_and_minimum(blocks, unpack_bits(blocks["qs"], 4, 32))


def _q5_k(blocks: Blocks) -> NDArray[np.float32]:
    codes = unpack_bits(blocks["qs"], 4, 32) | unpack_bits(blocks["qh"], 1, 32) << 4
    return _scale_and_minimum(blocks, codes)


def _scale_and_minimum(blocks: Blocks, codes: NDArray[Any]) -> NDArray[np.float32]:
    scales, minimums = unpack_k_scales(blocks["scales"])
    scale = _column(blocks["d"]) * _float(scales)
    minimum = _column(blocks["dmin"]) * _float(minimums)
    return scale[:, :, None] * _by_group(_float(codes), 32) - minimum[:, :, None]


def _q6_k(blocks: Blocks) -> NDArray[np.float32]:
    codes = unpack_bits(blocks["ql"], 4, 64) | unpack_bits(blocks["qh"], 2, 32) << 4
    scale = _column(blocks["d"]) * _float(blocks["scales"])
    return scale[:, :, None] * _by_group(_float(codes) - 32, 16)


def _iq4_nl(blocks: Blocks) -> NDArray[np.float32]:
    return _column(blocks["d"]) * IQ4_VALUES[unpack_bits(blocks["qs"], 4, 16)]


def _iq4_xs(blocks: Blocks) -> NDArray[np.float32]:
    high = blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = unpack_bits(blocks["scales_l"], 4, 1) | high.astype(np.uint8) << 4
    scale = _column(blocks["d"]) * (_float(scales) - 32)
    return scale[:, :, None] * _by_group(IQ4_VALUES[unpack_bits(blocks["qs"], 4, 16)], 32)


def _mxfp4(blocks: Blocks) -> NDArray[np.float32]:
    scale = np.ldexp(np.float32(1), blocks["e"].astype(np.int32) - 128).astype(np.float32)
    return _column(scale) * E2M1_VALUES[unpack_bits(blocks["qs"], 4, 16)]


def _nvfp4(blocks: Blocks) -> NDArray[np.float32]:
    code = blocks["d"].astype(np.int32)
    exponent, mantissa = code >> 3 & 15, code & 7
    # Unsigned E4M3 with bias 7, halved; exponent 0 is subnormal, and 0x7F is read as zero.
    halved = np.where(
        exponent == 0,
        np.ldexp(mantissa.astype(np.float32), -10),
        np.ldexp((8 + mantissa).astype(np.float32), exponent - 11),
    )
    scale = np.where(code == 0x7F, np.float32(0), halved)
    return scale[:, :, None] * _by_group(E2M1_VALUES[unpack_bits(blocks["qs"], 4, 8)], 16)


def _q1_0(blocks: Blocks) -> NDArray[np.float32]:
    signs = np.where(unpack_bits(blocks["qs"], 1, 1) == 1, np.float32(1), np.float32(-1))
    return _column(blocks["d"]) * signs


def _q2_0(blocks: Blocks) -> NDArray[np.float32]:
    return _column(blocks["d"]) * (_float(unpack_bits(blocks["qs"], 2, 1)) - 1)


def _tq1_0(blocks: Blocks) -> NDArray[np.float32]:
    def trits(packed: NDArray[np.uint8], count: int) -> NDArray[np.float32]:
        """Multiplying by 3^n modulo 256 brings trit n to the top of the byte."""
        powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:count, None]
        rotated = (packed[:, None, :] * powers).reshape(len(packed), -1)
        return _float(rotated.astype(np.uint16) * 3 >> 8) - 1

    packed = blocks["qs"]
    parts = [trits(packed[:, :32], 5), trits(packed[:, 32:], 5), trits(blocks["qh"], 4)]
    return _column(blocks["d"]) * np.concatenate(parts, axis=1)


def _tq2_0(blocks: Blocks) -> NDArray[np.float32]:
    return _column(blocks["d"]) * (_float(unpack_bits(blocks["qs"], 2, 32)) - 1)


_DECODERS: dict[TensorType, Decoder] = {
    TensorType.F32: _plain,
    TensorType.F16: _plain,
    TensorType.F64: _plain,
    TensorType.I8: _plain,
    TensorType.I16: _plain,
    TensorType.I32: _plain,
    TensorType.I64: _plain,
    TensorType.BF16: _bf16,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q2_K: _q2_k,
    TensorType.Q3_K: _q3_k,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
    TensorType.IQ4_NL: _iq4_nl,
    TensorType.IQ4_XS: _iq4_xs,
    TensorType.MXFP4: _mxfp4,
    TensorType.NVFP4: _nvfp4,
    TensorType.Q1_0: _q1_0,
    TensorType.Q2_0: _q2_0,
    TensorType.TQ1_0: _tq1_0,
    TensorType.TQ2_0: _tq2_0,
    **GRID_DECODERS,
}
