"""A model whose rows and columns are multiplied by factors as they are read; everything else is the model itself."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError, TokenizerError
from localinfer.quant.checkpoint.grouped import GroupedMatrix
from localinfer.quant.checkpoint.model_file import ModelFile, TensorRecord, read_stretch
from localinfer.quant.formats.reference import dequantize
from localinfer.quant.formats.types import TensorType
from localinfer.quant.gguf.mapped_file import FileStretch

Factors = NDArray[np.float64]


@dataclass(frozen=True)
class TensorFactors:
    """What a tensor is multiplied by; None is 1.

    Shapes: rows float64[rows], or float64[matrices, rows] where every matrix of a stack has its own; columns alike. A
    vector has columns only, and float64[experts, columns] fit one vector per expert.
    """

    rows: Factors | None = None
    columns: Factors | None = None

    def apply(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Multiply a tensor, rounding once. Raises: ShapeError if the factors are not those of its shape."""
        factor: Factors | float = 1.0
        try:
            if self.rows is not None:
                factor = factor * np.broadcast_to(self.rows, values.shape[:-1])[..., None]
            if self.columns is not None:
                is_stack = self.columns.ndim == 2 and values.ndim == 3
                factor = factor * np.broadcast_to(self.columns[:, None] if is_stack else self.columns, values.shape)
        except ValueError as error:
            raise ShapeError(f"got factors for another shape than {list(values.shape)}: {error}") from error
        return np.asarray(values * factor, dtype=np.float32)

    def __mul__(self, other: "TensorFactors") -> "TensorFactors":
        """Both, one after the other."""
        return TensorFactors(_product(self.rows, other.rows), _product(self.columns, other.columns))


@dataclass(frozen=True)
class _ScaledTensor:
    """A tensor that is made when it is read: float32, so that scaling rounds nothing away."""

    name: str
    shape: tuple[int, ...]
    type: TensorType = TensorType.F32

    @property
    def num_bytes(self) -> int:
        return 4 * prod(self.shape)


class ScaledModel:
    """A `ModelFile` with some tensors multiplied by factors, those as F32. Closing it closes the model."""

    def __init__(self, model: ModelFile, factors: Mapping[str, TensorFactors]) -> None:
        self._model = model
        self._factors = dict(factors)
        # Stacks of experts are read matrix by matrix, but scaled whole.
        self._last: tuple[str, NDArray[np.uint8]] | None = None
        self.path: Path = model.path
        self.paths: tuple[Path, ...] = model.paths
        self.num_bytes: int = model.num_bytes
        self.metadata: Mapping[str, object] = model.metadata
        self.tokenizer_error: TokenizerError | None = model.tokenizer_error
        self.tensors: Mapping[str, TensorRecord] = {
            name: _ScaledTensor(name, record.shape) if name in factors else record
            for name, record in model.tensors.items()
        }

    def tensor(self, name: str) -> TensorRecord:
        """Return a tensor's record. Raises: CorruptFileError if the model lacks it."""
        return self.tensors[name] if name in self._factors else self._model.tensor(name)

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[num_bytes]. Raises: ShapeError if a tensor's factors are not those of its shape."""
        if name not in self._factors:
            return self._model.tensor_bytes(name)
        if self._last is None or self._last[0] != name:
            record = self._model.tensor(name)
            values = dequantize(read_stretch(self._model, name, 0, record.num_bytes), record.type, record.shape)
            self._last = (name, self._factors[name].apply(values).reshape(-1).view(np.uint8))
        return self._last[1]

    def grouped(self, name: str) -> tuple[GroupedMatrix, ...] | None:
        """Return a checkpoint's codes; None for what has none, and for what is scaled."""
        return None if name in self._factors else self._model.grouped(name)

    def stretch(self, name: str) -> FileStretch | None:
        """Return where a tensor's bytes lie; None for what is scaled."""
        return None if name in self._factors else self._model.stretch(name)

    @property
    def has_changed(self) -> bool:
        """Whether a file of the model was written since it was opened, or another one has its name."""
        return self._model.has_changed

    def forget(self, name: str, first: int, end: int) -> None:
        """Let the system drop the memory behind some bytes; a scaled tensor's source is dropped whole."""
        record = self._model.tensor(name)
        if name not in self._factors:
            self._model.forget(name, first, end)
        elif end >= self.tensors[name].num_bytes:
            self._last = None
            self._model.forget(name, 0, record.num_bytes)

    def close(self) -> None:
        """Refuse further access. Safe to call twice."""
        self._last = None
        self._model.close()


def _product(first: Factors | None, second: Factors | None) -> Factors | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second
