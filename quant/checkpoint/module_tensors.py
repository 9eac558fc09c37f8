"""The tensors of a quantized module, read from a folder with every check of type and shape; words split into codes."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError
from localinfer.quant.checkpoint.folder import CheckpointFolder
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
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes: NDArray[np.uint8] = data[..., None] >> shifts & np.uint8((1 << bits) - 1)
        return codes.reshape(len(words), -1)
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
    """Return a matrix of one byte per element as uint8[rows, columns], whatever a byte stands for.

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
    if tensor.dtype == "BF16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return array.astype(np.float32)


def scalar_of(folder: CheckpointFolder, name: str) -> float:
    """Return the one number that a tensor holds. Raises: CorruptFileError if it is not one finite number."""
    values = floats_of(folder, name).reshape(-1)
    if values.size != 1 or not np.isfinite(values).all():
        raise CorruptFileError(f"{name} is {values[:4].tolist()}; wanted one finite number. {AGAIN}")
    return float(values[0])


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
    """Return float32[256]: what each byte of F8_E4M3 (finite numbers and two NaN) or F8_E5M2 stands for.

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
