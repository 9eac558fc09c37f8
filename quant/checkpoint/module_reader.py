"""The interface of the readers of quantization methods: a module's tensors, checked, its matrix, and unused tensors."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.formats.reference_encoders import quantize
from localinfer.quant.formats.types import TensorType, bfloat16_values, block_dtype, block_size, row_bytes, unpack_bits
from localinfer.types import FloatArray

AGAIN = "Download the checkpoint again, or another one"

FP8_DTYPES = ("F8_E4M3", "F8_E5M2")
_FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")


def span_of(rows: NDArray[np.intp]) -> slice | NDArray[np.intp]:
    """Return rows that follow each other as a slice, which NumPy takes without a copy, and others as they are."""
    is_span = len(rows) > 0 and int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return slice(int(rows[0]), int(rows[-1]) + 1) if is_span else rows


def unpack_words(words: NDArray[np.int32] | NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Split 32-bit words into codes of 2 to 8 bits, lowest first, without a gap between words.

    Shapes: [n, words] to uint8[n, words * 32 // bits], or of bytes alike.
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    if bits == 4:
        halves = np.empty((*data.shape, 2), np.uint8)
        np.bitwise_and(data, 15, out=halves[..., 0])
        np.right_shift(data, 4, out=halves[..., 1])
        return halves.reshape(len(words), -1)
    if 8 % bits == 0:
        return unpack_bits(data, bits, 1)
    # A code may lie in two bytes. One more byte stands behind the last, for codes that end with it.
    count = data.shape[1] * 8 // bits
    starts = np.arange(count) * bits
    padded = np.pad(data, ((0, 0), (0, 1)))
    pairs = padded[:, starts // 8].astype(np.uint16) | padded[:, starts // 8 + 1].astype(np.uint16) << np.uint16(8)
    return (pairs >> (starts % 8).astype(np.uint16) & np.uint16((1 << bits) - 1)).astype(np.uint8)


def unpack_padded_words(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Split words that hold 32 // bits whole codes each, lowest first, their upper bits unused."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    codes: NDArray[np.uint32] = unsigned[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), -1).astype(np.uint8)


def words_of(folder: CheckpointFolder, name: str, dimensions: int) -> NDArray[np.int32]:
    """Return a tensor of 32-bit words. Raises: CorruptFileError if it is missing or of another type."""
    tensor = folder.tensor(name)
    if tensor.dtype not in ("I32", "U32") or len(tensor.shape) != dimensions:
        raise wrong_type(folder, name, f"I32 of {dimensions} dimensions")
    array: NDArray[np.int32] = folder.array(name).view(np.int32)
    return array


def bytes_of(folder: CheckpointFolder, name: str, dtypes: tuple[str, ...]) -> NDArray[np.uint8]:
    """Return a matrix of one byte per element as uint8[rows, columns], of any meaning of a byte.

    Raises: CorruptFileError if it is missing or of none of these types.
    """
    tensor = folder.tensor(name)
    if tensor.dtype not in dtypes or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise wrong_type(folder, name, f"a matrix of {' or '.join(dtypes)}")
    return folder.tensor_bytes(name).reshape(tensor.shape)


def scales_of(folder: CheckpointFolder, name: str) -> NDArray[np.float32]:
    """Return a matrix of scales as float32. Raises: CorruptFileError if it is missing or of another type."""
    tensor = folder.tensor(name)
    if tensor.dtype not in _FLOAT_DTYPES or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise wrong_type(folder, name, f"a matrix of {', '.join(_FLOAT_DTYPES)}")
    return floats_of(folder, name)


def floats_of(folder: CheckpointFolder, name: str) -> NDArray[np.float32]:
    """Return a tensor of plain numbers as float32, in its own shape.

    Raises: CorruptFileError if it is missing or of another type, or has no elements.
    """
    tensor = folder.tensor(name)
    if tensor.dtype not in _FLOAT_DTYPES or 0 in tensor.shape:
        raise wrong_type(folder, name, ", ".join(_FLOAT_DTYPES))
    array: NDArray[Any] = folder.array(name)
    return bfloat16_values(array) if tensor.dtype == "BF16" else array.astype(np.float32)


def scalar_of(folder: CheckpointFolder, name: str) -> float:
    """Return the one number that a tensor holds. Raises: CorruptFileError if it is not one finite number."""
    values = floats_of(folder, name).reshape(-1)
    if values.size != 1 or not np.isfinite(values).all():
        raise CorruptFileError(f"{name} is {values[:4].tolist()}; wanted one finite number. {AGAIN}")
    return float(values[0])


def sizes_of(folder: CheckpointFolder, name: str) -> tuple[int, int]:
    """Return the rows and columns that a tensor holds. Raises: CorruptFileError if it is missing or holds others."""
    shape = folder.array(name).reshape(-1)
    if shape.dtype.kind not in "iu" or shape.size != 2 or not (shape > 0).all() or (shape >= 1 << 31).any():
        raise CorruptFileError(f"{name} is {shape.tolist()!r:.60}; wanted rows and columns. {AGAIN}")
    return int(shape[0]), int(shape[1])


def group_numbers(folder: CheckpointFolder, name: str, regular: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return int32[columns]: the group of each column by a checkpoint's tensor, or `regular` where it has none.

    Raises: CorruptFileError if the tensor is of another type or size.
    """
    if name not in folder.tensors:
        return regular
    groups = words_of(folder, name, 1)
    if groups.shape != regular.shape:
        raise wrong_shape(name, groups.shape, regular.shape)
    return np.array(groups)


def even_groups(num_columns: int, num_groups: int, group_size: int) -> NDArray[np.int32]:
    """int32[columns]: the group of each column where groups are runs of `group_size` columns, the last perhaps less."""
    assert num_groups > 0 and -(-num_columns // group_size) == num_groups, "the caller has checked the groups"
    return (np.arange(num_columns) // group_size).astype(np.int32)


def fp8_values(dtype: str) -> FloatArray:
    """Return float32[256]: the numbers of the bytes of F8_E4M3 (finite numbers and two NaN) or F8_E5M2.

    Source: FP8 Formats for Deep Learning (arXiv 2209.05433), table 1.
    """
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if dtype == "F8_E4M3" else (5, 2, 15)
    codes = np.arange(256)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    values = np.where(exponent == 0, np.ldexp(mantissa, 1 - bias), np.ldexp(1 + mantissa, exponent - bias))
    if dtype == "F8_E4M3":
        values[codes & 127 == 127] = np.nan
    else:
        special = exponent == (1 << exponent_bits) - 1
        values[special] = np.where(mantissa[special] == 0, np.inf, np.nan)
    return np.where(codes >= 128, -values, values).astype(np.float32)


def exponent_values(codes: NDArray[np.uint8], name: str) -> FloatArray:
    """Return the powers of two that bytes of E8M0 stand for, as float32.

    Source: OCP Microscaling Formats 1.0, section 5.4.1. Raises: CorruptFileError for the byte that is no number.
    """
    if (codes == 255).any():
        raise CorruptFileError(f"{name}: a scale is NaN (the byte 255). {AGAIN}")
    return np.ldexp(np.float32(1), codes.astype(np.int32) - 127).astype(np.float32)


def wrong_type(folder: CheckpointFolder, name: str, wanted: str) -> CorruptFileError:
    """An error, to be raised by the caller, for a tensor of another type or number of dimensions."""
    tensor = folder.tensor(name)
    return CorruptFileError(f"{name} is {tensor.dtype} of shape {tensor.shape}; wanted {wanted}. {AGAIN}")


def wrong_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...], why: str = "") -> CorruptFileError:
    """An error, to be raised by the caller, for tensors that do not fit each other."""
    return CorruptFileError(f"{name} has shape {found}; wanted {wanted}{why}, to fit its neighbours. {AGAIN}")


RowReader = Callable[[NDArray[np.intp]], FloatArray]
CodeReader = Callable[[NDArray[np.intp]], NDArray[np.uint8]]
"""uint8[n, columns], a code for each weight of n row numbers."""

WEIGHTS_PER_CHUNK = 1 << 20
"""Weights unpacked at a time, so that what is in flight takes a few MiB however large the matrix."""

_SMALLEST_REACH, _LARGEST_REACH = 2.0**-9, 2.0**21
_LARGEST_FLOAT16, _TINY = 65504.0, 1e-36
_ROUNDINGS = {
    TensorType.Q8_0: "weights are rounded, by 0.4 % of the largest of 32 neighbours at most",
    TensorType.BF16: "weights are rounded to bfloat16, within 0.4 % of each",
}


@dataclass(frozen=True)
class StoredMatrix(ABC):
    """A matrix [rows, columns] of a checkpoint, read row by row by the last field of its class, `read`."""

    name: str
    """The module's."""
    by_row: ClassVar[tuple[str, ...]] = ()
    """Fields of arrays with an entry for each row."""
    own_change: ClassVar[str] = ""
    """As `change`, in the type that the method's codes have in GGUF."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The checkpoint's way of storing it, in a few words."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""

    @property
    def change(self) -> str:
        """The rounding of weights in `gguf_type`, empty where they stay exactly as they are."""
        return _ROUNDINGS.get(self.gguf_type(), self.own_change)

    def rows(self, order: NDArray[np.intp]) -> Self:
        """Return the matrix of these rows, in this order."""
        read = self._read
        changes: dict[str, Any] = {field: getattr(self, field)[order] for field in self.by_row}
        return replace(self, **changes, read=lambda rows: read(order[rows]))  # type: ignore[call-arg]

    @property
    def _read(self) -> Callable[[NDArray[np.intp]], NDArray[Any]]:
        read: Callable[[NDArray[np.intp]], NDArray[Any]] = vars(self)["read"]
        return read

    @abstractmethod
    def decode(self, rows: NDArray[np.intp]) -> FloatArray:
        """Return what `dequantize_rows` does, unchecked."""

    @abstractmethod
    def gguf_type(self) -> TensorType:
        """Return the smallest GGUF type that holds these weights, exactly if there is one."""

    def fields(self, rows: NDArray[np.intp], type: TensorType) -> Mapping[str, NDArray[Any]]:
        """Return the fields of blocks of some rows in a type; here weights are rounded to plain numbers or Q8_0."""
        values = self.dequantize_rows(rows)
        if type is TensorType.Q8_0:
            return _q8_0(values, self.name)
        return {"value": quantize(values, type).view(block_dtype(type)["value"])}

    def gguf_bytes(self, type: TensorType) -> NDArray[np.uint8]:
        """Return the matrix in blocks of what `gguf_type` gave, or of what `common_type` did.

        Raises: CorruptFileError if a weight is infinite, NaN or beyond what the type holds.
        """
        result = np.empty((self.shape[0], row_bytes(type, self.shape[1])), np.uint8)
        blocks = result.view(block_dtype(type))
        for rows in self.chunks():
            part = blocks[span_of(rows)]
            for field, values in self.fields(rows, type).items():
                part[field] = values.reshape(part[field].shape)
        return result.reshape(-1)

    def dequantize_rows(self, rows: NDArray[np.intp]) -> FloatArray:
        """Return float32[n, columns]: the weights of n rows, each rounded once.

        Raises: CorruptFileError if a weight is infinite or NaN.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.decode(rows)
        if not np.isfinite(values).all():
            raise CorruptFileError(f"{self.name}: a weight is infinite or NaN. {AGAIN}")
        return values

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

    stored_as: str
    """The description."""
    dimensions: tuple[int, int]
    """The shape."""
    read: RowReader
    """float32[n, columns] of n row numbers."""
    reach: float
    """No weight is much larger."""

    @property
    def description(self) -> str:
        return self.stored_as

    @property
    def shape(self) -> tuple[int, int]:
        return self.dimensions

    def rows(self, order: NDArray[np.intp]) -> Self:
        return replace(super().rows(order), dimensions=(len(order), self.dimensions[1]))

    def decode(self, rows: NDArray[np.intp]) -> FloatArray:
        return self.read(rows)

    def gguf_type(self) -> TensorType:
        """Return Q8_0, or BF16 for what Q8_0 does not hold well."""
        fits = self.dimensions[1] % 32 == 0 and _SMALLEST_REACH <= self.reach <= _LARGEST_REACH
        return TensorType.Q8_0 if fits else TensorType.BF16


def _q8_0(values: FloatArray, name: str) -> dict[str, NDArray[Any]]:
    """Fields of Q8_0, within rounding of what the encoder writes, in half of its time."""
    rows = values.reshape(-1, block_size(TensorType.Q8_0))
    scale = np.maximum(rows.max(axis=1), -rows.min(axis=1)) / np.float32(127)
    if scale.max(initial=0.0) > _LARGEST_FLOAT16:
        raise CorruptFileError(f"{name}: weights reach {127 * scale.max():.4g}; wanted what Q8_0 can hold. {AGAIN}")
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > _TINY)
    return {"d": scale, "qs": np.rint(rows * inverse[:, None])}


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

    runs_as: the layout's or type's name; change: the rounding of weights, empty where they stay as they are.
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

    leaves: names of the tensors that together are a module's weight; usually the first holds its codes. notices:
    remarks about the whole checkpoint.
    """

    leaves: tuple[str, ...]
    notices: Sequence[str] = ()

    def __init__(self, folder: CheckpointFolder, settings: Mapping[str, Any]) -> None:
        """settings: of the method, as the checkpoint states them."""
        self._folder = folder

    def split_name(self, name: str) -> tuple[str, str]:
        """Return a tensor's module, and the tensor's name in it."""
        module, _, leaf = name.rpartition(".")
        return module, leaf

    def codes_leaf(self, module: str) -> str | None:
        """Return the name of the tensor of a module with its codes, None for a module of plain numbers."""
        return self.leaves[0] if f"{module}.{self.leaves[0]}" in self._folder.tensors else None

    def is_unused(self, name: str) -> bool:
        """True if a tensor changes nothing here; `notices` say so."""
        return False

    def shape(self, module: str) -> tuple[int, int]:
        """Return the rows and columns of a module's weight."""
        return self.matrix(module).shape

    @abstractmethod
    def matrix(self, module: str) -> StoredMatrix:
        """Return a module's weight. Raises: CorruptFileError if its tensors do not fit each other or the settings."""


def left_aside(names: Iterable[str], settings: Mapping[str, Any] | None) -> tuple[set[str], list[str]]:
    """Return the tensors of a checkpoint that describe activations and a KV cache, and remarks about them.

    settings: of the checkpoint's quantization; without them it has no such tensors.

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
