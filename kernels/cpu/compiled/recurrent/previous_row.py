"""Every row's predecessor in its sequence: that of a segment's first row comes with the segment."""

from typing import Any

from localinfer.kernels.cpu.compiled.recurrent.segments import copy_vectors, segment_op
from localinfer.kernels.cpu.parameters import PREVIOUS_ROW, SEGMENT

_COLUMNS = 1024


@segment_op(PREVIOUS_ROW, lambda p: (p.columns + _COLUMNS - 1) // _COLUMNS)
def previous_row(p: Any, batch: int, thread: int, segment: int, part: int) -> None:
    """A stretch of columns of all rows of a segment."""
    offset, count = 4 * part * _COLUMNS, min(_COLUMNS, p.columns - part * _COLUMNS)
    first, num_rows = SEGMENT.first_row(segment), SEGMENT.num_rows(segment)
    out, x = p.out + first * p.out_stride + offset, p.x + first * p.x_stride + offset
    carried, following = SEGMENT.carried(segment), SEGMENT.next_carried(segment)
    copy_vectors(out, 0 if carried == 0 else carried + offset, count)
    if p.x == 0:
        return
    for row in range(1, num_rows):
        copy_vectors(out + row * p.out_stride, x + (row - 1) * p.x_stride, count)
    if following != 0:
        copy_vectors(following + offset, x + (num_rows - 1) * p.x_stride, count)
