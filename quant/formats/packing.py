"""The bit packings of the block formats, as NumPy: where a block keeps the bits of its codes and scales."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.quant.formats.types import TensorType as T

Blocks = NDArray[Any]
"""Records of `types.block_dtype`, one per block."""

_CODE_FIELDS: dict[T, tuple[tuple[str, int, int], ...]] = {
    **dict.fromkeys((T.Q4_0, T.Q4_1, T.IQ4_NL, T.IQ4_XS, T.MXFP4), (("qs", 4, 16),)),
    **dict.fromkeys((T.Q5_0, T.Q5_1), (("qs", 4, 16), ("qh", 1, 1))),
    T.Q2_K: (("qs", 2, 32),),
    T.Q3_K: (("qs", 2, 32), ("hmask", 1, 32)),
    T.Q4_K: (("qs", 4, 32),),
    T.Q5_K: (("qs", 4, 32), ("qh", 1, 32)),
    T.Q6_K: (("ql", 4, 64), ("qh", 2, 32)),
    T.NVFP4: (("qs", 4, 8),),
    T.Q1_0: (("qs", 1, 1),),
    T.Q2_0: (("qs", 2, 1),),
    T.TQ2_0: (("qs", 2, 32),),
}
"""Fields that hold a code's bits, lowest first, with how many of them and the stride of `unpack_bits`."""


def unpack_codes(blocks: Blocks, type: T) -> NDArray[np.uint8 | np.int8]:
    """Return the codes of blocks, [blocks, columns]: int8 for Q8_0, uint8 for the others that have codes."""
    if type is T.Q8_0:
        found: NDArray[np.int8] = blocks["qs"]
        return found
    if type is T.TQ1_0:
        parts = ((blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4))
        return np.concatenate([_trits(packed, count) for packed, count in parts], axis=1)
    (field, shift, stride), *others = _CODE_FIELDS[type]
    codes = unpack_bits(blocks[field], shift, stride)
    for field, bits, stride in others:
        codes |= unpack_bits(blocks[field], bits, stride) << np.uint8(shift)
        shift += bits
    return codes


def pack_codes(codes: NDArray[Any], type: T) -> dict[str, NDArray[Any]]:
    """Return the fields that hold codes: whole numbers [blocks, columns], 0 and up but for Q8_0."""
    if type is T.Q8_0:
        return {"qs": codes.astype(np.int8)}
    whole, places, shift, fields = codes.astype(np.uint8, copy=False), _CODE_FIELDS[type], 0, {}
    for field, bits, stride in places:
        part = whole if len(places) == 1 else whole >> np.uint8(shift) & np.uint8((1 << bits) - 1)
        fields[field] = pack_bits(part, bits, stride)
        shift += bits
    return fields


def unpack_bits(packed: NDArray[np.uint8], bits: int, stride: int) -> NDArray[np.uint8]:
    """Split each byte into 8 / bits codes, lowest bits first.

    Bytes come in runs of `stride`: a run's low codes precede its next higher ones, so code k of
    byte j in a run is element k * stride + j. A stride of 1 leaves a plain little-endian bit stream.

    Shapes: packed uint8[blocks, bytes]; result uint8[blocks, bytes * 8 / bits].
    """
    runs = packed.reshape(len(packed), -1, 1, stride)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes: NDArray[np.uint8] = runs >> shifts & np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)


def pack_bits(codes: NDArray[np.integer[Any]], bits: int, stride: int) -> NDArray[np.uint8]:
    """Undo `unpack_bits`. Shapes: codes uint8[blocks, n]; result uint8[blocks, n * bits / 8]."""
    runs = codes.astype(np.uint8, copy=False).reshape(len(codes), -1, 8 // bits, stride)
    packed: NDArray[np.uint8] = runs[:, :, 0]
    for index in range(1, 8 // bits):
        packed = packed | runs[:, :, index] << np.uint8(bits * index)
    return packed.reshape(len(codes), -1)


def _trits(packed: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    """TQ1_0's codes 0 to 2, `count` to a byte: multiplying by 3^n modulo 256 brings trit n to the top of the byte."""
    powers = np.array([1, 3, 9, 27, 81], dtype=np.uint8)[:count, None]
    rotated = (packed[:, None, :] * powers).reshape(len(packed), -1)
    return (rotated.astype(np.uint16) * 3 >> 8).astype(np.uint8)


def unpack_k_scales(packed: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Unpack the eight 6-bit scales and minimums of Q4_K and Q5_K.

    Codes 0-3 lie whole in bytes 0-3 (scales) and 4-7 (minimums); codes 4-7 have their low four bits
    in bytes 8-11 and their upper two at the top of bytes 0-7.

    Shapes: packed uint8[blocks, 12]; results uint8[blocks, 8] each, scales then minimums.
    """
    first, second, low = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, low & 15 | first >> 6 << 4], axis=1)
    minimums = np.concatenate([second & 63, low >> 4 | second >> 6 << 4], axis=1)
    return scales, minimums


def pack_k_scales(scales: NDArray[np.uint8], minimums: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Undo `unpack_k_scales`. Shapes: both uint8[blocks, 8], below 64; result uint8[blocks, 12]."""
    first = scales[:, :4] | scales[:, 4:] >> 4 << 6
    second = minimums[:, :4] | minimums[:, 4:] >> 4 << 6
    low = scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4
    return np.concatenate([first, second, low], axis=1)


def unpack_signed_scales(blocks: Blocks, type: T) -> NDArray[np.uint8]:
    """Unpack the 6-bit scales of Q3_K and IQ4_XS, which stand for themselves less 32: uint8[blocks, groups]."""
    if type is T.Q3_K:
        packed = blocks["scales"]
        low, high = unpack_bits(packed[:, :8], 4, 8), unpack_bits(packed[:, 8:], 2, 4)
    else:
        low = unpack_bits(blocks["scales_l"], 4, 1)
        high = (blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    return low | high << np.uint8(4)
