"""Write a GGUF file as a stream: the header first, then tensor after tensor, in pieces of any size.

The file appears under its name when it is whole (`files.OutputFile`).
Source: the GGUF specification in the ggml repository (docs/gguf.md), version 3.
"""

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.quant.formats.types import TensorRecord
from localinfer.quant.gguf.header import (
    ALIGNMENTS,
    DEFAULT_ALIGNMENT,
    MAX_DIMENSIONS,
    MAX_TENSOR_NAME_BYTES,
    SCALAR_DTYPES,
    ValueType,
)
from localinfer.quant.gguf.reader import Metadata
from localinfer.system.files import OutputFile

_ARRAY_TYPES = {np.dtype(dtype): type for type, dtype in SCALAR_DTYPES.items() if type is not ValueType.BOOL}


@dataclass(frozen=True)
class EncodedValue:
    """A metadata value as the file holds it: its type's id, and for arrays the elements' type and number, then data."""

    data: bytes


def encode_value(value: object, type: ValueType | None = None) -> EncodedValue:
    """Encode a Python or NumPy value.

    type: of a number; by default uint32 or, where that cannot hold it, int64 or uint64 for an int, float32 for a float,
        bool for a bool. A list of numbers becomes int32 or float32, which readers expect; an array keeps its type.
    Raises: RequestError for anything else.
    """
    if isinstance(value, str | bytes):
        return EncodedValue(_id(ValueType.STRING) + _string(value))
    if isinstance(value, np.ndarray):
        return EncodedValue(_array(value))
    if isinstance(value, list | tuple) and all(isinstance(entry, str | bytes) for entry in value):
        head = _id(ValueType.ARRAY) + _id(ValueType.STRING) + struct.pack("<Q", len(value))
        return EncodedValue(head + b"".join(_string(entry) for entry in value))
    if isinstance(value, list | tuple):
        return EncodedValue(_array(_as_written(np.asarray(value))))
    if isinstance(value, bool | int | float | np.number | np.bool_):
        chosen = type if type is not None else _number_type(value)
        return EncodedValue(_id(chosen) + np.array(value).astype(SCALAR_DTYPES[chosen]).tobytes())
    raise RequestError(f"{value!r:.60} cannot be metadata; wanted a number, bool, text, or a list of one of these")


def copy_values(metadata: Mapping[str, object]) -> dict[str, EncodedValue]:
    """Encode all of a model's metadata; values of a GGUF file keep their bytes."""
    if not isinstance(metadata, Metadata):
        return {key: encode_value(value) for key, value in metadata.items()}
    values = {}
    for key in metadata:
        stored = metadata.stored(key)
        head = _id(stored.type)
        if stored.count is not None:
            head = _id(ValueType.ARRAY) + head + struct.pack("<Q", stored.count)
        values[key] = EncodedValue(head + metadata.value_bytes(key))
    return values


class GGUFWriter:
    """A GGUF file being written; use it as a context manager, and give it every tensor's bytes in order.

    Leaving the block without an error proves that all bytes were written, and gives the file its name.

    Raises: RequestError for names, shapes or amounts that make no file, and where the system refuses.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        metadata: Mapping[str, EncodedValue],
        tensors: Sequence[TensorRecord],
        *,
        alignment: int = DEFAULT_ALIGNMENT,
    ) -> None:
        self.path = Path(path)
        if alignment not in ALIGNMENTS:
            raise RequestError(f"the alignment is {alignment}; wanted a power of two from 8 to {ALIGNMENTS[-1]}")
        _check_tensors(tensors)
        values = {key: value for key, value in metadata.items() if key != "general.alignment"}
        if alignment != DEFAULT_ALIGNMENT:
            values["general.alignment"] = encode_value(alignment, ValueType.UINT32)
        self._tensors = list(tensors)
        self._alignment = alignment
        self._index = 0
        self._written = 0
        header = _header(values, self._tensors, alignment)
        self._header = header + bytes(-len(header) % alignment)
        self.num_bytes = len(self._header) + sum(_padded(tensor.num_bytes, alignment) for tensor in tensors)
        self._file = OutputFile(path)

    def write(self, data: NDArray[Any] | bytes) -> None:
        """Append bytes to the tensor that is not whole yet."""
        size = data.nbytes if isinstance(data, np.ndarray) else len(data)
        if self._index == len(self._tensors) or self._written + size > self._tensors[self._index].num_bytes:
            name = self._tensors[self._index].name if self._index < len(self._tensors) else "the last one"
            raise RequestError(f"{size} bytes are more than tensor {name} has left; give each tensor exactly its bytes")
        self._file.write(data.data if isinstance(data, np.ndarray) and data.flags.c_contiguous else bytes(data))
        self._written += size
        if self._written == self._tensors[self._index].num_bytes:
            self._file.write(bytes(_padded(self._written, self._alignment) - self._written))
            self._index, self._written = self._index + 1, 0

    def __enter__(self) -> Self:
        self._file.__enter__()
        try:
            self._file.write(self._header)
        except BaseException as error:
            self._file.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._index < len(self._tensors):
            name = self._tensors[self._index].name
            error = RequestError(f"tensor {name} got {self._written} bytes; give each tensor exactly its bytes")
            self._file.__exit__(type(error), error, None)
            raise error
        self._file.__exit__(kind, error, traceback)


def _check_tensors(tensors: Sequence[TensorRecord]) -> None:
    names = [tensor.name for tensor in tensors]
    for tensor in tensors:
        size = len(tensor.name.encode())
        if not 0 < size <= MAX_TENSOR_NAME_BYTES:
            raise RequestError(f"a tensor's name {tensor.name!r} has {size} bytes; wanted 1 to {MAX_TENSOR_NAME_BYTES}")
        if not 0 < len(tensor.shape) <= MAX_DIMENSIONS or min(tensor.shape) < 1:
            raise RequestError(f"tensor {tensor.name} has the shape {list(tensor.shape)}; wanted 1 to 4 sizes above 0")
        assert tensor.num_bytes > 0, "row_bytes checks that rows fill blocks"
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"tensor {twice} is given twice; names must differ")


def _header(values: Mapping[str, EncodedValue], tensors: Sequence[TensorRecord], alignment: int) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(values))]
    for key, value in values.items():
        parts += [_string(key), value.data]
    offset = 0
    for tensor in tensors:
        sizes = tuple(reversed(tensor.shape))
        parts.append(_string(tensor.name))
        parts.append(struct.pack(f"<I{len(sizes)}QiQ", len(sizes), *sizes, int(tensor.type), offset))
        offset += _padded(tensor.num_bytes, alignment)
    return b"".join(parts)


def _padded(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


def _id(type: ValueType) -> bytes:
    return struct.pack("<i", int(type))


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _number_type(value: Any) -> ValueType:
    if isinstance(value, bool | np.bool_):
        return ValueType.BOOL
    if isinstance(value, float | np.floating):
        return ValueType.FLOAT32
    if 0 <= value < 1 << 32:
        return ValueType.UINT32
    return ValueType.INT64 if -(1 << 63) <= value < 1 << 63 else ValueType.UINT64


def _as_written(values: NDArray[Any]) -> NDArray[Any]:
    """Python's numbers in the types that other programs write and read."""
    if values.dtype == np.float64:
        return values.astype(np.float32)
    fits = values.dtype == np.int64 and values.size and np.abs(values).max() < 1 << 31
    return values.astype(np.int32) if fits else values


def _array(values: NDArray[Any]) -> bytes:
    if values.dtype == np.bool_:
        type, raw = ValueType.BOOL, values.astype(np.uint8)
    else:
        found = _ARRAY_TYPES.get(values.dtype.newbyteorder("<"))
        if found is None:
            raise RequestError(
                f"an array of {values.dtype} cannot be metadata; wanted numbers of 1 to 8 bytes or bools"
            )
        type, raw = found, values.astype(values.dtype.newbyteorder("<"))
    if values.ndim != 1:
        raise RequestError(f"an array of shape {list(values.shape)} cannot be metadata; wanted one dimension")
    return _id(ValueType.ARRAY) + _id(type) + struct.pack("<Q", values.size) + raw.tobytes()
