"""The header of a safetensors file, proven against the file before anything is sized by it.

Read here, in place, instead of by the `safetensors` package: weights go from the map straight into the kernels' tiles
(the package copies, and NumPy has no bfloat16 for it to copy into), and what is wrong with a file must be said by name.
Source: the format's own description (https://github.com/huggingface/safetensors, README, "Format").
"""

import json
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, NoReturn, TypeGuard

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.quant.gguf.mapped_file import MappedFile

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1 << 17
MAX_VALUES = 12 * MAX_TENSORS
"""Of JSON in a header: a few bytes of text can be a hundred in memory, so they are counted before they are read."""
MAX_DIMENSIONS = 8
MAX_NAME_CHARACTERS = 1024

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes per element of the dtypes whose extent this version can check."""

_COUNTED = 1 << 20
_DAMAGED = "The file is damaged or incomplete: download it again"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor: its dtype as the file spells it, its shape, and its bytes from `start` up to `end` in the file.

    `part` numbers the files of a checkpoint from 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int
    part: int = 0


def read_header(file: MappedFile, part: int = 0) -> dict[str, StoredTensor]:
    """Return the tensors of one file, in the order of their bytes.

    Raises: CorruptFileError if the header contradicts itself, the format or the file's size; UnsupportedFormatError
        for a dtype of unknown size. Both name the file and the tensor.
    """
    header, data_start = _header(file)
    if len(header) > MAX_TENSORS:
        _fail(file, f"its header names {len(header)} tensors; wanted at most {MAX_TENSORS}")
    tensors = [_tensor(file, name, entry, data_start, part) for name, entry in header.items() if name != "__metadata__"]
    tensors.sort(key=lambda tensor: (tensor.start, tensor.end))
    reached = data_start
    for tensor in tensors:
        if tensor.start != reached:
            found = "overlaps the tensor before it" if tensor.start < reached else "leaves bytes before it unused"
            _fail(file, f"tensor {tensor.name[:80]!r} at byte {tensor.start} {found}, which ends at byte {reached}")
        reached = tensor.end
    if reached != file.num_bytes:
        _fail(file, f"its tensors end at byte {reached}, but the file at byte {file.num_bytes}")
    return {tensor.name: tensor for tensor in tensors}


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    if file.num_bytes < 8:
        _fail(file, f"it has {file.num_bytes} bytes; a safetensors file begins with 8 bytes of header length")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(file.num_bytes - 8, MAX_HEADER_BYTES):
        limit = min(file.num_bytes - 8, MAX_HEADER_BYTES)
        _fail(file, f"its header claims {length} bytes; wanted at most {limit}. Is it a safetensors file?")
    if (first := file.read(8, min(9, 8 + length))) != b"{":
        _fail(file, f"its header begins with {first!r}; wanted '{{'. Is it a safetensors file?")
    try:
        text = file.read(8, 8 + length).decode("utf-8")
        if num_values(text) > MAX_VALUES:
            _fail(file, f"its header holds {num_values(text)} values; wanted at most {MAX_VALUES}")
        header = json.loads(text, object_pairs_hook=_compact)
    except (ValueError, RecursionError) as error:
        _fail(file, f"its header is not sound JSON ({str(error)[:200]})")
    if not isinstance(header, dict):
        _fail(file, f"its header is that of one tensor, {header!r:.80}; wanted names of tensors with one for each")
    return header, 8 + length


def num_values(text: str) -> int:
    """A bound of how many values and containers a JSON text has; letters in its strings count too."""
    # In pieces, between which other threads run.
    starts = range(0, len(text), _COUNTED)
    return sum(text.count(sign, start, start + _COUNTED) for start in starts for sign in ",:[{")


class _Entry(NamedTuple):
    """What a header says of a tensor: a tuple takes a third of the memory of an object with these names."""

    data_offsets: object
    dtype: object
    shape: object


def _compact(pairs: list[tuple[str, Any]]) -> "dict[str, Any] | _Entry":
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"{repeated[:80]!r} stands there twice")
    return _Entry(**found) if found.keys() == set(_Entry._fields) else found


def _tensor(file: MappedFile, name: str, entry: object, data_start: int, part: int) -> StoredTensor:
    label = f"tensor {name[:80]!r}"
    if not name or len(name) > MAX_NAME_CHARACTERS:
        _fail(file, f"{label} has a name of {len(name)} characters; wanted 1 to {MAX_NAME_CHARACTERS}")
    if not name.isprintable():
        # Messages and lists show it as it is.
        _fail(file, f"{label} has characters in its name that cannot be printed")
    if not isinstance(entry, _Entry):
        _fail(file, f"{label} is {entry!r:.80}; wanted an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry.dtype, entry.shape, entry.data_offsets
    if not isinstance(dtype, str):
        _fail(file, f"{label} has dtype {dtype!r:.40}; wanted a name such as F16")
    if dtype not in DTYPE_BYTES:
        raise UnsupportedFormatError(
            f"{file.path.name}: {label} has dtype {dtype[:40]!r}; this version reads {', '.join(DTYPE_BYTES)}. "
            "Update localinfer or choose another copy of the model."
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMENSIONS:
        _fail(file, f"{label} has shape {shape!r:.80}; wanted at most {MAX_DIMENSIONS} whole numbers")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        _fail(file, f"{label} has data_offsets {offsets!r:.80}; wanted where its bytes begin and end")
    if data_start + offsets[1] > file.num_bytes:
        _fail(file, f"{label} ends at byte {data_start + offsets[1]}, but the file at byte {file.num_bytes}")
    wanted = prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != wanted:
        _fail(file, f"{label} has {offsets[1] - offsets[0]} bytes; {dtype} of shape {shape} takes {wanted}")
    return StoredTensor(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1], part)


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def _fail(file: MappedFile, found: str) -> NoReturn:
    raise CorruptFileError(f"{file.path.name}: {found}. {_DAMAGED}")
