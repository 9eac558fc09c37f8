"""What a calibration has finished so far, on disk, so that a run that was killed can continue after its last layer.

A folder holds one file per layer with its quantized tensors, and one with what the next layer reads. Each file appears
under its name when it is whole, the last one after the others: it says how many layers count.
"""

import contextlib
import json
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.quant.formats.types import TensorType
from localinfer.quant.methods.gptq import PreparedTensor
from localinfer.system.files import is_temporary, unwritable, write_all, write_atomically
from localinfer.types import FloatArray

_ABOUT, _STATE = "about.json", "state.npz"
_RECORDS = "records"
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile)


class PartialResults:
    """A folder of finished layers.

    identity: everything the results depend on; results of another identity are deleted when the first are saved.
    Raises: RequestError if the path exists and is no such folder.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder = folder
        self._identity = identity
        if folder.exists() and not _is_ours(folder):
            raise RequestError(
                f"{folder} is where unfinished results are kept, but holds something else; move it, or write elsewhere"
            )

    def load(self) -> tuple[int, list[FloatArray]] | None:
        """Layers done and what the next one reads; None if there is nothing, or nothing whole, of this identity."""
        try:
            about = json.loads((self.folder / _ABOUT).read_text(encoding="utf-8"))
            if about != {"identity": self._identity}:
                return None
            with _arrays(self.folder / _STATE) as state:
                num_layers = int(state["num_layers"])
                hidden = [state[f"hidden{index}"] for index in range(int(state["num_models"]))]
            for layer in range(num_layers):
                with _arrays(self._layer_path(layer)) as stored:
                    json.loads(str(stored[_RECORDS]))
        except _UNREADABLE:
            return None
        return num_layers, hidden

    def save(self, num_layers: int, tensors: Mapping[str, PreparedTensor], hidden: Sequence[FloatArray]) -> None:
        """Keep the tensors of layer num_layers - 1, and what the next layer reads.

        Raises: RequestError where the system refuses.
        """
        try:
            self._save(num_layers, tensors, hidden)
        except OSError as error:
            raise RequestError(unwritable(self.folder, error)) from error

    def _save(self, num_layers: int, tensors: Mapping[str, PreparedTensor], hidden: Sequence[FloatArray]) -> None:
        if num_layers == 1:
            self.delete()
            self.folder.mkdir()
            about = json.dumps({"identity": self._identity}).encode()
            write_atomically(self.folder / _ABOUT, lambda file: write_all(file, about))
        records = {name: [int(one.type), one.relative_error] for name, one in tensors.items()}
        blocks = {f"blocks.{name}": one.blocks for name, one in tensors.items()}
        _write(self._layer_path(num_layers - 1), {_RECORDS: np.array(json.dumps(records)), **blocks})
        arrays = {f"hidden{index}": array for index, array in enumerate(hidden)}
        numbers = {"num_layers": np.array(num_layers), "num_models": np.array(len(hidden))}
        _write(self.folder / _STATE, {**numbers, **arrays})

    def tensors(self, num_layers: int, others: Mapping[str, PreparedTensor]) -> "StoredTensors":
        """The tensors of the first layers, read on access, and others that are in memory."""
        return StoredTensors([self._layer_path(layer) for layer in range(num_layers)], others)

    def delete(self) -> None:
        """Remove the folder."""
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self.folder)

    def _layer_path(self, layer: int) -> Path:
        return self.folder / f"layer-{layer:04}.npz"


def _is_ours(folder: Path) -> bool:
    """Whether a folder has partial results, or nothing yet: a run that was killed may have begun its first file."""
    return folder.is_dir() and ((folder / _ABOUT).exists() or all(is_temporary(path.name) for path in folder.iterdir()))


class StoredTensors(Mapping[str, PreparedTensor]):
    """Tensors in files of `PartialResults`, by name, none of which stays in memory, and others that are there."""

    def __init__(self, paths: Sequence[Path], others: Mapping[str, PreparedTensor]) -> None:
        self._others = dict(others)
        self._places: dict[str, tuple[Path, int, float]] = {}
        for path in paths:
            with _arrays(path) as stored:
                records = json.loads(str(stored[_RECORDS]))
            self._places |= {name: (path, type, error) for name, (type, error) in records.items()}

    def __getitem__(self, name: str) -> PreparedTensor:
        if name in self._others:
            return self._others[name]
        path, type, error = self._places[name]
        with _arrays(path) as stored:
            return PreparedTensor(TensorType(type), stored[f"blocks.{name}"], error)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._places, *self._others])

    def __len__(self) -> int:
        return len(self._places) + len(self._others)


@contextlib.contextmanager
def _arrays(path: Path) -> Iterator[Mapping[str, NDArray[Any]]]:
    # NumPy leaves a damaged file open if it opens it itself.
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
        yield arrays


def _write(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    write_atomically(path, lambda file: np.savez(file, **arrays))  # type: ignore[arg-type]
