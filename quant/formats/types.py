"""The tensor types of GGUF files: their ids, names, block layouts, sizes, and how blocks pack codes and scales.

A quantized row is a sequence of equal blocks; a block holds its scales and the packed codes of `block_size`
neighbouring columns. `block_dtype` gives the fields of a block as a NumPy record, so that sizes, offsets and decoders
all read one table.
"""

from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError, UnsupportedFormatError


class TensorType(IntEnum):
    """Every tensor type a GGUF file may name, by its id in the file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


RETIRED_TYPES: dict[int, str] = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
"""Ids that older files used and that nothing writes any more."""

_D = ("d", "<f2")
_M = ("m", "<f2")
_DMIN = ("dmin", "<f2")
_K_SCALES = ("scales", "u1", 12)

# Columns per block, bytes per block, and the block's fields in file order. The bytes are stated
# apart from the fields so that a slip in either is caught when this module is imported.
_LAYOUTS: dict[TensorType, tuple[int, int, list[Any]]] = {
    TensorType.F32: (1, 4, [("value", "<f4")]),
    TensorType.F16: (1, 2, [("value", "<f2")]),
    TensorType.BF16: (1, 2, [("value", "<u2")]),
    TensorType.F64: (1, 8, [("value", "<f8")]),
    TensorType.I8: (1, 1, [("value", "i1")]),
    TensorType.I16: (1, 2, [("value", "<i2")]),
    TensorType.I32: (1, 4, [("value", "<i4")]),
    TensorType.I64: (1, 8, [("value", "<i8")]),
    TensorType.Q4_0: (32, 18, [_D, ("qs", "u1", 16)]),
    TensorType.Q4_1: (32, 20, [_D, _M, ("qs", "u1", 16)]),
    TensorType.Q5_0: (32, 22, [_D, ("qh", "u1", 4), ("qs", "u1", 16)]),
    TensorType.Q5_1: (32, 24, [_D, _M, ("qh", "u1", 4), ("qs", "u1", 16)]),
    TensorType.Q8_0: (32, 34, [_D, ("qs", "i1", 32)]),
    TensorType.Q8_1: (32, 36, [_D, ("s", "<f2"), ("qs", "i1", 32)]),
    TensorType.Q2_K: (256, 84, [("scales", "u1", 16), ("qs", "u1", 64), _D, _DMIN]),
    TensorType.Q3_K: (256, 110, [("hmask", "u1", 32), ("qs", "u1", 64), _K_SCALES, _D]),
    TensorType.Q4_K: (256, 144, [_D, _DMIN, _K_SCALES, ("qs", "u1", 128)]),
    TensorType.Q5_K: (256, 176, [_D, _DMIN, _K_SCALES, ("qh", "u1", 32), ("qs", "u1", 128)]),
    TensorType.Q6_K: (256, 210, [("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), _D]),
    TensorType.Q8_K: (256, 292, [("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)]),
    TensorType.IQ4_NL: (32, 18, [_D, ("qs", "u1", 16)]),
    TensorType.IQ4_XS: (256, 136, [_D, ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)]),
    TensorType.MXFP4: (32, 17, [("e", "u1"), ("qs", "u1", 16)]),
    TensorType.NVFP4: (64, 36, [("d", "u1", 4), ("qs", "u1", 32)]),
    TensorType.Q1_0: (128, 18, [_D, ("qs", "u1", 16)]),
    TensorType.Q2_0: (64, 18, [_D, ("qs", "u1", 16)]),
    TensorType.TQ1_0: (256, 54, [("qs", "u1", 48), ("qh", "u1", 4), _D]),
    TensorType.TQ2_0: (256, 66, [("qs", "u1", 64), _D]),
    TensorType.IQ2_XXS: (256, 66, [_D, ("qs", "<u4", (8, 2))]),
    TensorType.IQ2_XS: (256, 74, [_D, ("qs", "<u2", 32), ("scales", "u1", 8)]),
    TensorType.IQ2_S: (256, 82, [_D, ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)]),
    TensorType.IQ3_XXS: (256, 98, [_D, ("qs", "u1", 64), ("signs", "<u4", 8)]),
    TensorType.IQ3_S: (256, 110, [_D, ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)]),
    TensorType.IQ1_S: (256, 50, [_D, ("qs", "u1", 32), ("qh", "<u2", 8)]),
    TensorType.IQ1_M: (256, 56, [("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)]),
}

_DTYPES: dict[TensorType, np.dtype[Any]] = {
    tensor_type: np.dtype(fields) for tensor_type, (_, _, fields) in _LAYOUTS.items()
}

for _type in TensorType:
    assert _type in _LAYOUTS, f"{_type.name} has no block layout"
    assert _DTYPES[_type].itemsize == _LAYOUTS[_type][1], (
        f"the fields of a {_type.name} block take {_DTYPES[_type].itemsize} bytes, not {_LAYOUTS[_type][1]}"
    )
assert not set(TensorType) & set(RETIRED_TYPES), "a type id is both in use and retired"


def tensor_type(type_id: int) -> TensorType:
    """Return the type with this id.

    Raises: UnsupportedFormatError for a retired or unknown id, by name where it has one.
    """
    try:
        return TensorType(type_id)
    except ValueError:
        pass
    if type_id in RETIRED_TYPES:
        raise UnsupportedFormatError(
            f"tensor type {RETIRED_TYPES[type_id]} (id {type_id}) is retired from GGUF; wanted a "
            "current type such as Q4_0 or Q4_K: convert the original model again"
        )
    raise UnsupportedFormatError(
        f"tensor type id {type_id} is unknown; this version reads ids 0 to {max(TensorType)} "
        "except retired ones: update localinfer, or use another quantization of the model"
    )


def block_size(type: TensorType) -> int:
    """Return how many columns one block holds; 1 for plain numbers."""
    return _LAYOUTS[type][0]


def block_bytes(type: TensorType) -> int:
    """Return how many bytes one block takes in the file."""
    return _LAYOUTS[type][1]


def block_dtype(type: TensorType) -> np.dtype[Any]:
    """Return the fields of one block as a packed little-endian NumPy record type."""
    return _DTYPES[type]


def bits_per_weight(type: TensorType) -> float:
    """Return the bits a weight takes in the file, its share of scales included."""
    return 8 * block_bytes(type) / block_size(type)


def row_bytes(type: TensorType, columns: int) -> int:
    """Return the bytes of one row of `columns` weights.

    Raises: ShapeError if `columns` is not a positive multiple of the block size.
    """
    size = block_size(type)
    if columns <= 0 or columns % size:
        raise ShapeError(
            f"{type.name} stores rows in blocks of {size} columns and cannot hold {columns}; wanted "
            f"a positive multiple of {size}: choose a type with a smaller block"
        )
    return columns // size * block_bytes(type)


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One tensor of a model: its type and its shape in NumPy order, [out_features, in_features] for a matrix."""

    name: str
    type: TensorType
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all its blocks. Raises: ShapeError if its rows do not fill whole blocks."""
        return prod(self.shape[:-1]) * row_bytes(self.type, self.shape[-1])


IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
"""Values of the 16 codes of IQ4_NL and IQ4_XS."""

Blocks = NDArray[Any]
"""Records of `block_dtype`, one per block."""

_CODE_FIELDS: dict[TensorType, tuple[tuple[str, int, int], ...]] = {
    **dict.fromkeys(
        (TensorType.Q4_0, TensorType.Q4_1, TensorType.IQ4_NL, TensorType.IQ4_XS, TensorType.MXFP4), (("qs", 4, 16),)
    ),
    **dict.fromkeys((TensorType.Q5_0, TensorType.Q5_1), (("qs", 4, 16), ("qh", 1, 1))),
    TensorType.Q2_K: (("qs", 2, 32),),
    TensorType.Q3_K: (("qs", 2, 32), ("hmask", 1, 32)),
    TensorType.Q4_K: (("qs", 4, 32),),
    TensorType.Q5_K: (("qs", 4, 32), ("qh", 1, 32)),
    TensorType.Q6_K: (("ql", 4, 64), ("qh", 2, 32)),
    TensorType.NVFP4: (("qs", 4, 8),),
    TensorType.Q1_0: (("qs", 1, 1),),
    TensorType.Q2_0: (("qs", 2, 1),),
    TensorType.TQ2_0: (("qs", 2, 32),),
}
"""Fields that hold a code's bits, lowest first, with how many of them and the stride of `unpack_bits`."""


def unpack_codes(blocks: Blocks, type: TensorType) -> NDArray[np.uint8 | np.int8]:
    """Return the codes of blocks, [blocks, columns]: int8 for Q8_0, uint8 for the others that have codes."""
    if type is TensorType.Q8_0:
        found: NDArray[np.int8] = blocks["qs"]
        return found
    if type is TensorType.TQ1_0:
        parts = ((blocks["qs"][:, :32], 5), (blocks["qs"][:, 32:], 5), (blocks["qh"], 4))
        return np.concatenate([_trits(packed, count) for packed, count in parts], axis=1)
    (field, shift, stride), *others = _CODE_FIELDS[type]
    codes = unpack_bits(blocks[field], shift, stride)
    for field, bits, stride in others:
        codes |= unpack_bits(blocks[field], bits, stride) << np.uint8(shift)
        shift += bits
    return codes


def pack_codes(codes: NDArray[Any], type: TensorType) -> dict[str, NDArray[Any]]:
    """Return the fields that hold codes: whole numbers [blocks, columns], 0 and up but for Q8_0."""
    if type is TensorType.Q8_0:
        return {"qs": codes.astype(np.int8)}
    whole, places, shift, fields = codes.astype(np.uint8, copy=False), _CODE_FIELDS[type], 0, {}
    for field, bits, stride in places:
        part = whole if len(places) == 1 else whole >> np.uint8(shift) & np.uint8((1 << bits) - 1)
        fields[field] = pack_bits(part, bits, stride)
        shift += bits
    return fields


def bfloat16_values(bits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the float32 numbers whose upper halves are these bits."""
    wide: NDArray[np.uint32] = bits.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


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
    """TQ1_0's codes 0 to 2, `count` to a byte: multiplying by 3^n modulo 256 brings trit n to the top of the byte.

    That byte, a fraction of 256, is below a third, below two thirds, or above.
    """
    rotated = np.stack([packed * np.uint8(3**index) for index in range(count)], axis=1).reshape(len(packed), -1)
    return (rotated > 85).view(np.uint8) + (rotated > 170).view(np.uint8)


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


def unpack_signed_scales(blocks: Blocks, type: TensorType) -> NDArray[np.uint8]:
    """Unpack the 6-bit scales of Q3_K and IQ4_XS, which stand for themselves less 32: uint8[blocks, groups]."""
    if type is TensorType.Q3_K:
        packed = blocks["scales"]
        low, high = unpack_bits(packed[:, :8], 4, 8), unpack_bits(packed[:, 8:], 2, 4)
    else:
        low = unpack_bits(blocks["scales_l"], 4, 1)
        high = (blocks["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16) & 3).astype(np.uint8)
    return low | high << np.uint8(4)
