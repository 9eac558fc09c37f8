"""The number of rows from which on a layout's products are made by AMX, measured once per process where there is AMX.

A kernel of such a layout has both ways, which give the same bits, so a choice by the clock changes no result. A small
matrix is multiplied both ways on this thread; AMX is taken from the fewest rows on from which it was faster every time.
One token, or a draft of fewer rows, is never multiplied by it.
"""

import functools
import time
from collections.abc import Callable
from contextlib import closing
from itertools import takewhile

import numpy as np

from localinfer.kernels.cpu.kernel_abi import SCRATCH_BYTES, activation_row_bytes
from localinfer.kernels.cpu.memory import address, aligned_zeros
from localinfer.kernels.cpu.parameters import BATCH, MATMUL, PROJECTION
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.layouts import TILE_ROWS, Layout, is_float, tile_bytes

NEVER = 1 << 62
TRIED_ROWS = (8, 16, 32, 64)
"""Numbers of rows that are timed; fewer are never multiplied by AMX."""
_COLUMNS, _TILES, _ATTEMPTS = 1024, 4, 5
_LEAST_GAIN = 0.97
"""Of the time without AMX: what AMX may take at most to be chosen."""


def choose_matrix_rows(tape: CpuTape) -> None:
    """Write into all products of a tape, whose kernels are linked, from how many rows on AMX makes them."""
    if isa.SELECTED is not ISA.AMX:
        return
    layouts = {f"matmul.matmul_{layout.name.lower()}": layout for layout in Layout if not is_float(layout)}
    size = len(PROJECTION.fields)
    for kernel, words in zip(tape.kernels, tape.parameters, strict=True):
        if kernel.name in layouts:
            first = len(MATMUL.fields) + PROJECTION.fields.index("matrix_rows")
            words[first::size] = least_matrix_rows(layouts[kernel.name])


@functools.cache
def least_matrix_rows(layout: Layout) -> int:
    """Rows from which on AMX is the faster way; NEVER where it is not."""
    with closing(ThreadPool(1)) as pool:
        timed = _Timed(pool, layout)
        return fewest_faster(lambda rows: timed.seconds(rows, NEVER), lambda rows: timed.seconds(rows, rows))


def fewest_faster(without: Callable[[int], float], by_amx: Callable[[int], float]) -> int:
    """The fewest of TRIED_ROWS from which on AMX takes less time, in turns; NEVER if it does not for the most rows."""

    def is_faster(rows: int) -> bool:
        seconds = [(without(rows), by_amx(rows)) for _ in range(_ATTEMPTS)]
        return min(second for _, second in seconds) < _LEAST_GAIN * min(first for first, _ in seconds)

    return min(takewhile(is_faster, reversed(TRIED_ROWS)), default=NEVER)


class _Timed:
    """A product of a matrix of zeros, of which time does not depend on what it holds."""

    def __init__(self, pool: ThreadPool, layout: Layout) -> None:
        self._pool = pool
        most, outputs = max(TRIED_ROWS), TILE_ROWS * _TILES
        stride, num_bytes = activation_row_bytes(_COLUMNS), tile_bytes(layout, _COLUMNS)
        weights, x = aligned_zeros(_TILES * num_bytes), aligned_zeros(most * stride)
        out, zeros, scratch = (
            aligned_zeros(most * 4 * outputs),
            aligned_zeros(4 * outputs),
            aligned_zeros(SCRATCH_BYTES),
        )
        matmul = MATMUL.pack(
            x=address(x), x_stride=stride, columns=_COLUMNS, is_output=0, projections=1, rows_per_block=most
        )
        projection = PROJECTION.pack(
            weights=address(weights), tile_bytes=num_bytes, tiles=_TILES, rows=outputs, out=address(out),
            out_stride=4 * outputs, residual=address(zeros), residual_stride=0, bias=address(zeros), bias_stride=0,
            scale=1.0, matrix_rows=NEVER,
        )  # fmt: skip
        self._words = np.concatenate([matmul, projection])
        fields = dict.fromkeys(BATCH.fields, 0)
        self._header = BATCH.pack(**fields | {"control": pool.control_address, "scratch": address(scratch)})
        kernel = Kernel(f"matmul.matmul_{layout.name.lower()}")
        self._ops = np.array([[kernel.address, address(self._words)]], np.int64)
        self._kept = weights, x, out, zeros, scratch

    def seconds(self, rows: int, matrix_rows: int) -> float:
        """Seconds of the product by so many rows, made by AMX from `matrix_rows` on."""
        BATCH.write(self._header, num_rows=rows)
        self._words[len(MATMUL.fields) + PROJECTION.fields.index("matrix_rows")] = matrix_rows
        began = time.perf_counter()
        self._pool.run(address(self._ops), 1, address(self._header))
        return time.perf_counter() - began
