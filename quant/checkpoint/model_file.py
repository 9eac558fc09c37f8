"""The interface of a model on disk to a loader, of either kind of storage."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import TokenizerError
from localinfer.quant.formats.types import TensorRecord
from localinfer.quant.gguf.mapped_file import FileStretch

if TYPE_CHECKING:
    from localinfer.quant.checkpoint.groups import GroupedMatrix


class ModelFile(Protocol):
    """A model on disk, under GGUF's names: a GGUF file (`quant.gguf`), or a Hugging Face folder (`models.checkpoint`).

    `paths` are the files that make it up: equal bytes in them are an equal model. `num_bytes` is its size on disk.
    `metadata` has GGUF's keys, values decoded. `tokenizer_error` is the reason that its vocabulary is not among them,
    if one was there that could not be read.
    """

    @property
    def path(self) -> Path: ...

    @property
    def paths(self) -> tuple[Path, ...]: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def metadata(self) -> Mapping[str, object]: ...

    @property
    def tensors(self) -> Mapping[str, TensorRecord]: ...

    @property
    def tokenizer_error(self) -> TokenizerError | None: ...

    def tensor(self, name: str) -> TensorRecord:
        """Return a tensor's record. Raises: CorruptFileError if the model lacks it."""
        ...

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[num_bytes]: the tensor's blocks, row after row."""
        ...

    def grouped(self, name: str) -> "tuple[GroupedMatrix, ...] | None":
        """Return the codes, scales and zero points of a checkpoint's quantized weight, one matrix per expert, else
        None."""
        ...

    def stretch(self, name: str) -> FileStretch | None:
        """Return where a tensor's blocks lie in a file; None where `tensor_bytes` makes them of something else."""
        ...

    @property
    def has_changed(self) -> bool:
        """True if a file of the model was written since it was opened, or another one has its name."""
        ...

    def forget(self, name: str, first: int, end: int) -> None:
        """Let the system drop the memory behind some bytes of a tensor."""
        ...

    def close(self) -> None:
        """Refuse further access. Safe to call twice."""
        ...


def read_stretch(file: ModelFile, name: str, first: int, end: int) -> NDArray[np.uint8]:
    """Return uint8[end - first] of a tensor's blocks, copied where they lie in a file.

    No change of the file can then end the process or go unnoticed, even over minutes of work.

    Raises: CorruptFileError if the file was changed since it was opened.
    """
    stretch = file.stretch(name)
    if stretch is None:
        return file.tensor_bytes(name).reshape(-1)[first:end]
    data = np.empty(end - first, np.uint8)
    stretch.read_into([(first, data.data)])
    return data
