"""An embedding table whose rows are read from the file on first use.

A memory map would be simpler, but truncating the file while a kernel reads the map kills the process (SIGBUS), and
writing to the file changes the model. Rows are copied, so neither can happen.
"""

import contextlib
import mmap
import sys
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu import guard
from localinfer.quant.gguf.mapped_file import FileStretch

_WHOLE_BYTES = 4 << 20
"""Tables up to this size are read at once, in a millisecond or two."""
_BLOCK_BYTES = 4 << 10
"""About how many bytes are read at a time. Tokens that occur together are not adjacent."""


class RowsOnDemand:
    """`num_rows` rows of equal size in a file.

    data: uint8[bytes of the table]; valid are the rows that `fill` was called with. fill: None if all are valid. One
    thread at a time may fill. Raises: CorruptFileError if the file was changed since it was opened.
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
        """Read these rows, which exist, into `data`. For a known token it takes a tenth of a microsecond.

        Raises: CorruptFileError if the file was changed since it was opened; rows read before stay valid.
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
    """Memory that is allocated page by page when written: no huge pages, of which each row would allocate one."""
    if guard.IS_ON:
        return guard.guarded(num_bytes)
    if sys.platform == "win32":
        return np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A system without huge pages.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, np.uint8)
