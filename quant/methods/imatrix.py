"""Products as a calibration pass presents them, and the importance of input channels that is collected from them.

Importance is kept as llama.cpp's tools record it while a model reads a text. Two formats hold the same: GGUF files, and
the older `.dat`. For every matrix and input column it is the mean square of the column's inputs; a matrix per expert
has its own.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, ModelFileError
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.reader import GGUFFile, read_gguf
from localinfer.quant.gguf.writer import GGUFWriter, encode_value
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
        """Look at a product; return per matrix its values in the quantized model, None for the same.

        Shapes: as `MatrixPart.values`. Arrays of the product are valid during the call only.
        """
        ...


_AGAIN = "make it again with llama-imatrix"
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True)
class Importance:
    """An imatrix file. `mean_squares`: by tensor name, float32[experts, columns]; one expert where dense."""

    name: str
    mean_squares: Mapping[str, NDArray[np.float32]]
    dataset: str
    num_chunks: int

    def of(self, tensor: str, num_experts: int, columns: int) -> NDArray[np.float32] | None:
        """Importance of a tensor, float32[num_experts, columns]; None where the file has none for it.

        Raises: CorruptFileError if the file has numbers of another model.
        """
        found = self.mean_squares.get(tensor)
        if found is None:
            return None
        if found.size != num_experts * columns:
            raise CorruptFileError(
                f"{self.name} has {found.size} numbers for {tensor}, which needs {num_experts} x {columns}; wanted the "
                "imatrix of this very model"
            )
        return found.reshape(num_experts, columns)


class ImportanceVisitor:
    """A `ProductVisitor` that takes the mean squares of what the original model's matrices read."""

    def __init__(self) -> None:
        self._means: dict[str, dict[int, NDArray[np.float64]]] = {}

    def visit(self, product: LinearProduct) -> Sequence[FloatArray | None]:
        """Take the means of the product's inputs, 1 for an expert that no token reached."""
        x = product.original
        mean = np.einsum("tk,tk->k", x, x, dtype=np.float64) / len(x) if len(x) else np.ones(x.shape[1])
        for matrix in product.matrices:
            # Fused tensors are visited once for each of their parts, with the same input.
            self._means.setdefault(matrix.tensor, {})[matrix.expert] = mean
        return [None] * len(product.matrices)

    def importance(self, dataset: str, num_chunks: int) -> Importance:
        """The result, tensors in the order in which they were visited."""
        found: dict[str, FloatArray] = {}
        for name, means in self._means.items():
            assert sorted(means) == list(range(len(means))), f"{name}: every expert of a stack is visited"
            found[name] = np.stack([means[expert] for expert in range(len(means))]).astype(np.float32)
        return Importance(dataset, found, dataset, num_chunks)


def read_imatrix(path: str | os.PathLike[str]) -> Importance:
    """Read an imatrix file of either format.

    Raises: ModelFileError if it cannot be opened, CorruptFileError if it is damaged or no imatrix.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be opened: {error.strerror}; check the path") from error
    if start == b"GGUF":
        with read_gguf(path) as model:
            return _from_gguf(model)
    return _from_legacy(Path(path))


def write_imatrix(path: str | os.PathLike[str], importance: Importance, chunk_size: int) -> None:
    """Write importance as GGUF, as llama.cpp's tools read it; the file appears when it is whole.

    chunk_size: tokens of each of the text's `importance.num_chunks` sequences.
    Raises: RequestError where the system refuses.
    """
    metadata = {
        "general.type": encode_value("imatrix"),
        "imatrix.datasets": encode_value([importance.dataset]),
        "imatrix.chunk_count": encode_value(importance.num_chunks),
        "imatrix.chunk_size": encode_value(chunk_size),
    }
    specs, arrays = [], []
    for name, squares in importance.mean_squares.items():
        specs.append(TensorRecord(name + _SUMS, TensorType.F32, squares.shape))
        specs.append(TensorRecord(name + _COUNTS, TensorType.F32, (len(squares), 1)))
        count = np.float32(max(1, importance.num_chunks * chunk_size))
        arrays += [np.ascontiguousarray(squares * count), np.full((len(squares), 1), count, np.float32)]
    with GGUFWriter(path, metadata, specs) as writer:
        for array in arrays:
            writer.write(array)


def _from_gguf(file: GGUFFile) -> Importance:
    name = file.path.name
    if file.metadata.string("general.type", "") != "imatrix":
        raise CorruptFileError(f"{name} is a GGUF file but no imatrix (its general.type); wanted one: {_AGAIN}")
    found = {}
    for tensor in file.tensors:
        if not tensor.endswith(_SUMS):
            continue
        weight = tensor.removesuffix(_SUMS)
        sums, counts = _numbers(file, tensor), _numbers(file, weight + _COUNTS).reshape(-1, 1)
        if sums.size % counts.size:
            raise CorruptFileError(f"{name} has {sums.size} sums of {weight} for {counts.size} experts; {_AGAIN}")
        sums = sums.reshape(len(counts), -1)
        mean = np.divide(sums, counts, out=np.ones_like(sums), where=counts > 0)
        found[weight] = _checked(mean, weight, name)
    if not found:
        raise CorruptFileError(f"{name} holds no importance; {_AGAIN}")
    datasets = file.metadata.strings("imatrix.datasets") if "imatrix.datasets" in file.metadata else []
    return Importance(name, found, ", ".join(datasets), file.metadata.integer("imatrix.chunk_count", 0))


def _numbers(file: GGUFFile, tensor: str) -> NDArray[np.float32]:
    info = file.tensor(tensor)
    if info.type is not TensorType.F32:
        raise CorruptFileError(f"{file.path.name}: {tensor} is {info.type.name}; wanted F32: {_AGAIN}")
    return file.tensor_bytes(tensor).view(np.float32).copy()


def _from_legacy(path: Path) -> Importance:
    """Entries of int32 name length, name, int32 calls, int32 numbers, float32 sums; then chunks and the text's name."""
    raw = path.read_bytes()
    position = 0

    def fail() -> NoReturn:
        raise CorruptFileError(f"{path.name} is no imatrix file, or a damaged one; {_AGAIN}")

    def take(size: int) -> bytes:
        nonlocal position
        if not 0 <= size <= len(raw) - position:
            fail()
        position += size
        return raw[position - size : position]

    def integer() -> int:
        return int(struct.unpack("<i", take(4))[0])

    num_entries = integer()
    if num_entries < 1:
        fail()
    found = {}
    for _ in range(num_entries):
        try:
            name = take(integer()).decode()
        except UnicodeDecodeError:
            fail()
        calls, size = integer(), integer()
        sums = np.frombuffer(take(4 * size if size > 0 else -1), "<f4")
        mean = sums / np.float32(calls) if calls > 0 else sums
        found[name] = _checked(mean.reshape(1, -1).astype(np.float32), name, path.name)
    num_chunks, dataset = 0, ""
    if position < len(raw):
        num_chunks = integer()
        dataset = take(integer()).decode(errors="replace")
    return Importance(path.name, found, dataset, num_chunks)


def _checked(mean: NDArray[np.float32], weight: str, file: str) -> NDArray[np.float32]:
    if not (np.isfinite(mean).all() and (mean >= 0).all()):
        raise CorruptFileError(f"{file} holds negative numbers, infinity or NaN for {weight}; {_AGAIN}")
    return mean
