"""Weights in a GPU's memory, as a structure of arrays: the fields of a file's blocks apart, at no more bytes than it.

Every array is row after row, so that the lanes of a warp, each at a unit of its own, read one unbroken line. A unit is
16 bytes of codes: 32 columns of nibbles (byte k: column k, and k + 16 in the upper half), 16 columns of bytes, or 8 or
4 plain numbers. Rows begin at multiples of 16 bytes; numbers that fill up the last unit are zero.

| layout | codes | scales | extra | super |
|---|---|---|---|---|
| F32 F16 BF16 | numbers | - | - | - |
| Q4_0 Q5_0 | nibbles | d f16 per block | Q5_0: bit c of u32 is the fifth of column c | - |
| Q4_1 Q5_1 | nibbles | d, m f16 per block | Q5_1: as Q5_0 | - |
| Q8_0 | bytes | d f16 per block | - | - |
| Q4_K Q5_K | nibbles | the file's 16 bytes d, dmin, 6-bit scales per 256 | Q5_K: as Q5_0 | - |
| Q6_K | nibbles | 2 x int8 per block | 2 x u32: bits 2w, 2w + 1 of byte c: upper two of column 4w + c | d f16 per 256 |
| INT4_32 INT4_64 INT4_128 | nibbles | d f16, zero i16 per group | - | - |
| INT8_32 | bytes | d f16, zero i16 per block | - | - |

A block is 32 columns; the two words of Q6_K's extra array belong to its two halves.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.layouts import SIZES, Layout, check_bytes, stored_row_bytes

UNIT_BYTES = 16

_STEP_BYTES = 32 << 20
"""A tensor is moved in steps of about this size, so that little of it is in the host's memory at once."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class DeviceWeight:
    """A stack of equal matrices on a device.

    columns: int32[num_columns], which column of the input each column multiplies, where they are not in order.
    """

    layout: Layout
    num_rows: int
    num_columns: int
    num_experts: int
    address: int
    columns: NDArray[np.int32] | None = None

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of a row in each array."""
        return array_row_bytes(self.layout, self.num_columns)

    @property
    def arrays(self) -> tuple[int, ...]:
        """Start of each array."""
        offsets = array_offsets(self.layout, self.num_experts * self.num_rows, self.num_columns)
        return tuple(self.address + offset for offset in offsets[:4])


def upload(
    device: CudaDevice,
    layout: Layout,
    data: NDArray[np.uint8],
    num_experts: int,
    num_rows: int,
    num_columns: int,
    done: Callable[[int, int], None] | None = None,
) -> DeviceWeight:
    """Move a stack of matrices stored row after row, as a GGUF tensor is, to a device.

    done: called with each stretch of data (first byte, end) that is there. Raises: ShapeError, OutOfMemoryError.
    """
    total = num_experts * num_rows
    row_bytes = check_bytes(layout, data, total, num_columns)
    offsets = array_offsets(layout, total, num_columns)
    address = device.allocate(offsets[-1])
    widths = array_row_bytes(layout, num_columns)
    step = max(1, _STEP_BYTES // row_bytes)
    for first in range(0, total, step):
        end = min(total, first + step)
        arrays = to_arrays(layout, data[first * row_bytes : end * row_bytes], end - first, num_columns)
        for offset, width, array in zip(offsets, widths, arrays, strict=False):
            if width:
                device.write(address + offset + first * width, array)
        if done is not None:
            done(first * row_bytes, end * row_bytes)
    return DeviceWeight(layout, num_rows, num_columns, num_experts, address)


def unit_columns(layout: int) -> int:
    """Columns of one unit of codes of a layout, or of its number."""
    if layout == Layout.F32:
        return 4
    if layout in (Layout.F16, Layout.BF16):
        return 8
    return 16 if layout in (Layout.Q8_0, Layout.INT8_32) else 32


def array_row_bytes(layout: Layout, num_columns: int) -> tuple[int, ...]:
    """Bytes of a row in each of the four arrays; raises ShapeError if the columns are not whole units of the file."""
    stored = stored_row_bytes(layout, num_columns)
    codes = -(-num_columns // unit_columns(layout)) * UNIT_BYTES
    # Per 256 columns; what the file has besides is scales.
    extra, supers = {Layout.Q5_0: (32, 0), Layout.Q5_1: (32, 0), Layout.Q5_K: (32, 0), Layout.Q6_K: (64, 2)}.get(
        layout, (0, 0)
    )
    scales = 256 * stored // num_columns - 256 // unit_columns(layout) * UNIT_BYTES - extra - supers
    return (codes, *(size * num_columns // 256 for size in (scales, extra, supers)))


def array_offsets(layout: Layout, num_rows: int, num_columns: int) -> list[int]:
    """Start of each array of a stack of `num_rows` rows, and the end of the last; multiples of 16."""
    offsets = [0]
    for row_bytes in array_row_bytes(layout, num_columns):
        offsets.append(offsets[-1] + -(-num_rows * row_bytes // 16) * 16)
    return offsets


def to_arrays(layout: Layout, data: Bytes, num_rows: int, num_columns: int) -> list[Bytes]:
    """Split rows as a GGUF tensor (or `quant.checkpoint.groups`) stores them into the four arrays, each uint8[rows, n].

    data: contiguous uint8 of exactly those rows. Raises ShapeError if it is not.
    """
    widths = array_row_bytes(layout, num_columns)
    check_bytes(layout, data, num_rows, num_columns)
    if layout in _SPLIT:
        split = [array.reshape(num_rows, -1) for array in _SPLIT[layout](data.reshape(-1, SIZES[layout].file_bytes))]
    else:
        split = [np.zeros((num_rows, widths[0]), np.uint8)]
        split[0][:, : data.size // num_rows] = data.reshape(num_rows, -1)
    split += [np.zeros((num_rows, 0), np.uint8)] * (4 - len(split))
    assert tuple(array.shape[1] for array in split) == widths, f"arrays of {layout.name}"
    return split


def _scale_then_codes(scale_bytes: int) -> Callable[[Bytes], tuple[Bytes, ...]]:
    return lambda blocks: (blocks[:, scale_bytes:], blocks[:, :scale_bytes])


def _fifth_bits_between(scale_bytes: int) -> Callable[[Bytes], tuple[Bytes, ...]]:
    end = scale_bytes + 4
    return lambda blocks: (blocks[:, end:], blocks[:, :scale_bytes], blocks[:, scale_bytes:end])


def _nibbles(codes: Bytes) -> Bytes:
    """Pack codes uint8[blocks, 256], of which only the lower four bits are taken, as nibbles of every 32 columns."""
    halves = codes.reshape(len(codes), 8, 2, 16) & np.uint8(15)
    packed: Bytes = halves[:, :, 0] | halves[:, :, 1] << np.uint8(4)
    return packed


def _k_codes(packed: Bytes) -> Bytes:
    """Nibbles of every 64 columns, lower half first, as uint8[blocks, 256]."""
    runs: Bytes = packed.reshape(len(packed), 4, 1, 32) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    return runs.reshape(len(packed), 256)


def _split_q4_k(blocks: Bytes) -> tuple[Bytes, ...]:
    return _nibbles(_k_codes(blocks[:, 16:])), blocks[:, :16]


def _split_q5_k(blocks: Bytes) -> tuple[Bytes, ...]:
    # Bit b of byte c is the fifth bit of column c of block b.
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    fifth = np.packbits(high, axis=2, bitorder="little")
    return _nibbles(_k_codes(blocks[:, 48:])), blocks[:, :16], fifth


def _split_q6_k(blocks: Bytes) -> tuple[Bytes, ...]:
    low: Bytes = blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8)[:, None] & np.uint8(15)
    pairs = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high: Bytes = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> pairs & np.uint8(3)
    # Per half of a block: four columns of a word side by side, the words two bits apart.
    words: Bytes = high.reshape(len(blocks), 16, 4, 4) << pairs
    upper: Bytes = np.bitwise_or.reduce(words, axis=2)
    return _nibbles(low.reshape(len(blocks), 256)), blocks[:, 192:208], upper, blocks[:, 208:]


_SPLIT: dict[Layout, Callable[[Bytes], tuple[Bytes, ...]]] = {
    **dict.fromkeys((Layout.Q8_0, Layout.Q4_0), _scale_then_codes(2)),
    **dict.fromkeys(
        (Layout.Q4_1, Layout.INT4_32, Layout.INT4_64, Layout.INT4_128, Layout.INT8_32), _scale_then_codes(4)
    ),
    Layout.Q5_0: _fifth_bits_between(2),
    Layout.Q5_1: _fifth_bits_between(4),
    Layout.Q4_K: _split_q4_k,
    Layout.Q5_K: _split_q5_k,
    Layout.Q6_K: _split_q6_k,
}
