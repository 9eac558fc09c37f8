"""The towers of a Hugging Face folder, read as the mmproj file that they would convert to.

Names of modules differ between layouts that writers of transformers used: parts stand inside `model.`, `thinker.` or
nothing, and a tower may have a further `vision_model.`. Without these words they are one, which a family's table turns
into GGUF's names.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, TokenizerError, UnsupportedFormatError
from localinfer.models.checkpoint.changes import Change
from localinfer.quant.checkpoint.folder import CheckpointFolder
from localinfer.quant.checkpoint.groups import GroupedMatrix
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.mapped_file import FileStretch
from localinfer.types import FloatArray

_TYPES = {"F16": TensorType.F16, "BF16": TensorType.BF16, "F32": TensorType.F32}
_AROUND = re.compile(r"^(?:thinker\.|vlm\.)?(?:model\.)?")
_INSIDE = re.compile(r"^(vision_tower|visual)\.vision_model\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_NEEDLESS = re.compile(r".*(rotary_emb\.inv_freq|embeddings\.position_ids|rotary_pos_emb\.inv_freq)")
_WAY_OUT = "Download the folder again or choose another copy of the model"


@dataclass(frozen=True)
class To:
    """One of GGUF's tensors that is made of a tensor of a folder."""

    name: str
    """GGUF's name, whole or without its last word, as the folder's is given; `*` is the number of a block."""
    change: Change | None = None
    """Change on the way; None: none."""


Targets = Mapping[str, str | To | tuple[To, ...]]
"""GGUF's names by those of a folder's modules or tensors, `*` for a number."""


@dataclass(frozen=True)
class TowerNames:
    """The names of a family's towers and projectors."""

    parts: tuple[str, ...]
    """First words of what these are called; other tensors are the text model's."""
    targets: Targets
    """GGUF's names."""
    unused: str = r"(?!)"
    """Pattern of tensors that nothing goes through."""
    numbers: Mapping[str, Sequence[int]] | None = None
    """By the beginning of a GGUF name, the numbers that stand for 0, 1, ... in it."""


class TowerFile:
    """A `ModelFile` over the towers of a folder that is open elsewhere; closing it leaves the folder open.

    extra: GGUF's names of tensors of the text model that an encoder reads, with the folder's name and the change. made:
    tensors that no file has. Raises: UnsupportedFormatError for a tensor of the towers without a place.
    """

    path: Path
    paths: tuple[Path, ...]
    num_bytes: int
    tensors: dict[str, TensorRecord]
    tokenizer_error: TokenizerError | None = None

    def __init__(
        self,
        folder: CheckpointFolder,
        towers: Sequence[TowerNames],
        extra: Mapping[str, tuple[str, Change | None]] | None = None,
        made: Mapping[str, FloatArray] | None = None,
    ) -> None:
        self._folder = folder
        self._plan: dict[str, tuple[str, Change | None]] = {}
        self._made = {name: np.ascontiguousarray(values, np.float32) for name, values in (made or {}).items()}
        unknown = []
        for stored in folder.tensors:
            name = canonical_name(stored)
            names = [one for one in towers if name.split(".")[0] in one.parts]
            if not names or _NEEDLESS.fullmatch(name) or any(re.fullmatch(one.unused, name) for one in names):
                continue
            targets = [target for one in names for target in _targets(name, one)]
            if not targets:
                unknown.append(stored)
            for target in targets:
                self._plan[target.name] = stored, target.change
        if unknown:
            raise UnsupportedFormatError(
                f"{len(unknown)} tensors of what sees or hears have no place in this version "
                f"({', '.join(sorted(unknown)[:3])}); its text runs. Use a GGUF file and its mmproj file, or update "
                "localinfer."
            )
        self._plan |= extra or {}
        self.path = folder.path
        self.paths = (*folder.paths, folder.path / "config.json")
        self.metadata: Mapping[str, object] = {"general.architecture": "clip"}
        self.tensors = {name: self._record(name, *source) for name, source in self._plan.items()}
        for name, values in self._made.items():
            self.tensors[name] = TensorRecord(name, TensorType.F32, values.shape)
        self.num_bytes = sum(record.num_bytes for record in self.tensors.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors, rows first."""
        return {name: record.shape for name, record in self.tensors.items()}

    @property
    def num_layers(self) -> int:
        """Blocks of the tower that sees."""
        return self.count_blocks("v.blk.")

    def count_blocks(self, prefix: str) -> int:
        """Numbers that follow a prefix, from 0 to the greatest."""
        found = [int(name[len(prefix) :].split(".")[0]) for name in self.tensors if name.startswith(prefix)]
        return max(found, default=-1) + 1

    def tensor(self, name: str) -> TensorRecord:
        """Return a tensor's record. Raises: CorruptFileError if the folder lacks it."""
        if name not in self.tensors:
            raise CorruptFileError(
                f"{self.path.name} has nothing that is {name!r} among the {len(self.tensors)} tensors of its towers: "
                f"{_WAY_OUT}"
            )
        return self.tensors[name]

    def tensor_bytes(self, name: str) -> NDArray[np.uint8]:
        """Return uint8[num_bytes]: a view into the map, or a copy where the tensor is changed."""
        self.tensor(name)
        if name in self._made:
            return self._made[name].reshape(-1).view(np.uint8)
        stored, change = self._plan[name]
        if change is None:
            data: NDArray[Any] = self._folder.array(stored)
        elif change.is_arithmetic:
            info = self._folder.tensor(stored)
            values = dequantize(self._folder.tensor_bytes(stored), _TYPES[info.dtype], _shape(info.shape))
            data = change.apply(values.reshape(_shape(info.shape)))
        else:
            data = change.apply(self._folder.array(stored))
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)

    def grouped(self, name: str) -> tuple[GroupedMatrix, ...] | None:
        """Return None: towers are stored as plain numbers."""
        return None

    def stretch(self, name: str) -> FileStretch | None:
        """Return where a tensor's bytes lie in a file, if nothing changes them."""
        stored, change = self._plan.get(name, ("", None))
        return self._folder.stretch(stored) if stored and change is None else None

    @property
    def has_changed(self) -> bool:
        """True if a file of tensors was written since it was opened, or another one has its name."""
        return self._folder.has_changed

    def forget(self, name: str, first: int, end: int) -> None:
        """Let the system drop the memory behind a tensor, once all of it has been packed."""
        stored, change = self._plan.get(name, ("", None))
        if stored and change is None and end == self.tensors[name].num_bytes:
            self._folder.forget(stored)

    def close(self) -> None:
        """Do nothing: the folder is its opener's."""

    def _record(self, name: str, stored: str, change: Change | None) -> TensorRecord:
        info = self._folder.tensor(stored)
        if info.dtype not in _TYPES:
            raise UnsupportedFormatError(
                f"{stored} is {info.dtype}; this version runs towers of F16, BF16 and F32 weights. Choose a copy of "
                "the model whose towers are not quantized."
            )
        try:
            shape = _shape(info.shape) if change is None else change.shape(_shape(info.shape))
        except (ValueError, IndexError) as error:
            raise CorruptFileError(
                f"{stored} of shape {info.shape} cannot become {name} ({error}): {_WAY_OUT}"
            ) from None
        is_computed = change is not None and change.is_arithmetic
        return TensorRecord(name, TensorType.F32 if is_computed else _TYPES[info.dtype], shape)


def canonical_name(name: str) -> str:
    """A tensor's name without the words that differ between layouts."""
    return _INSIDE.sub(r"\1.", _AROUND.sub("", name))


def _shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor; a single number is a vector of one."""
    return shape or (1,)


def _targets(name: str, names: TowerNames) -> tuple[To, ...]:
    """GGUF's tensors of one tensor: by its whole name, or by its module's and then with the same last word."""
    module, _, leaf = name.rpartition(".")
    number = _NUMBER.search(f"{name}.")
    for whole, added in ((name, ""), (module, f".{leaf}")):
        for starred in (whole, _NUMBER.sub("*", f"{whole}.", count=1)[:-1] if number else whole):
            found = names.targets.get(starred)
            if found is None:
                continue
            entries = found if isinstance(found, tuple) else (found,)
            targets = [To(entry) if isinstance(entry, str) else entry for entry in entries]
            return tuple(To(_numbered(to.name + added, number, names), to.change) for to in targets)
    return ()


def _numbered(name: str, number: re.Match[str] | None, names: TowerNames) -> str:
    if "*" not in name or number is None:
        return name
    index = int(number[0])
    for prefix, numbers in (names.numbers or {}).items():
        if name.startswith(prefix):
            index = numbers[index] if index < len(numbers) else index
    return name.replace("*", str(index))
