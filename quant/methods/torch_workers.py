"""Hessians, products and GPTQ's columns on a device of torch's: a GPU, or in tests its CPU.

The results are those of `Workers` but for the rounding of float32 sums, which torch takes in an order of its own: sums
within 1e-5 of their size, and of the codes those that lie between two levels may differ (tests/quant/
test_torch_workers.py). No GPU has run this yet.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.encoding import TABLE
from localinfer.quant.formats.reference_fits import IQ4_VALUES
from localinfer.quant.methods.grids import Grid
from localinfer.quant.methods.workers import Workers
from localinfer.types import FloatArray

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
