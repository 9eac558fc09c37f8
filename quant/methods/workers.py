"""Threads for large products whose bits do not depend on how many threads there are.

Work is cut into pieces by its own size alone, and each piece is one call of NumPy with a single BLAS thread inside.
Sums are taken inside one piece, or over pieces in their order.

Hessians, products and GPTQ's columns on a device of torch's: a GPU, or in tests its CPU.

The results are those of `Workers` but for the rounding of float32 sums, which torch takes in an order of its own: sums
within 1e-5 of their size, and of the codes those that lie between two levels may differ (tests/quant/
test_torch_workers.py). No GPU has run this yet.
"""

import ctypes
import math
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from localinfer.kernels.cpu.encoding import TABLE
from localinfer.quant.formats.encoding import Grid
from localinfer.quant.formats.types import IQ4_VALUES
from localinfer.system.extras import require
from localinfer.types import Closing, FloatArray

ROWS_PER_PIECE = 512
COLUMNS_PER_PIECE = 256
_FACTORED_AT_ONCE = 256

_LEAST_BYTES = 4 << 20
"""Smaller arrays are left to the allocator."""
_FREE_BYTES = 256 << 20
"""Unused memory that is kept."""
_WASTE = 2
"""An array may lie in memory of so many times its size."""


class BufferPool:
    """Memory for large arrays, used again once the last view of an array is gone. Threads may share one.

    Fresh pages from the system cost more than many a computation on them: on a virtual machine, filling 184 MB took
    66 ms in fresh memory, and 14 ms in the same memory again.
    """

    def __init__(self) -> None:
        self._free: list[NDArray[np.uint8]] = []
        # The interpreter may drop an array at any time, also while this thread holds the lock.
        self._lock = threading.RLock()

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an uninitialised array in C order."""
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if num_bytes < _LEAST_BYTES:
            return np.empty(shape, dtype)
        block = self._take(num_bytes)
        buffer = (ctypes.c_char * num_bytes).from_buffer(block.data)
        weakref.finalize(buffer, self._release, block).atexit = False
        array: NDArray[Any] = np.frombuffer(memoryview(buffer), dtype).reshape(shape)
        return array

    def clear(self) -> None:
        """Free unused memory."""
        with self._lock:
            self._free.clear()

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        with self._lock:
            fitting = [i for i, one in enumerate(self._free) if num_bytes <= one.size <= _WASTE * num_bytes]
            if fitting:
                return self._free.pop(min(fitting, key=lambda i: self._free[i].size))
        return np.empty(num_bytes, np.uint8)

    def _release(self, block: NDArray[np.uint8]) -> None:
        with self._lock:
            self._free.append(block)
            while sum(one.size for one in self._free) > _FREE_BYTES:
                del self._free[0]


class Workers(Closing):
    """A number of threads; a context manager, inside of which BLAS computes with one thread per call everywhere.

    memory: where large results lie. device: that of torch's which computes instead of NumPy, None for none
    (`TorchWorkers`).
    """

    device: str | None = None

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._executor = ThreadPoolExecutor(num_threads)
        self.memory = BufferPool()
        require("convert", "quantizing a model")
        from threadpoolctl import ThreadpoolController

        self._limits = ThreadpoolController().limit(limits=1, user_api="blas")

    def close(self) -> None:
        """End the threads, and restore BLAS's number of threads."""
        self._executor.shutdown(cancel_futures=True)
        self._limits.restore_original_limits()
        self.memory.clear()

    def run(self, function: Callable[[int], None], count: int) -> None:
        """Call function(0) to function(count - 1), in any order and together; the first error ends it."""
        if count == 1:
            function(0)
            return
        for _ in self._executor.map(function, range(count)):
            pass

    def over_rows(self, function: Callable[[slice], None], num_rows: int, step: int = ROWS_PER_PIECE) -> None:
        """Call function with slices that together cover rows 0 to num_rows - 1."""
        count = -(-num_rows // step)
        self.run(lambda piece: function(slice(piece * step, min(num_rows, (piece + 1) * step))), count)

    def product(self, x: FloatArray, weight: FloatArray) -> FloatArray:
        """x @ weight.T. Shapes: x float32[rows, n], weight float32[columns, n]; result float32[rows, columns]."""
        out = self.memory.empty((len(x), len(weight)))

        def one(rows: slice) -> None:
            np.matmul(x[rows], weight.T, out=out[rows])

        self.over_rows(one, len(x))
        return out

    def cross(self, a: FloatArray, b: FloatArray) -> FloatArray:
        """a.T @ b, summed over rows. Shapes: float32[rows, m], float32[rows, n]; result float32[m, n]."""
        out = self.memory.empty((a.shape[1], b.shape[1]))

        def one(rows: slice) -> None:
            np.matmul(a[:, rows].T, b, out=out[rows])

        self.over_rows(one, len(out), COLUMNS_PER_PIECE)
        return out

    def gram(self, x: FloatArray) -> FloatArray:
        """x.T @ x, symmetric to the bit. Shapes: x float32[rows, n]; result float32[n, n]."""
        size, step = x.shape[1], COLUMNS_PER_PIECE
        out = self.memory.empty((size, size))
        starts = range(0, size, step)
        pairs = [(first, second) for first in starts for second in starts if first <= second]

        def one(index: int) -> None:
            first, second = (slice(start, start + step) for start in pairs[index])
            part = x[:, first].T @ x[:, second]
            out[first, second] = part
            if first != second:
                out[second, first] = part.T

        self.run(one, len(pairs))
        return out

    def factor(self, matrix: NDArray[np.float64]) -> None:
        """Put the Cholesky factor in the lower triangle, block after block; above it nothing means anything.

        Raises: numpy.linalg.LinAlgError if the matrix is not positive definite.
        """
        for start in range(0, len(matrix), _FACTORED_AT_ONCE):
            end = min(len(matrix), start + _FACTORED_AT_ONCE)
            block = np.linalg.cholesky(matrix[start:end, start:end])
            matrix[start:end, start:end] = block
            inverse = np.linalg.inv(block).T
            below = matrix[end:]
            left = below[:, start:end]

            def solve(rows: slice, left: NDArray[np.float64] = left, inverse: NDArray[np.float64] = inverse) -> None:
                left[rows] = left[rows] @ inverse

            def update(
                rows: slice, below: NDArray[np.float64] = below, left: NDArray[np.float64] = left, end: int = end
            ) -> None:
                stop = min(len(left), rows.stop)
                below[rows, end : end + stop] -= left[rows] @ left[:stop].T

            self.over_rows(solve, len(left))
            self.over_rows(update, len(left))


_BLOCK = 128


class TorchWorkers(Workers):
    """Workers whose large products, factors and updates of columns are torch's; the rest is done by threads as ever.

    device: torch's name of it, such as "cuda".
    """

    def __init__(self, num_threads: int, device: str) -> None:
        import torch

        super().__init__(num_threads)
        self.device = device
        self._torch: Any = torch

    def product(self, x: FloatArray, weight: FloatArray) -> FloatArray:
        """x @ weight.T, as `Workers.product`."""
        return self._back(self._there(x) @ self._there(weight).T)

    def cross(self, a: FloatArray, b: FloatArray) -> FloatArray:
        """a.T @ b, as `Workers.cross`."""
        return self._back(self._there(a).T @ self._there(b))

    def gram(self, x: FloatArray) -> FloatArray:
        """x.T @ x, symmetric to the bit, as `Workers.gram`."""
        there = self._there(x)
        upper = (there.T @ there).triu()
        return self._back(upper + upper.triu(1).T)

    def factor(self, matrix: NDArray[np.float64]) -> None:
        """The Cholesky factor in the lower triangle, as `Workers.factor`."""
        lower, failed = self._torch.linalg.cholesky_ex(self._there(matrix))
        if int(failed) or not bool(self._torch.isfinite(lower).all()):
            raise np.linalg.LinAlgError("the matrix is not positive definite")
        matrix[:] = lower.cpu().numpy()

    def round_columns(
        self, target: FloatArray, grid: Grid, order: NDArray[np.int64], weights: FloatArray
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Levels and values in file order, and what rounding took from each column, in rounding order.

        Column i takes on `weights[i, j]` times the error of every earlier column j (`kernels.cpu.encoding`).
        Shapes: target float32[rows, columns]; weights float32[columns, columns]; results float32[columns, rows].
        """
        torch = self._torch
        given = self._there(target).T[self._there(order)].contiguous()
        scales = self._there(grid.scale)
        minimums = torch.zeros_like(scales) if grid.minimum is None else self._there(grid.minimum)
        factors, table = self._there(weights), self._there(IQ4_VALUES)
        wanted, errors = given.clone(), torch.zeros_like(given)
        levels, decoded = torch.empty_like(given), torch.empty_like(given)
        lowest, highest = grid.level_range
        places, groups = order.tolist(), (order // grid.group_size).tolist()
        for start in range(0, len(given), _BLOCK):
            end = min(len(given), start + _BLOCK)
            if start:
                wanted[start:end] += factors[start:end, :start] @ errors[:start]
            for i in range(start, end):
                if i > start:
                    wanted[i] += factors[i, start:i] @ errors[start:i]
                scale, minimum = scales[groups[i]], minimums[groups[i]]
                exact = torch.where(scale == 0, 0.0, (wanted[i] - minimum) / scale)
                if grid.level_range == TABLE:
                    level = table[torch.bucketize(exact, (table[1:] + table[:-1]) / 2, right=True)]
                else:
                    level = exact.round().clamp(lowest, highest)
                found = scale * level + minimum
                errors[i] = given[i] - found
                wanted[i] -= found
                levels[places[i]], decoded[places[i]] = level, found
        return self._back(levels), self._back(decoded), self._back(wanted)

    def _there(self, array: NDArray[Any]) -> Any:
        return self._torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

    def _back(self, tensor: Any) -> FloatArray:
        array: FloatArray = tensor.contiguous().cpu().numpy()
        return array
