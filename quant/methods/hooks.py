"""A product of a model as a calibration pass sees it: which matrices multiply which inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from localinfer.types import FloatArray


@dataclass(frozen=True)
class MatrixPart:
    """Rows of a tensor's matrix, as the model uses them: all of them, but in fused tensors.

    expert: which matrix of a stack; 0 for an ordinary tensor. values: float32[rows, columns].
    wanted: float32[tokens, rows], where the product is added to something that differs between the models: what it
    must be for both sums to be the same. None elsewhere.
    """

    tensor: str
    expert: int
    rows: slice
    values: FloatArray
    wanted: FloatArray | None = None


@dataclass(frozen=True)
class LinearProduct:
    """Matrices that multiply one input, over all tokens of a calibration text.

    original: float32[tokens, columns], what the matrices read in the original model.
    current: what they read in the model whose earlier matrices are quantized; the same array where nothing is yet, or
    where the pass follows the original model alone.
    is_aligned: whether rows of both are of the same tokens; experts read the tokens routed to them in either model.
    """

    matrices: tuple[MatrixPart, ...]
    original: FloatArray
    current: FloatArray
    is_aligned: bool = True


class ProductVisitor(Protocol):
    """Called with every product of a model, in the order in which they are computed."""

    def visit(self, product: LinearProduct) -> Sequence[FloatArray | None]:
        """Look at a product; return per matrix what the quantized model has in its place, None for the same.

        Shapes: as `MatrixPart.values`. Arrays of the product are valid during the call only.
        """
        ...
