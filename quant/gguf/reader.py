"""Open a GGUF model: one file or all parts of a split one, mapped read-only and proven sound."""

import os
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, ModelFileError, TokenizerError
from localinfer.quant.gguf.header import GGUFHeader, TensorInfo, read_header
from localinfer.quant.gguf.mapped_file import FileStretch, MappedFile, MappedFiles
from localinfer.quant.gguf.metadata import Metadata, MetadataValue, SingleValue

__all__ = ["GGUFFile", "Metadata", "MetadataValue", "TensorInfo", "read_gguf"]

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
# Keys that rightly differ between the parts of one model.
_PER_PART_KEYS = {"split.no", "general.alignment", "GGUF.tensor_count", "GGUF.kv_count"}


class GGUFFile(MappedFiles):
    """A GGUF model, open until `close` (or the end of a `with` block).

    `metadata` comes from the first part, `tensors` from all; both were checked against the files'
    sizes, so kernels may trust every shape and extent. `path` is the first part's.
    """

    tokenizer_error: TokenizerError | None = None

    def __init__(self, files: list[MappedFile], headers: list[GGUFHeader]) -> None:
        super().__init__(files)
        self.path = self.paths[0]
        self.version = headers[0].version
        self.alignment = headers[0].alignment
        self.metadata = Metadata(files[0], headers[0].values)
        self.tensors = {
            name: replace(info, part=part) if part else info
            for part, header in enumerate(headers)
            for name, info in header.tensors.items()
        }

    def replace_metadata(self, values: Mapping[str, SingleValue]) -> None:
        """Go on as if the file held these values; it is left as it is."""
        self.metadata = self.metadata.with_values(values)

    def tensor(self, name: str) -> TensorInfo:
        """Return a tensor's record. Raises: CorruptFileError if the model lacks it."""
        if name not in self.tensors:
            raise CorruptFileError(
                f"{self.path.name} has no tensor {name!r} (it has {len(self.tensors)} tensors); "
                "wanted a complete model of this architecture: convert it again"
            )
        return self.tensors[name]

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[num_bytes], a read-only view into the map: nothing is copied.

        The view keeps its map alive after `close`. Raises: CorruptFileError if the tensor is
        missing or its file was changed since it was opened, ClosedError after `close`.
        """
        info = self.tensor(name)
        return self.files[info.part].view(info.offset, info.offset + info.num_bytes)

    def stretch(self, name: str) -> FileStretch:
        """Return where a tensor's bytes lie. Raises: CorruptFileError if the model lacks it."""
        info = self.tensor(name)
        return FileStretch(self.files[info.part], info.offset, info.offset + info.num_bytes)

    def grouped(self, name: str) -> None:
        """Return None: GGUF keeps every weight in blocks, unlike the checkpoints that `ModelFile` also stands for."""

    def forget(self, name: str, first: int, end: int) -> None:
        """Let the system drop bytes first..end of a tensor from memory, once they have been packed."""
        info = self.tensor(name)
        assert 0 <= first <= end <= info.num_bytes, "a stretch of the tensor"
        self.files[info.part].forget(info.offset + first, info.offset + end)


def read_gguf(path: str | os.PathLike[str], check: Callable[[], None] | None = None) -> GGUFFile:
    """Open the GGUF model at `path`; any part of a split model opens all of them.

    check: called every few milliseconds; what it raises ends the reading.
    Raises: ModelFileError if a file cannot be opened, CorruptFileError or UnsupportedFormatError
        if a file is not sound GGUF, naming the key, tensor or part at fault.
    """
    with ExitStack() as opened:
        first = opened.enter_context(MappedFile(path))
        header = read_header(first, check)
        count = _split_number(first, header, "split.count")
        files, headers = _read_parts(first, header, count, opened) if count > 1 else ([first], [header])
        model = GGUFFile(files, headers)
        opened.pop_all()
        return model


def _read_parts(
    given: MappedFile, header: GGUFHeader, count: int, opened: ExitStack
) -> tuple[list[MappedFile], list[GGUFHeader]]:
    """Open every part of the model that `given` is one of, to be closed by `opened`; return them in order."""
    given_path = given.path
    match = _PART_NAME.fullmatch(given_path.name)
    number = _split_number(given, header, "split.no")
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count):
        raise CorruptFileError(
            f"{given_path.name} holds part {number + 1} of {count}; wanted it to be named "
            f"NAME-{number + 1:05}-of-{count:05}.gguf, as the other parts are found by their names"
        )
    paths = [given_path.with_name(f"{match['stem']}-{index + 1:05}-of-{count:05}.gguf") for index in range(count)]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise ModelFileError(
            f"{given_path.name} is one of {count} parts, but {', '.join(missing[:3])}"
            f"{' and more' if len(missing) > 3 else ''} cannot be found in {given_path.parent}; "
            "download all parts into one folder"
        )
    files = [given if index == number else opened.enter_context(MappedFile(path)) for index, path in enumerate(paths)]
    headers = [header if file is given else read_header(file) for file in files]
    _check_parts(files, headers)
    return files, headers


def _check_parts(files: list[MappedFile], headers: list[GGUFHeader]) -> None:
    """Prove that each part is the one its name says, and that all come from one model."""
    shared: dict[str, tuple[str, str, bytes]] = {}
    owners: dict[str, str] = {}
    for index, (file, header) in enumerate(zip(files, headers, strict=True)):
        name = file.path.name
        number = _split_number(file, header, "split.no")
        count = _split_number(file, header, "split.count")
        if (number, count) != (index, len(files)):
            raise CorruptFileError(
                f"{name} holds part {number + 1} of {count}; wanted part {index + 1} of "
                f"{len(files)}: download this part again"
            )
        for key in header.values.keys() - _PER_PART_KEYS:
            stored = header.values[key]
            kind, raw = stored.description, file.read(stored.start, stored.end)
            first, *wanted = shared.setdefault(key, (name, kind, raw))
            if [kind, raw] != wanted:
                raise CorruptFileError(
                    f"{name} is not a part of the same model as {first}: their key {key!r} "
                    "differs; download all parts of one model"
                )
        for tensor in header.tensors:
            if tensor in owners:
                raise CorruptFileError(
                    f"{name} and {owners[tensor]} both hold tensor {tensor!r}; wanted parts of one "
                    "model: download them again"
                )
            owners[tensor] = name
    wanted_tensors = _split_number(files[0], headers[0], "split.tensors.count", len(owners))
    if len(owners) != wanted_tensors:
        raise CorruptFileError(
            f"the {len(files)} parts of {files[0].path.name} hold {len(owners)} tensors; wanted "
            f"{wanted_tensors}: download all parts of one model again"
        )


def _split_number(file: MappedFile, header: GGUFHeader, key: str, default: int = 0) -> int:
    return Metadata(file, header.values).integer(key, default, maximum=2**31 - 1)
