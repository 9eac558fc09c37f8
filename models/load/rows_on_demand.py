"""A table of which a text needs few rows: each is read from the file when it is first needed, and stays.

A map of the file would do the same with less, but truncating the file while a kernel reads the map ends the
process (SIGBUS), and writing into it changes what the model says. A row that was read is this process's own.
"""

import contextlib
import mmap
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localinfer.quant.gguf.mapped_file import FileStretch

_WHOLE_BYTES = 4 << 20
"""Tables up to this size are read at once: it takes a millisecond or two, and no step ever looks again."""
_BLOCK_BYTES = 4 << 10
"""About how much is read at a time. Rows of tokens that occur together do not lie together."""


class RowsOnDemand:
    """`num_rows` rows of equal size in a file.

    data: uint8[bytes of the table], of which the rows that `fill` was asked for hold what the file does. fill: None if
    all do. One thread at a time may fill. Raises: CorruptFileError if the file was changed since it was opened.
    """

    def __init__(
        self, stretch: FileStretch, num_rows: int, *, whole_bytes: int = _WHOLE_BYTES, block_bytes: int = _BLOCK_BYTES
    ) -> None:
        assert num_rows > 0 and stretch.num_bytes % num_rows == 0, "rows are of one size"
        self._stretch = stretch
        self.data = _untouched(stretch.num_bytes)
        self.fill: Callable[[NDArray[np.int32]], None] | None = None
        if stretch.num_bytes <= whole_bytes:
            stretch.read_into([(0, self.data.data)])
            return
        row_bytes = stretch.num_bytes // num_rows
        self._block_rows = max(1, block_bytes // row_bytes)
        self._block_bytes = self._block_rows * row_bytes
        self._is_there = bytearray(-(-num_rows // self._block_rows))
        self._there = np.frombuffer(self._is_there, np.bool_)
        self.fill = self._fill

    def _fill(self, row_ids: NDArray[np.int32]) -> None:
        """Have these rows, which exist, in `data`. A decoded token that was met before costs a tenth of a microsecond.

        Raises: CorruptFileError if the file was changed since it was opened; what was there stays.
        """
        if row_ids.size == 1:
            block = int(row_ids[0]) // self._block_rows
            if not self._is_there[block]:
                self._read([block])
            return
        blocks = row_ids // self._block_rows
        missing = np.unique(blocks[~self._there[blocks]])
        if missing.size:
            self._read(missing.tolist())

    def _read(self, blocks: list[int]) -> None:
        size, memory = self._block_bytes, self.data.data
        self._stretch.read_into([(block * size, memory[block * size : (block + 1) * size]) for block in blocks])
        for block in blocks:
            self._is_there[block] = True


def _untouched(num_bytes: int) -> NDArray[np.uint8]:
    """Memory that takes room page by page, as it is written: no large pages, of which each row would take a whole."""
    if sys.platform == "win32":
        return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A system without large pages has no such advice.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)
