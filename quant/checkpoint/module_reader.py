"""What the reader of each quantization method offers, and the tensors of checkpoints that no method of ours uses."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.module_tensors import AGAIN
from localinfer.quant.formats.reference import quantize
from localinfer.quant.formats.types import TensorType, block_dtype, block_size, row_bytes
from localinfer.types import FloatArray

RowReader = Callable[[NDArray[np.intp]], FloatArray]

WEIGHTS_PER_CHUNK = 1 << 20
"""Weights unpacked at a time, so that what is in flight takes a few MiB however large the matrix."""

_SMALLEST_REACH, _LARGEST_REACH = 2.0**-9, 2.0**21
_LARGEST_FLOAT16, _TINY = 65504.0, 1e-36
ROUNDED = "weights are rounded, by 0.4 % of the largest of 32 neighbours at most"
TO_BFLOAT16 = "weights are rounded to bfloat16, within 0.4 % of each"


class StoredMatrix(ABC):
    """A matrix [rows, columns] of a checkpoint, read row by row; `name` is the module's."""

    name: str

    @property
    @abstractmethod
    def description(self) -> str:
        """How the checkpoint stores it, in a few words."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    @abstractmethod
    def change(self) -> str:
        """What becomes of the weights in `gguf_type`, empty where they stay exactly as they are."""

    @abstractmethod
    def rows(self, order: NDArray[np.intp]) -> Self:
        """Return the matrix of these rows, in this order."""

    @abstractmethod
    def dequantize_rows(self, rows: NDArray[np.intp]) -> FloatArray:
        """Return float32[n, columns]: the weights of n rows, each rounded once."""

    @abstractmethod
    def gguf_type(self) -> TensorType:
        """Return the smallest GGUF type that holds these weights, exactly if there is one."""

    @abstractmethod
    def gguf_bytes(self, type: TensorType) -> NDArray[np.uint8]:
        """Return the matrix in blocks of what `gguf_type` gave, or of what `common_type` did."""

    def dequantize(self) -> FloatArray:
        """Return float32[rows, columns]."""
        values = np.empty(self.shape, np.float32)
        for rows in self.chunks():
            values[rows] = self.dequantize_rows(rows)
        return values

    def chunks(self) -> list[NDArray[np.intp]]:
        """All row numbers, a few MiB of weights at a time."""
        num_rows, num_columns = self.shape
        step = max(8, WEIGHTS_PER_CHUNK // num_columns // 8 * 8)
        return [np.arange(first, min(first + step, num_rows)) for first in range(0, num_rows, step)]


@dataclass(frozen=True)
class DecodedMatrix(StoredMatrix):
    """A matrix whose weights are computed as numbers, because no block type has its codes.

    Q8_0 holds such weights within a normalized squared error of 1e-4; where its float16 scales cannot, or 32 does not
    divide the columns, bfloat16 does.
    """

    name: str
    stored_as: str
    """The description."""
    dimensions: tuple[int, int]
    """The shape."""
    read_rows: RowReader
    """float32[n, columns] of n row numbers."""
    reach: float
    """No weight is much larger."""

    @property
    def description(self) -> str:
        """How the checkpoint stores it."""
        return self.stored_as

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.dimensions

    @property
    def change(self) -> str:
        """What becomes of the weights."""
        return ROUNDED if self.gguf_type() is TensorType.Q8_0 else TO_BFLOAT16

    def rows(self, order: NDArray[np.intp]) -> "DecodedMatrix":
        """Return the matrix of these rows, in this order."""
        read = self.read_rows
        dimensions = len(order), self.dimensions[1]
        return replace(self, dimensions=dimensions, read_rows=lambda rows: read(order[rows]))

    def dequantize_rows(self, rows: NDArray[np.intp]) -> FloatArray:
        """Return float32[n, columns]. Raises: CorruptFileError if a weight is infinite or NaN."""
        return finite_weights(self.name, lambda: self.read_rows(rows))

    def gguf_type(self) -> TensorType:
        """Return Q8_0, or BF16 for what Q8_0 does not hold well."""
        fits = self.dimensions[1] % 32 == 0 and _SMALLEST_REACH <= self.reach <= _LARGEST_REACH
        return TensorType.Q8_0 if fits else TensorType.BF16

    def gguf_bytes(self, type: TensorType) -> NDArray[np.uint8]:
        """Return the matrix in blocks, each weight rounded once more than `dequantize` does."""
        return encode_rows(self, type)


def finite_weights(name: str, compute: Callable[[], FloatArray]) -> FloatArray:
    """Return what `compute` gives, without NumPy's warnings. Raises: CorruptFileError if it is infinite or NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = compute()
    if not np.isfinite(values).all():
        raise CorruptFileError(f"{name}: a weight is infinite or NaN. {AGAIN}")
    return values


def encode_rows(matrix: StoredMatrix, type: TensorType) -> NDArray[np.uint8]:
    """Round a matrix to Q8_0 or BF16.

    Raises: CorruptFileError if a weight is infinite, NaN or beyond what the type holds.
    """
    result = np.empty((matrix.shape[0], row_bytes(type, matrix.shape[1])), np.uint8)
    for rows in matrix.chunks():
        values = matrix.dequantize_rows(rows)
        blocks = _q8_0(values, matrix.name) if type is TensorType.Q8_0 else quantize(values, type)
        result[rows] = blocks.reshape(len(rows), -1)
    return result.reshape(-1)


def _q8_0(values: FloatArray, name: str) -> NDArray[np.uint8]:
    """Blocks of Q8_0, within rounding of what the encoder writes, in half of its time."""
    rows = values.reshape(-1, block_size(TensorType.Q8_0))
    scale = np.maximum(rows.max(axis=1), -rows.min(axis=1)) / np.float32(127)
    if scale.max(initial=0.0) > _LARGEST_FLOAT16:
        raise CorruptFileError(f"{name}: weights reach {127 * scale.max():.4g}; wanted what Q8_0 can hold. {AGAIN}")
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > _TINY)
    blocks = np.empty(len(rows), block_dtype(TensorType.Q8_0))
    blocks["d"] = scale
    blocks["qs"] = np.rint(rows * inverse[:, None])
    return blocks.view(np.uint8)


def common_type(matrices: Sequence[StoredMatrix]) -> TensorType:
    """Return the smallest GGUF type that holds all of some matrices (those of a stack of experts)."""
    types = {matrix.gguf_type() for matrix in matrices}
    if len(types) == 1:
        return types.pop()
    if types <= {TensorType.Q4_0, TensorType.Q5_0}:
        return TensorType.Q5_0
    if TensorType.F32 in types:
        return TensorType.F32
    return TensorType.BF16 if TensorType.BF16 in types else TensorType.Q8_0


@dataclass(frozen=True)
class StoredForm:
    """Matrices that a checkpoint stores alike and that run alike.

    runs_as: the layout's or type's name; change: what becomes of the weights, empty where they stay as they are.
    """

    description: str
    runs_as: str
    bits_per_weight: float
    change: str
    num_matrices: int = 1

    def __str__(self) -> str:
        matrices = "1 matrix" if self.num_matrices == 1 else f"{self.num_matrices} matrices"
        change = self.change or "every weight stays exactly the same"
        return f"{matrices} in {self.description}: {self.runs_as}, {self.bits_per_weight:g} bits per weight; {change}"


_ACTIVATION_LEAVES = frozenset(
    (
        *("input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "activation_scale"),
        *("output_scale", "output_zero_point", "act_scale", "input_scale_2"),
    )
)
_CACHE_LEAVES = frozenset(
    (
        *("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point", "q_zero_point", "prob_scale"),
        *("k_global_scale", "v_global_scale", "q_global_scale", "prob_output_scale", "kv_cache_scale"),
    )
)
_CACHE_SETTINGS = ("kv_cache_scheme", "kv_cache_quant_algo")
_PROJECTIONS_OF_THE_CACHE = ("k_proj", "v_proj", "qkv_proj")


class ModuleReader(ABC):
    """Reads the quantized modules of a checkpoint.

    leaves: names of the tensors that together are a module's weight; usually the first holds its codes. notices: what
    is to be said about the whole checkpoint.
    """

    leaves: tuple[str, ...]
    notices: Sequence[str] = ()

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder

    def split_name(self, name: str) -> tuple[str, str]:
        """Return a tensor's module, and what of it the tensor is."""
        module, _, leaf = name.rpartition(".")
        return module, leaf

    def codes_leaf(self, module: str) -> str | None:
        """Return which of a module's tensors holds its codes, None for a module of plain numbers."""
        return self.leaves[0] if f"{module}.{self.leaves[0]}" in self._folder.tensors else None

    def is_unused(self, name: str) -> bool:
        """Whether a tensor changes nothing here; `notices` say so."""
        return False

    @abstractmethod
    def shape(self, module: str) -> tuple[int, int]:
        """Rows and columns of a module's weight."""

    @abstractmethod
    def matrix(self, module: str) -> StoredMatrix:
        """Return a module's weight. Raises: CorruptFileError if its tensors do not fit each other or the settings."""


def left_aside(names: Iterable[str], settings: Mapping[str, Any] | None) -> tuple[set[str], list[str]]:
    """Return the tensors of a checkpoint that describe activations and a KV cache, and what is to be said about them.

    settings: how the checkpoint says it is quantized; without them it has no such tensors.

    Activations are rounded in blocks of 32 by scales of their own here, or not at all, and the KV cache has types of
    its own, so that none of these scales applies.
    """
    if settings is None:
        return set(), []
    kinds = {name: kind for name in names if (kind := _kind(name)) is not None}
    counts = Counter(kinds.values())
    notes = []
    if counts["activations"]:
        notes.append(
            f"{counts['activations']} scales of activations are left aside: activations run in this program's own "
            "arithmetic, int8 in blocks of 32 or float32"
        )
    wants_cache = any(settings.get(key) for key in _CACHE_SETTINGS)
    if counts["cache"] or wants_cache:
        found = f"{counts['cache']} scales" if counts["cache"] else "settings"
        notes.append(f"{found} of a quantized KV cache are left aside: the cache is stored as the option kv_type says")
    return set(kinds), notes


def _kind(name: str) -> str | None:
    module, _, leaf = name.rpartition(".")
    is_of_the_cache = leaf.startswith("output_") and module.endswith(_PROJECTIONS_OF_THE_CACHE)
    if leaf in _CACHE_LEAVES or is_of_the_cache:
        return "cache"
    return "activations" if leaf in _ACTIVATION_LEAVES else None
