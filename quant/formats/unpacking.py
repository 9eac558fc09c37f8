"""The bit packings that the block formats share, as NumPy."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


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
    runs = codes.astype(np.uint8).reshape(len(codes), -1, 8 // bits, stride)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    packed: NDArray[np.uint8] = np.bitwise_or.reduce(runs << shifts, axis=2)
    return packed.reshape(len(codes), -1)


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
