"""Pictures and sounds of a batch on the device: embeddings, positions on axes, ranges that rows see.

A batch of words has none of it: it writes what a batch of a model of text writes, and launches the same kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cuda.device import CudaDevice
from localinfer.kernels.ops import NUM_AXES
from localinfer.kernels.program import Segment
from localinfer.types import FloatArray

_EMBEDDINGS, _KEY_STARTS, _KEY_ENDS, _WINDOW_STARTS = range(4)
_AXES = 4
MEDIA_ARRAYS = _AXES + NUM_AXES
"""Arrays int64[capacity] that follow those of words: addresses of embeddings, first positions that rows see, the ones
after the last, those from which on windows bound nothing, and positions by row and axis, which take as many arrays as
there are axes."""


@dataclass(frozen=True)
class MediaShape:
    """Addresses of all that a batch says of its rows beside their tokens; 0 for the rest."""

    embeddings: int = 0
    """int64[rows]: the address of each row's embedding; 0 for those of words."""
    axes: int = 0
    """int64[rows][NUM_AXES]: positions in time, rows and columns."""
    key_starts: int = 0
    """int64[rows]: the first position in the cache that each row sees."""
    key_ends: int = 0
    """int64[rows]: the one after the last that it sees."""
    window_starts: int = 0
    """int64[rows]: the one from which on it sees what its window no longer holds."""


class MediaInput:
    """Writer of media in the batches of one program.

    embeddings: address and row stride of a buffer of the program for as many embeddings as a batch has rows; None where
    no op reads any, as in a part of a model that has neither its embedding nor the layers to which some are added.
    """

    def __init__(self, device: CudaDevice, embeddings: tuple[int, int] | None) -> None:
        self._device = device
        self._embeddings = embeddings

    def write(self, segments: Sequence[Segment], words: NDArray[np.int64], address: int) -> MediaShape | None:
        """Upload embeddings, and fill the arrays int64[MEDIA_ARRAYS, capacity] that are to be copied to an address.

        None, with the arrays as they were, for a batch of words at their own positions.
        """
        has_embeddings = any(one.media is not None and len(one.media.embeddings) for one in segments)
        has_axes = any(one.media is not None and one.media.positions is not None for one in segments)
        has_ranges = any(one.has_ranges for one in segments)
        if not (has_embeddings or has_axes or has_ranges):
            return None
        words[:] = 0
        axes = words[_AXES:].reshape(-1, NUM_AXES)
        row = 0
        for segment in segments:
            end = row + segment.num_rows
            if segment.media is not None and self._embeddings is not None:
                for first, rows in segment.media.embeddings:
                    place = self._upload(rows, row + first)
                    words[_EMBEDDINGS, row + first : row + first + len(rows)] = place
            if has_axes:
                axes[row:end] = _positions(segment)
            if has_ranges:
                words[_KEY_STARTS : _WINDOW_STARTS + 1, row:end] = segment.ranges()
            row = end
        places = [address + 8 * words.shape[1] * number for number in range(_AXES + 1)]
        return MediaShape(
            places[_EMBEDDINGS] if has_embeddings else 0,
            places[_AXES] if has_axes else 0,
            places[_KEY_STARTS] if has_ranges else 0,
            places[_KEY_ENDS] if has_ranges else 0,
            places[_WINDOW_STARTS] if has_ranges else 0,
        )

    def _upload(self, rows: FloatArray, first: int) -> NDArray[np.int64]:
        """Copy embeddings to the buffer's rows from `first` on; returns their addresses."""
        assert self._embeddings is not None, "an op reads them"
        address, stride = self._embeddings
        if stride != rows.strides[0]:
            rows = np.pad(rows, ((0, 0), (0, stride // 4 - rows.shape[1])))
        self._device.write(address + first * stride, rows)
        return address + stride * np.arange(first, first + len(rows), dtype=np.int64)


def _positions(segment: Segment) -> NDArray[np.int64]:
    """Positions of a segment's rows by axis, or those in the sequence as a column for every axis."""
    if segment.media is not None and segment.media.positions is not None:
        return segment.media.positions
    return np.arange(segment.start_position, segment.start_position + segment.num_rows)[:, None]
