"""Weights on a device: planes in its memory, and what is needed to find a row in them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError
from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.cuda.weights import plane_offsets, plane_sizes, to_planes
from localinfer.kernels.layouts import SIZES, Layout

_STEP_BYTES = 32 << 20
"""A tensor is moved in steps of about this size, so that little of it is in the host's memory at once."""


@dataclass(frozen=True)
class DeviceWeight:
    """A stack of equal matrices as planes.

    columns: int32[num_columns], which column of the input each column multiplies, where they are not in order.
    """

    layout: Layout
    num_rows: int
    num_columns: int
    num_experts: int
    address: int
    columns: NDArray[np.int32] | None = None

    @property
    def row_bytes(self) -> tuple[int, int, int, int]:
        """Bytes of a row in each plane."""
        return plane_sizes(self.layout, self.num_columns).row_bytes

    @property
    def planes(self) -> tuple[int, int, int, int]:
        """Where each plane begins."""
        offsets = plane_offsets(self.layout, self.num_experts * self.num_rows, self.num_columns)
        first, second, third, fourth = (self.address + offset for offset in offsets[:4])
        return first, second, third, fourth


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

    `done` is told each stretch of data (first byte, end) that is there. Raises: ShapeError, OutOfMemoryError.
    """
    total = num_experts * num_rows
    row_bytes = num_columns // SIZES[layout].unit * SIZES[layout].file_bytes
    offsets = plane_offsets(layout, total, num_columns)
    if data.dtype != np.uint8 or data.size != total * row_bytes:
        raise ShapeError(
            f"{num_experts} x {num_rows} x {num_columns} in {layout.name} take {total * row_bytes} bytes, found "
            f"{data.size} of {data.dtype}; pass the tensor's own bytes and shape"
        )
    address = device.allocate(offsets[-1])
    widths = plane_sizes(layout, num_columns).row_bytes
    step = max(1, _STEP_BYTES // row_bytes)
    for first in range(0, total, step):
        end = min(total, first + step)
        planes = to_planes(layout, data[first * row_bytes : end * row_bytes], end - first, num_columns)
        for offset, width, plane in zip(offsets, widths, planes, strict=False):
            if width:
                device.write(address + offset + first * width, plane)
        if done is not None:
            done(first * row_bytes, end * row_bytes)
    return DeviceWeight(layout, num_rows, num_columns, num_experts, address)
