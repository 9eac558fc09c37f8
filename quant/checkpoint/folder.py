"""Open a Hugging Face folder: its JSON files, and the tensors of its safetensors files, mapped read-only.

Only JSON, text and safetensors are ever read. Pickles (`.bin`, `.pt`, `.pth`) can run code when they are opened, so a
folder that holds nothing else is refused.

The header of a safetensors file is proven against the file before anything is sized by it. It is read here, in place,
instead of by the `safetensors` package: weights go from the map straight into the kernels' tiles (the package copies,
and NumPy has no bfloat16 for it to copy into), and a fault of a file must be told by name.
Source: the format's own description (https://github.com/huggingface/safetensors, README, "Format").
"""

import json
import os
import stat
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeGuard

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, ModelFileError, UnsupportedFormatError
from localinfer.quant.gguf.mapped_file import FileStretch, MappedFile, MappedFiles
from localinfer.system.pieces import parse_json

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 1 << 17
MAX_HEADER_VALUES = 12 * MAX_TENSORS
"""Of JSON in a header: a few bytes of text can be a hundred in memory, so they are counted before they are read."""
MAX_DIMENSIONS = 8
MAX_NAME_CHARACTERS = 1024

NUMPY_DTYPES = {
    "BOOL": "u1",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "BF16": "<u2",
    "F32": "<f4",
    "F64": "<f8",
}
"""NumPy type that holds each dtype's bits; bfloat16 has none of its own."""
DTYPE_BYTES = {name: np.dtype(kind).itemsize for name, kind in NUMPY_DTYPES.items()} | dict.fromkeys(
    ("F8_E4M3", "F8_E5M2", "F8_E8M0"), 1
)
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
        if num_values(text) > MAX_HEADER_VALUES:
            _fail(file, f"its header holds {num_values(text)} values; wanted at most {MAX_HEADER_VALUES}")
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
    """The entry of a tensor in a header: a tuple takes a third of the memory of an object with these names."""

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


MAX_CONFIG_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 256 << 20
TOKENIZER_NAME = "tokenizer.json"
MAX_VALUES = 1 << 19
"""Of JSON in files other than the tokenizer's: a few bytes of text can be a hundred in memory."""
MAX_TOKENIZER_VALUES = 1 << 23
"""Of JSON in tokenizer.json: some four times those of the largest, with 262,000 tokens and 514,000 merges as pairs."""
MAX_PARTS = 4096

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_AGAIN = "Download the folder again"


class CheckpointFolder(MappedFiles):
    """A model as Hugging Face lays it out, open until `close` (or the end of a `with` block).

    `tensors` has every tensor under the checkpoint's own names; each was checked against the size of its file.
    `config` is config.json. `num_bytes` is what the tensors' files take together.
    """

    def __init__(self, path: Path, config: dict[str, Any], files: list[MappedFile], tensors: dict[str, StoredTensor]):
        super().__init__(files)
        self.path = path
        self.config = config
        self.tensors = tensors
        self._beside: dict[str, StoredTensor] = {}

    def open_beside(self, name: str) -> dict[str, StoredTensor]:
        """Open one more safetensors file; its tensors, which are read by name too, are not among `tensors`.

        Raises: CorruptFileError, UnsupportedFormatError.
        """
        file = MappedFile(self.path / name)
        super().__init__((*self.files, file))
        self._beside = read_header(file, len(self.files) - 1)
        return self._beside

    def tensor(self, name: str) -> StoredTensor:
        """Return a tensor's record. Raises: CorruptFileError if the checkpoint lacks it."""
        found = self.tensors.get(name) or self._beside.get(name)
        if found is None:
            raise CorruptFileError(
                f"{self.path.name} has no tensor {name!r} among its {len(self.tensors)}; wanted a complete checkpoint. "
                f"{_AGAIN}"
            )
        return found

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[bytes of the tensor], a read-only view into the map."""
        tensor = self.tensor(name)
        return self.files[tensor.part].view(tensor.start, tensor.end)

    def stretch(self, name: str) -> FileStretch:
        """Return where a tensor's bytes lie."""
        tensor = self.tensor(name)
        return FileStretch(self.files[tensor.part], tensor.start, tensor.end)

    def array(self, name: str) -> NDArray[Any]:
        """Return a tensor in its own shape and NumPy type (bfloat16 as uint16), a view into the map where aligned.

        Raises: UnsupportedFormatError for the 8-bit float types.
        """
        tensor = self.tensor(name)
        dtype = NUMPY_DTYPES.get(tensor.dtype)
        if dtype is None:
            raise UnsupportedFormatError(
                f"{self.path.name}: tensor {name!r} is {tensor.dtype}, which this version does not run; wanted F16, "
                "BF16 or F32 weights, or a quantization_config that says how such bytes are scaled"
            )
        raw = self.tensor_bytes(name)
        if raw.ctypes.data % np.dtype(dtype).itemsize:
            raw = raw.copy()
        return raw.view(dtype).reshape(tensor.shape)

    def forget(self, name: str) -> None:
        """Let the system drop the memory behind a tensor's bytes; reading them again reads the file again."""
        tensor = self.tensor(name)
        self.files[tensor.part].forget(tensor.start, tensor.end)

    def json(self, name: str, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any] | None:
        """Return the object in one of the folder's JSON files, None where there is no such file."""
        text = self.text(name, max_bytes=max_bytes)
        return None if text is None else _parse(text, self.path / name)

    def text(self, name: str, *, max_bytes: int = MAX_CONFIG_BYTES) -> str | None:
        """Return one of the folder's text files, None where there is no such file."""
        path = self.path / name
        return _read_text(path, max_bytes) if path.exists() else None


def open_folder(path: str | os.PathLike[str]) -> CheckpointFolder:
    """Open the checkpoint in a folder: the files that its index names, or its only safetensors file.

    Raises: ModelFileError if there is no checkpoint, UnsupportedFormatError if it is of another kind (pickles, GGUF),
        CorruptFileError if a file is damaged or a part is missing.
    """
    folder = Path(path)
    config_path = folder / "config.json"
    weight_map = _weight_map(folder)
    if not config_path.exists() and (folder / "adapter_config.json").exists():
        raise UnsupportedFormatError(
            f"{folder} holds an adapter (LoRA), a change to a model's weights, not a model. Merge it into its base "
            "model (merge_and_unload and save_pretrained of peft), or choose a folder of the merged model"
        )
    if not config_path.exists():
        raise ModelFileError(f"{folder} has no config.json; wanted the whole folder of a model, not its weights alone")
    config = _parse(_read_text(config_path, MAX_CONFIG_BYTES), config_path)
    with ExitStack() as opened:
        files: list[MappedFile] = []
        tensors: dict[str, StoredTensor] = {}
        for part, (file_name, names) in enumerate(weight_map.items()):
            files.append(opened.enter_context(MappedFile(folder / file_name)))
            found = read_header(files[-1], part)
            missing = next((name for name in names or () if name not in found), None)
            if missing is not None:
                raise CorruptFileError(f"{file_name} lacks tensor {missing!r}, which the index puts there. {_AGAIN}")
            tensors |= found if names is None else {name: found[name] for name in names}
        model = CheckpointFolder(folder, config, files, tensors)
        opened.pop_all()
        return model


def _weight_map(folder: Path) -> dict[str, list[str] | None]:
    """Return the files to read and the tensors to take from each; None for all of them."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise ModelFileError(f"{folder} cannot be read: {error}") from error
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    chosen = "model.safetensors.index.json" if "model.safetensors.index.json" in indices else None
    if chosen is None and len(indices) == 1 and "model.safetensors" not in names:
        chosen = indices[0]
    if chosen is not None:
        return _indexed_files(folder, chosen)
    files = [name for name in names if name.endswith(".safetensors")]
    if "model.safetensors" in files:
        return {"model.safetensors": None}
    if len(files) == 1:
        return {files[0]: None}
    if files:
        raise CorruptFileError(
            f"{folder} holds {len(files)} safetensors files ({', '.join(files[:3])}) and no "
            f"model.safetensors.index.json that says which tensor is where. {_AGAIN}"
        )
    _refuse_folder(folder, names)
    return None


def _refuse_folder(folder: Path, names: list[str]) -> NoReturn:
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise UnsupportedFormatError(
            f"{folder} holds its weights as pickles only ({', '.join(pickles[:3])}), which can run any code when they "
            "are opened; localinfer never opens them. Wanted safetensors: download that version of the model, or save "
            "it again with safe_serialization=True"
        )
    gguf_files = [name for name in names if name.endswith(".gguf")]
    if gguf_files:
        raise ModelFileError(f"{folder} is a folder of GGUF files; pass one of them, such as {folder / gguf_files[0]}")
    raise ModelFileError(
        f"{folder} holds no safetensors file; wanted a GGUF file, or a folder with config.json and model.safetensors"
    )


def _indexed_files(folder: Path, index_name: str) -> dict[str, list[str] | None]:
    index = _parse(_read_text(folder / index_name, MAX_TOKENIZER_BYTES), folder / index_name)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFileError(
            f"{index_name} has weight_map {weight_map!r:.60}; wanted tensor names and files. {_AGAIN}"
        )
    files: dict[str, list[str] | None] = {}
    for tensor, file_name in weight_map.items():
        # The name comes from the file, so it may point anywhere: only plain names in this folder are followed.
        is_plain = isinstance(file_name, str) and file_name.endswith(".safetensors") and file_name[0] != "."
        if not is_plain or any(character in file_name for character in '/\\:\0"'):
            raise CorruptFileError(
                f"{index_name} puts tensor {tensor[:80]!r} into {file_name!r:.80}; wanted the plain name of a "
                f"safetensors file in the same folder. {_AGAIN}"
            )
        names = files.setdefault(file_name, [])
        assert names is not None, "lists were put there"
        names.append(tensor)
    if len(files) > MAX_PARTS:
        raise CorruptFileError(f"{index_name} names {len(files)} files; wanted at most {MAX_PARTS}. {_AGAIN}")
    missing = [name for name in sorted(files) if not (folder / name).exists()]
    if missing:
        named = ", ".join(repr(name)[1:-1] for name in missing[:3])
        raise ModelFileError(
            f"{folder} lacks {len(missing)} of the {len(files)} files its index names ({named}); "
            "download all of them into one folder"
        )
    return dict(sorted(files.items()))


def _read_text(path: Path, max_bytes: int) -> str:
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise ModelFileError(f"{path} is not a regular file; wanted a file of the model's folder")
        if found.st_size > max_bytes:
            raise CorruptFileError(f"{path.name} has {found.st_size} bytes; wanted at most {max_bytes}. {_AGAIN}")
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path.name} is not UTF-8 ({error.reason} at byte {error.start}). {_AGAIN}") from error
    except OSError as error:
        raise ModelFileError(f"{path} cannot be opened: {error}") from error


def check_num_values(text: str, name: str) -> None:
    """Refuse JSON that would take far more memory than its text. Raises: CorruptFileError naming the file."""
    most = MAX_TOKENIZER_VALUES if name == TOKENIZER_NAME else MAX_VALUES
    if (count := num_values(text)) > most:
        raise CorruptFileError(f"{name} holds {count} values; wanted at most {most}. {_AGAIN}")


def _parse(text: str, path: Path) -> dict[str, Any]:
    check_num_values(text, path.name)
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path.name} is not sound JSON ({str(error)[:200]}). {_AGAIN}") from error
    if not isinstance(value, dict):
        raise CorruptFileError(f"{path.name} holds {value!r:.60}; wanted an object. {_AGAIN}")
    return value
