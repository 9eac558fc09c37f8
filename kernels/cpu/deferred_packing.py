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
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, LocalinferError
from localinfer.kernels.cpu.crash_reports import REPORTS
from localinfer.kernels.cpu.memory import Arena, address, aligned, zeros
from localinfer.kernels.cpu.parameters import MATMUL, PROJECTION, READ_FILE
from localinfer.kernels.cpu.program import CpuProgram, Entries, ThreadPool, stretches
from localinfer.kernels.cpu.weights import PACK, READ, PackedWeight, packing_words
from localinfer.kernels.layouts import TILE_ROWS, Layout, num_tiles, stored_row_bytes, tile_bytes
from localinfer.kernels.program import OpCost

PIECE_BYTES = 1 << 20
"""Of a file, about: with its tiles it stays in a cache of 4 MiB."""
_STEP_PIECES = 8
"""Pieces that are packed for good between two looks at whether to go on."""
_IDLE_SECONDS = 0.1
"""Rest after a load, and after a look at a program that runs."""

_NUM_WORDS, _SIZE = len(MATMUL.fields), len(PROJECTION.fields)


@dataclass(frozen=True)
class UnpackedMatrix:
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

    def op(self, kernel: int, words: NDArray[np.int64]) -> tuple[int, int]:
        """An entry of a tape."""
        self.kept.append(words)
        return kernel, address(words)

    def filling(self, matrix: UnpackedMatrix, tile: int, target: int) -> list[tuple[int, int]]:
        """Two ops that fill the tiles of a piece from `tile` on."""
        packed, row = matrix.packed, tile * TILE_ROWS
        rows = packed.num_rows - row
        tiles = min(matrix.tiles_at_once, num_tiles(rows))
        read = READ_FILE.pack(
            control=self._control, pread=_pread_address(), descriptor=matrix.descriptor,
            offset=matrix.offset + row * matrix.row_bytes, target=address(self._staging),
            bytes=min(rows, tiles * TILE_ROWS) * matrix.row_bytes, failed=address(self.failed),
        )  # fmt: skip
        pack = packing_words(
            self._control, packed.layout, address(self._staging), target, tiles, rows, packed.num_columns
        )
        return [self.op(READ.address, read), self.op(PACK.address, pack)]


class DeferredPacking:
    """Packs the matrices of a program while it is used; its program asks it before and after every batch."""

    def __init__(self, program: CpuProgram, pool: ThreadPool, matrices: Sequence[UnpackedMatrix]) -> None:
        """Raises: as `finish`, if the program's tape has other products of a matrix, for which it is packed here."""
        assert matrices, "something is to be packed"
        self._matrices, self._pool = tuple(matrices), pool
        self._lock = threading.Lock()
        self._is_running = self._has_run = False
        self._num_filled = 0
        self._targets = [
            (matrix, tile, address(matrix.packed.data) + tile * matrix.packed.tile_bytes)
            for matrix in matrices
            for tile in range(0, num_tiles(matrix.packed.num_rows), matrix.tiles_at_once)
        ]
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._pieces = _Pieces(pool.control_address, matrices)
        self._buffer = aligned(max(one.tiles_at_once * one.packed.tile_bytes for one in matrices))
        self._first = self._first_entries(program)

    @property
    def is_done(self) -> bool:
        """Every matrix is packed."""
        return self._num_filled == len(self._targets)

    def start(self) -> None:
        """Pack from now on while no batch runs."""
        self._thread = threading.Thread(target=self._work, name="localinfer-packing", daemon=True)
        self._thread.start()

    def entries(self, usual: Entries) -> Entries:
        """The ops by which the batch is run that begins. Raises: CorruptFileError, if the file was changed."""
        with self._lock:
            # From now on the thread does nothing.
            self._is_running = True
        if self._first is not None and not self._has_run and 2 * self._num_filled < len(self._targets):
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
        targets = self._targets[self._num_filled : self._num_filled + _STEP_PIECES]
        if not targets:
            return
        pieces.kept.clear()
        ops = np.array([op for target in targets for op in pieces.filling(*target)], np.int64)
        pieces.failed[0] = 0
        pool.run(address(ops), len(ops), 0)
        self._check(pieces)
        self._num_filled += len(targets)

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
        ops: list[tuple[int, int]] = []
        costs: list[OpCost] = []
        descriptions: list[str] = []
        for kernel, words, cost, about in zip(
            tape.kernels, tape.parameters, tape.operations, tape.descriptions, strict=True
        ):
            projections = range(_NUM_WORDS, len(words), _SIZE) if kernel.name.startswith("matmul.matmul_") else ()
            if not any(int(words[place]) in by_address for place in projections):
                ops.append((kernel.address, address(words)))
                costs.append(cost)
                descriptions.append(about)
                continue
            head = words[:_NUM_WORDS].copy()
            MATMUL.write(head, projections=1)
            for place in projections:
                block = words[place : place + _SIZE]
                matrix = by_address.get(int(block[0]))
                pieces = [[self._pieces.op(kernel.address, np.concatenate([head, block]))]]
                if matrix is not None:
                    found.add(int(block[0]))
                    pieces = [self._product(kernel.address, matrix, head, block, tile) for tile in self._tiles(matrix)]
                rows = PROJECTION.fields.index("rows")
                share = replace(cost, multiply_adds=int(block[rows]) * int(head[2]) // len(pieces))
                for piece in pieces:
                    ops.extend(piece)
                    costs.extend([OpCost("packing.read_file"), OpCost("packing.pack_tiles"), share][-len(piece) :])
                    descriptions.extend([f"a piece of {about}"] * len(piece))
        has_others = len(program.tape.stage_starts) > 1 or bool(tape.ranged_kernels or tape.typed_kernels)
        if has_others or found != set(by_address):
            self.finish(self._pool)
            return None
        taken = np.array(ops, np.int64)
        REPORTS.add_tape(taken, descriptions)
        weakref.finalize(self, REPORTS.remove_tape, address(taken))
        return Entries(taken, address(taken), len(taken), stretches(costs))

    @staticmethod
    def _tiles(matrix: UnpackedMatrix) -> range:
        return range(0, num_tiles(matrix.packed.num_rows), matrix.tiles_at_once)

    def _product(
        self, kernel: int, matrix: UnpackedMatrix, head: NDArray[np.int64], block: NDArray[np.int64], tile: int
    ) -> list[tuple[int, int]]:
        """Ops that fill the buffer with tiles from `tile` on, and multiply by these."""
        own = dict(zip(PROJECTION.fields, map(int, block), strict=True))
        columns, part = 4 * TILE_ROWS * tile, block.copy()
        PROJECTION.write(
            part, weights=address(self._buffer), tiles=min(matrix.tiles_at_once, own["tiles"] - tile),
            rows=min(own["rows"], TILE_ROWS * (tile + matrix.tiles_at_once)) - TILE_ROWS * tile, out=own["out"] + columns, residual=own["residual"] + columns,
            bias=own["bias"] + tile * own["bias_stride"],
        )  # fmt: skip
        product = self._pieces.op(kernel, np.concatenate([head, part]))
        return [*self._pieces.filling(matrix, tile, address(self._buffer)), product]
