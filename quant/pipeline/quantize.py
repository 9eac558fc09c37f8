"""Write a model again with its matrices in the types of a preset: tensor by tensor, a few million weights at a time.

Results of a calibration are kept on disk layer by layer, so that a run that was killed can continue after its last
layer. A folder holds one file per layer with its quantized tensors, and one with the inputs of the next layer. Each
file appears under its name when it is whole, the last one after the others: it tells how many layers count.
"""

import contextlib
import json
import math
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.quant.checkpoint.model_file import ModelFile, read_stretch
from localinfer.quant.formats.dequantize import dequantize
from localinfer.quant.formats.encoding import as_float32, encode, source_rows
from localinfer.quant.formats.types import TensorRecord, TensorType, row_bytes
from localinfer.quant.gguf.header import ValueType
from localinfer.quant.gguf.writer import EncodedValue, GGUFWriter, copy_values, encode_value
from localinfer.quant.methods.gptq import PreparedTensor
from localinfer.quant.methods.imatrix import Importance
from localinfer.quant.methods.presets import ModelFacts, Preset, TypeChoice, choose_types, is_quantized
from localinfer.system.files import check_output, is_temporary, unwritable, write_all, write_atomically
from localinfer.types import FloatArray, ProgressCallback

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
        """Layers done and the input of the next one; None if there is nothing, or nothing whole, of this identity."""
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
        """Keep the tensors of layer num_layers - 1, and the input of the next layer.

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
    """True if a folder has partial results, or nothing yet: a run that was killed may have begun its first file."""
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


QUANTIZATION_VERSION = 2
"""`general.quantization_version`: the block formats' generation."""

WEIGHTS_PER_CHUNK = 1 << 22
ROWS_SAMPLED = 64
"""Rows of a tensor, spread evenly, that its error is measured on."""

_PLAIN = (TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.F64)
_NOT_COPIED = ("split.", "quantize.imatrix.", "GGUF.")


@dataclass(frozen=True)
class TensorReport:
    """Result for one tensor.

    relative_error: root of sum(weight * error^2) / sum(weight * value^2), weighted by importance where there is some,
        on sampled rows; of a tensor quantized by calibration, the same of its answers (`PreparedTensor`); None for a
        tensor that was copied.
    """

    name: str
    source_type: TensorType
    choice: TypeChoice
    num_columns: int
    num_weights: int
    num_bytes: int
    has_importance: bool
    is_calibrated: bool
    relative_error: float | None

    @property
    def was_quantized_before(self) -> bool:
        """True if it was rounded a second time: its source held blocks already."""
        return self.relative_error is not None and self.source_type not in _PLAIN


@dataclass(frozen=True)
class QuantizedModel:
    """The written file: `num_bytes` is its size."""

    path: Path
    num_bytes: int
    tensors: tuple[TensorReport, ...]

    @property
    def bits_per_weight(self) -> float:
        return 8 * sum(one.num_bytes for one in self.tensors) / sum(one.num_weights for one in self.tensors)


def quantize_model(
    source: ModelFile,
    path: str | os.PathLike[str],
    preset: Preset,
    pool: ThreadPool,
    *,
    importance: Importance | None = None,
    prepared: Mapping[str, PreparedTensor] | None = None,
    choices: Mapping[str, TypeChoice] | None = None,
    progress: ProgressCallback | None = None,
) -> QuantizedModel:
    """Write `source` to `path` as GGUF in a preset's types.

    choices: type of each tensor, in place of the preset's for language models. prepared: tensors that a calibration
    pass has quantized, in the preset's types.
    progress: called with a tensor's name, the weights done and the weights in all.
    Raises: RequestError if the path is the source itself or a weight cannot be encoded, naming its tensor;
        CorruptFileError if the importance is another model's.
    """
    target = Path(path)
    check_target(source, target)
    if choices is None:
        has_importance = importance is not None or prepared is not None
        facts = ModelFacts.from_metadata(source.metadata)
        choices = choose_types(preset, source.tensors, facts, has_importance=has_importance)
    specs = [TensorRecord(name, choices[name].type, record.shape) for name, record in source.tensors.items()]
    total = sum(math.prod(record.shape) for record in source.tensors.values())
    done, reports = 0, []
    with GGUFWriter(target, _metadata(source, preset), specs) as writer:
        for name, record in source.tensors.items():
            weights = None
            if importance is not None and is_quantized(record):
                num_matrices, _, num_columns = _as_stack(record.shape)
                weights = importance.of(name, num_matrices, num_columns)
            writing = _TensorWriting(source, record, choices[name], pool, writer, weights)

            def advance(weights: int, name: str = name) -> None:
                nonlocal done
                done += weights
                if progress is not None:
                    progress(name, done, total)

            try:
                ready = None if prepared is None else prepared.get(name)
                reports.append(writing.run(advance) if ready is None else writing.run_prepared(ready, advance))
            except RequestError as error:
                raise RequestError(f"{name}: {error}") from error
    return QuantizedModel(target, writer.num_bytes, tuple(reports))


def check_target(source: ModelFile, target: Path) -> None:
    """Refuse what cannot be written to. Raises: RequestError if it is the source, or as `files.check_output`."""
    for own in source.paths:
        if target.exists() and target.samefile(own):
            raise RequestError(f"{target} is the model to quantize; write to another file")
    check_output(target)


def _metadata(source: ModelFile, preset: Preset) -> dict[str, EncodedValue]:
    values = {key: value for key, value in copy_values(source.metadata).items() if not key.startswith(_NOT_COPIED)}
    values["general.file_type"] = encode_value(preset.file_type, ValueType.UINT32)
    values["general.quantization_version"] = encode_value(QUANTIZATION_VERSION, ValueType.UINT32)
    return values


@dataclass
class _TensorWriting:
    """One tensor written from source to file. importance: float32[matrices, columns]; error: sums so far."""

    source: ModelFile
    record: TensorRecord
    choice: TypeChoice
    pool: ThreadPool
    writer: GGUFWriter
    importance: NDArray[np.float32] | None
    error: float = 0.0
    scale: float = 0.0

    def run(self, advance: Callable[[int], None]) -> TensorReport:
        is_copied = self.choice.type is self.record.type
        num_matrices, num_rows, num_columns = _as_stack(self.record.shape)
        stride = row_bytes(self.record.type, num_columns)
        step = max(1, WEIGHTS_PER_CHUNK // num_columns)
        for matrix in range(num_matrices):
            for row in range(0, num_rows, step):
                count = min(step, num_rows - row)
                first = (matrix * num_rows + row) * stride
                chunk = read_stretch(self.source, self.record.name, first, first + count * stride)
                self.writer.write(np.ascontiguousarray(chunk) if is_copied else self._encode(chunk, matrix, row))
                self.source.forget(self.record.name, first, first + chunk.size)
                advance(count * num_columns)
        error = None if is_copied else math.sqrt(self.error / self.scale) if self.scale else 0.0
        return self._report(error, is_calibrated=False)

    def run_prepared(self, prepared: PreparedTensor, advance: Callable[[int], None]) -> TensorReport:
        """Write the tensor as a calibration pass has quantized it."""
        assert prepared.type is self.choice.type, f"{self.record.name} was prepared for another preset"
        self.writer.write(prepared.blocks)
        advance(math.prod(self.record.shape))
        return self._report(prepared.relative_error, is_calibrated=True)

    def _report(self, error: float | None, *, is_calibrated: bool) -> TensorReport:
        return TensorReport(
            name=self.record.name,
            source_type=self.record.type,
            choice=self.choice,
            num_columns=self.record.shape[-1],
            num_weights=math.prod(self.record.shape),
            num_bytes=replace(self.record, type=self.choice.type).num_bytes,
            has_importance=self.importance is not None,
            is_calibrated=is_calibrated,
            relative_error=error,
        )

    def _encode(self, chunk: NDArray[np.uint8], matrix: int, first_row: int) -> NDArray[np.uint8]:
        num_matrices, num_rows, num_columns = _as_stack(self.record.shape)
        rows = source_rows(chunk, self.record.type, num_columns)
        importance = None if self.importance is None else self.importance[matrix]
        encoded = encode(self.pool, rows, self.choice.type, importance)
        every = max(1, num_matrices * num_rows // ROWS_SAMPLED)
        sampled = slice(-(matrix * num_rows + first_row) % every, None, every)
        wanted = as_float32(rows[sampled]).astype(np.float64)
        if len(wanted):
            found = dequantize(np.ascontiguousarray(encoded[sampled]), self.choice.type, wanted.shape)
            weights = 1.0 if importance is None else importance.astype(np.float64)
            self.error += float((weights * (found - wanted) ** 2).sum())
            self.scale += float((weights * wanted**2).sum())
        return encoded


def _as_stack(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Matrices, rows of each and columns of a tensor."""
    return math.prod(shape[:-2]), shape[-2] if len(shape) > 1 else 1, shape[-1]
