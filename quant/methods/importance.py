"""Collect the importance of input channels while a calibration pass runs: what llama.cpp calls an imatrix."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.quant.methods.hooks import LinearProduct
from localinfer.quant.methods.imatrix import Importance
from localinfer.types import FloatArray


class ImportanceVisitor:
    """A `ProductVisitor` that sums squares of what the original model's matrices read."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], NDArray[np.float64]] = {}
        self._counts: dict[tuple[str, int], int] = {}

    def visit(self, product: LinearProduct) -> Sequence[FloatArray | None]:
        """Add the product's inputs."""
        sums = np.einsum("tk,tk->k", product.original, product.original, dtype=np.float64)
        for name, expert in {(matrix.tensor, matrix.expert) for matrix in product.matrices}:
            # Fused tensors are seen once for each of their parts, with the same input.
            self._sums[name, expert] = sums
            self._counts[name, expert] = len(product.original)
        return [None] * len(product.matrices)

    def importance(self, dataset: str, num_chunks: int) -> Importance:
        """What was found: mean squares, and 1 for experts that no token reached."""
        found: dict[str, FloatArray] = {}
        for name in dict.fromkeys(name for name, _ in self._sums):
            experts = sorted(expert for other, expert in self._sums if other == name)
            assert experts == list(range(len(experts))), f"{name}: every expert of a stack is visited"
            rows = [
                self._sums[name, expert] / self._counts[name, expert]
                if self._counts[name, expert]
                else np.ones_like(self._sums[name, expert])
                for expert in experts
            ]
            found[name] = np.stack(rows).astype(np.float32)
        return Importance(dataset, found, dataset, num_chunks)
