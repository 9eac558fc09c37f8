"""Matrices that are packed after a program's first batch, which reads their rows from the file piece by piece.

A start that packs first writes all weights into fresh memory, and where a host has taken a virtual machine's free
memory back, that takes longer than everything else before the first token. A first batch needs each weight once: so it
copies a piece of a matrix's rows into a buffer that stays in the cache, packs that into another, and lets the product's
own kernel multiply it, which gives the same bits. The second batch packs everything for good, by all threads, unless a
thread that works while no batch runs has done so by then.

Rows are copied by the C library's `pread`, so a file that is cut short cannot end the process. What was read counts
once the file proves to be what it was.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, LocalinferError
from localinfer.kernels.cpu.crash_reports import REPORTS
from localinfer.kernels.cpu.memory import Arena, address, aligned, zeros
from localinfer.kernels.cpu.parameters import MATMUL, PACK_TILES, PROJECTION, READ_FILE
from localinfer.kernels.cpu.program import CpuProgram, Entries, ThreadPool, stretches
from localinfer.kernels.cpu.weights import PACK, READ, PackedWeight, packing_words
from localinfer.kernels.layouts import TILE_ROWS, Layout, num_tiles, stored_row_bytes, tile_bytes
from localinfer.kernels.program import OpCost
from localinfer.types import Record

PIECE_BYTES = 1 << 20
"""Of a file, about: with its tiles it stays in a cache of 4 MiB."""
_STEP_PIECES = 8
"""Pieces that are packed for good between two looks at whether to go on."""
_IDLE_SECONDS = 0.1
"""Rest after a load, and after a look at a program that runs."""

_NUM_WORDS, _SIZE = len(MATMUL.fields), len(PROJECTION.fields)
_READS, _PACKS = OpCost(READ.name), OpCost(PACK.name)


class UnpackedMatrix(Record):
    """A matrix of a file with the memory for its tiles, which is not filled yet.

    descriptor, offset: of the file, and where its rows begin there. check: raises CorruptFileError if the file was
    changed since it was opened, and keeps it open.
    """

    name: str
    packed: PackedWeight
    descriptor: int
    offset: int
    check: Callable[[], None]

    @property
    def row_bytes(self) -> int:
        """Of a row in the file."""
        return stored_row_bytes(self.packed.layout, self.packed.num_columns)

    @property
    def tiles_at_once(self) -> int:
        """Tiles of a piece."""
        return max(1, PIECE_BYTES // (TILE_ROWS * self.row_bytes))

    @property
    def first_tiles(self) -> NDArray[np.int64]:
        """The first tile of each piece."""
        return np.arange(0, num_tiles(self.packed.num_rows), self.tiles_at_once)


def can_defer() -> bool:
    """True if this system can read a file from compiled code."""
    return hasattr(os, "pread") and bool(_pread_address())


@cache
def _pread_address() -> int:
    function = getattr(ctypes.CDLL(None), "pread", None)
    return 0 if function is None else int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def reserved(layout: Layout, num_rows: int, num_columns: int, arena: Arena) -> PackedWeight:
    """A matrix with memory for its tiles, which nothing has touched."""
    data = arena.take(num_tiles(num_rows) * tile_bytes(layout, num_columns))
    return PackedWeight(layout, num_rows, num_columns, 1, data)


class _Pieces:
    """Writes ops that read and pack pieces, for the threads of one control block; keeps what they point to."""

    def __init__(self, control: int, matrices: Sequence[UnpackedMatrix]) -> None:
        largest = max(one.tiles_at_once * TILE_ROWS * one.row_bytes for one in matrices)
        self._control, self._staging = control, aligned(largest)
        self.failed = zeros(1, np.int64)
        self.kept: list[NDArray[np.int64]] = []

    def entries(self, kernel: int, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """Entries of a tape, int64[pieces, 2]: a kernel with each of int64[pieces, words]."""
        self.kept.append(words)
        found = np.empty((len(words), 2), np.int64)
        found[:, 0], found[:, 1] = kernel, address(words) + words.strides[0] * np.arange(len(words))
        return found

    def filling(self, matrix: UnpackedMatrix, tiles: NDArray[np.int64], targets: NDArray[np.int64]) -> Any:
        """Entries int64[pieces, 2, 2] that fill the tiles of pieces from `tiles` on, and write them to `targets`."""
        packed, staging = matrix.packed, address(self._staging)
        rows = packed.num_rows - TILE_ROWS * tiles
        counts = np.minimum(matrix.tiles_at_once, -(-rows // TILE_ROWS))
        read = READ_FILE.pack(
            control=self._control, pread=_pread_address(), descriptor=matrix.descriptor, offset=0, target=staging,
            bytes=0, failed=address(self.failed),
        )  # fmt: skip
        pack = packing_words(self._control, packed.layout, staging, 0, 0, 0, packed.num_columns)
        reads, packs = np.tile(read, (len(tiles), 1)), np.tile(pack, (len(tiles), 1))
        offsets = matrix.offset + TILE_ROWS * matrix.row_bytes * tiles
        READ_FILE.write(reads.T, offset=offsets, bytes=np.minimum(rows, TILE_ROWS * counts) * matrix.row_bytes)
        PACK_TILES.write(packs.T, target=targets, tiles=counts, rows=rows)
        return np.stack([self.entries(READ.address, reads), self.entries(PACK.address, packs)], axis=1)


class DeferredPacking:
    """Packs the matrices of a program while it is used; its program asks it before and after every batch."""

    def __init__(self, program: CpuProgram, pool: ThreadPool, matrices: Sequence[UnpackedMatrix]) -> None:
        """Raises: as `finish`, if the program's tape has other products of a matrix, for which it is packed here."""
        assert matrices, "something is to be packed"
        self._matrices, self._pool = tuple(matrices), pool
        self._lock = threading.Lock()
        self._is_running = self._has_run = False
        self._num_filled = 0
        self._steps = [
            (matrix, matrix.first_tiles[first : first + _STEP_PIECES])
            for matrix in matrices
            for first in range(0, len(matrix.first_tiles), _STEP_PIECES)
        ]
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._pieces = _Pieces(pool.control_address, matrices)
        self._buffer = aligned(max(one.tiles_at_once * one.packed.tile_bytes for one in matrices))
        self._first = self._first_entries(program)

    @property
    def is_done(self) -> bool:
        """Every matrix is packed."""
        return self._num_filled == len(self._steps)

    def start(self) -> None:
        """Pack from now on while no batch runs."""
        self._thread = threading.Thread(target=self._work, name="localinfer-packing", daemon=True)
        self._thread.start()

    def entries(self, usual: Entries) -> Entries:
        """The ops by which the batch is run that begins. Raises: CorruptFileError, if the file was changed."""
        with self._lock:
            # From now on the thread does nothing.
            self._is_running = True
        if self._first is not None and not self._has_run and 2 * self._num_filled < len(self._steps):
            self._has_run = True
            self._pieces.failed[0] = 0
            return self._first
        self.finish(self._pool)
        return usual

    def check(self) -> None:
        """Take note of the end of a batch. Raises: CorruptFileError, if it read less than it was to."""
        self._check(self._pieces)
        with self._lock:
            self._is_running = False

    def finish(self, pool: ThreadPool | None = None) -> None:
        """Pack what is left. pool: whose batch waits for it, None for a thread of its own.

        Raises: CorruptFileError if the file was changed since it was opened.
        """
        if self.is_done:
            return
        with closing(ThreadPool(1)) if pool is None else nullcontext(pool) as threads:
            pieces = _Pieces(threads.control_address, self._matrices)
            while not self.is_done:
                with self._lock:
                    self._step(threads, pieces)

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _work(self) -> None:
        pause = _IDLE_SECONDS
        with closing(ThreadPool(1)) as pool:
            pieces = _Pieces(pool.control_address, self._matrices)
            while not self._ending.wait(pause) and not self.is_done:
                with self._lock:
                    pause = _IDLE_SECONDS if self._is_running else 0.0
                    if not self._is_running:
                        try:
                            self._step(pool, pieces)
                        except LocalinferError:
                            # The next batch meets it too, and says so.
                            return

    def _step(self, pool: ThreadPool, pieces: _Pieces) -> None:
        """Pack the next pieces; the caller has the lock."""
        if self.is_done:
            return
        matrix, tiles = self._steps[self._num_filled]
        pieces.kept.clear()
        pieces.failed[0] = 0
        targets = address(matrix.packed.data) + matrix.packed.tile_bytes * tiles
        ops = pieces.filling(matrix, tiles, targets).reshape(-1, 2)
        pool.run(address(ops), len(ops), 0)
        self._check(pieces)
        self._num_filled += 1

    def _check(self, pieces: _Pieces) -> None:
        for check in {matrix.descriptor: matrix.check for matrix in self._matrices}.values():
            check()
        if pieces.failed[0]:
            raise CorruptFileError(
                f"{self._matrices[0].name} cannot be read from the file any more; load the model again"
            )

    def _first_entries(self, program: CpuProgram) -> Entries | None:
        """The program's ops with pieces in place of products by matrices; None if it has other kinds of batches.

        Raises: as `finish`: a matrix that is multiplied by another kind of product is packed now, with all the others.
        """
        tape, by_address = program.tape, {address(one.packed.data): one for one in self._matrices}
        found: set[int] = set()
        ops: list[NDArray[np.int64]] = []
        costs: list[OpCost] = []
        descriptions: list[str] = []
        rows, columns = PROJECTION.fields.index("rows"), MATMUL.fields.index("columns")
        for kernel, words, cost, about in zip(
            tape.kernels, tape.parameters, tape.operations, tape.descriptions, strict=True
        ):
            is_product = kernel.name.startswith("matmul.matmul_")
            blocks = words[_NUM_WORDS:].reshape(-1, _SIZE) if is_product else words[:0]
            if not any(int(block[0]) in by_address for block in blocks):
                ops.append(self._pieces.entries(kernel.address, words[None]))
                costs.append(cost)
                descriptions.append(about)
                continue
            head = words[:_NUM_WORDS].copy()
            MATMUL.write(head, projections=1)
            for block in blocks:
                matrix = by_address.get(int(block[0]))
                share = int(block[rows]) * int(head[columns])
                if matrix is None:
                    ops.append(self._pieces.entries(kernel.address, np.concatenate([head, block])[None]))
                    costs.append(replace(cost, multiply_adds=share))
                else:
                    found.add(int(block[0]))
                    ops.append(self._product(kernel.address, matrix, head, block))
                    count = len(matrix.first_tiles)
                    costs.extend([_READS, _PACKS, replace(cost, multiply_adds=share // count)] * count)
                descriptions.extend([f"a part of {about}"] * len(ops[-1]))
        has_others = len(program.tape.stage_starts) > 1 or bool(tape.ranged_kernels or tape.typed_kernels)
        if has_others or found != set(by_address):
            self.finish(self._pool)
            return None
        taken = np.concatenate(ops)
        REPORTS.add_tape(taken, descriptions)
        weakref.finalize(self, REPORTS.remove_tape, address(taken))
        return Entries(taken, address(taken), len(taken), stretches(costs))

    def _product(
        self, kernel: int, matrix: UnpackedMatrix, head: NDArray[np.int64], block: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Entries that fill the buffer with the tiles of a piece and multiply by these, piece after piece."""
        own, tiles = dict(zip(PROJECTION.fields, map(int, block), strict=True)), matrix.first_tiles
        counts = np.minimum(matrix.tiles_at_once, own["tiles"] - tiles)
        columns = 4 * TILE_ROWS * tiles
        words = np.tile(np.concatenate([head, block]), (len(tiles), 1))
        PROJECTION.write(
            words[:, _NUM_WORDS:].T, weights=address(self._buffer), tiles=counts,
            rows=np.minimum(own["rows"] - TILE_ROWS * tiles, TILE_ROWS * counts), out=own["out"] + columns,
            residual=own["residual"] + columns, bias=own["bias"] + own["bias_stride"] * tiles,
        )  # fmt: skip
        filling = self._pieces.filling(matrix, tiles, np.full(len(tiles), address(self._buffer)))
        products = self._pieces.entries(kernel, words)[:, None]
        return np.concatenate([filling, products], axis=1).reshape(-1, 2)
