"""A product of a model as a calibration pass sees it: which matrices multiply which inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from localinfer.types import FloatArray


@dataclass(frozen=True)
class MatrixPart:
    """Rows of a tensor's matrix, as the model uses them: all of them, but in fused tensors."""

    tensor: str
    expert: int
    """Number of the matrix in a stack; 0 for an ordinary tensor."""
    rows: slice
    values: FloatArray
    """float32[rows, columns]."""
    wanted: FloatArray | None = None
    """float32[tokens, rows], where the product is added to something that differs between the models: its value for
    which both sums are the same. None elsewhere."""


@dataclass(frozen=True)
class LinearProduct:
    """Matrices that multiply one input, over all tokens of a calibration text."""

    matrices: tuple[MatrixPart, ...]
    original: FloatArray
    """float32[tokens, columns], the matrices' input in the original model."""
    current: FloatArray
    """Their input in the model whose earlier matrices are quantized; the same array where nothing is yet, or where
    the pass follows the original model alone."""
    is_aligned: bool = True
    """Rows of both are of the same tokens; experts read the tokens routed to them in either model."""


class ProductVisitor(Protocol):
    """Called with every product of a model, in the order in which they are computed."""

    def visit(self, product: LinearProduct) -> Sequence[FloatArray | None]:
        """Look at a product; return per matrix what the quantized model has in its place, None for the same.

        Shapes: as `MatrixPart.values`. Arrays of the product are valid during the call only.
        """
        ...
