"""Write a model again with its matrices in the types of a preset: tensor by tensor, a few million weights at a time."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.files import check_output
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.quant.checkpoint.model_file import ModelFile, read_stretch
from localinfer.quant.formats.encoding import as_float32, encode, source_rows
from localinfer.quant.formats.reference import dequantize
from localinfer.quant.formats.types import TensorRecord, TensorType, row_bytes
from localinfer.quant.gguf.header import ValueType
from localinfer.quant.gguf.writer import EncodedValue, GGUFWriter, copy_values, encode_value
from localinfer.quant.methods.gptq import PreparedTensor
from localinfer.quant.methods.imatrix import Importance
from localinfer.quant.methods.presets import ModelFacts, Preset, TypeChoice, choose_types, is_quantized
from localinfer.types import ProgressCallback

QUANTIZATION_VERSION = 2
"""`general.quantization_version`: the block formats' generation."""

WEIGHTS_PER_CHUNK = 1 << 22
ROWS_SAMPLED = 64
"""Rows of a tensor, spread evenly, that its error is measured on."""

_PLAIN = (TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.F64)
_NOT_COPIED = ("split.", "quantize.imatrix.", "GGUF.")


@dataclass(frozen=True)
class TensorReport:
    """What became of a tensor.

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
        """Whether it was rounded a second time: its source held blocks already."""
        return self.relative_error is not None and self.source_type not in _PLAIN


@dataclass(frozen=True)
class QuantizedModel:
    """What was written: `num_bytes` is the file's size."""

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
    progress: ProgressCallback | None = None,
) -> QuantizedModel:
    """Write `source` to `path` as GGUF in a preset's types.

    prepared: tensors that a calibration pass has quantized, in the preset's types.
    progress: called with a tensor's name, the weights done and the weights in all.
    Raises: RequestError if the path is the source itself or a weight cannot be encoded, naming its tensor;
        CorruptFileError if the importance is another model's.
    """
    target = Path(path)
    check_target(source, target)
    has_importance = importance is not None or prepared is not None
    facts = ModelFacts.from_metadata(source.metadata)
    choices = choose_types(preset, source.tensors, facts, has_importance=has_importance)
    specs = [TensorRecord(name, choices[name].type, record.shape) for name, record in source.tensors.items()]
    total = sum(math.prod(record.shape) for record in source.tensors.values())
    done, reports = 0, []
    with GGUFWriter(target, _metadata(source, preset), specs) as writer:
        for name, record in source.tensors.items():
            writing = _TensorWriting(source, record, choices[name], pool, writer, importance)

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


class _TensorWriting:
    """One tensor on its way from source to file."""

    def __init__(
        self,
        source: ModelFile,
        record: TensorRecord,
        choice: TypeChoice,
        pool: ThreadPool,
        writer: GGUFWriter,
        importance: Importance | None,
    ) -> None:
        self._source, self._record, self._choice = source, record, choice
        self._pool, self._writer = pool, writer
        self._columns = record.shape[-1]
        self._rows_each = record.shape[-2] if len(record.shape) > 1 else 1
        self._num_matrices = math.prod(record.shape[:-2])
        self._importance = None
        if importance is not None and is_quantized(record):
            self._importance = importance.of(record.name, self._num_matrices, self._columns)
        self._error, self._scale = 0.0, 0.0

    def run(self, advance: Callable[[int], None]) -> TensorReport:
        is_copied = self._choice.type is self._record.type
        stride = row_bytes(self._record.type, self._columns)
        step = max(1, WEIGHTS_PER_CHUNK // self._columns)
        for matrix in range(self._num_matrices):
            for row in range(0, self._rows_each, step):
                count = min(step, self._rows_each - row)
                first = (matrix * self._rows_each + row) * stride
                chunk = read_stretch(self._source, self._record.name, first, first + count * stride)
                self._writer.write(np.ascontiguousarray(chunk) if is_copied else self._encode(chunk, matrix, row))
                self._source.forget(self._record.name, first, first + chunk.size)
                advance(count * self._columns)
        error = None if is_copied else math.sqrt(self._error / self._scale) if self._scale else 0.0
        return self._report(error, is_calibrated=False)

    def run_prepared(self, prepared: PreparedTensor, advance: Callable[[int], None]) -> TensorReport:
        """Write what a calibration pass made of the tensor."""
        assert prepared.type is self._choice.type, f"{self._record.name} was prepared for another preset"
        self._writer.write(prepared.blocks)
        advance(math.prod(self._record.shape))
        return self._report(prepared.relative_error, is_calibrated=True)

    def _report(self, error: float | None, *, is_calibrated: bool) -> TensorReport:
        return TensorReport(
            name=self._record.name,
            source_type=self._record.type,
            choice=self._choice,
            num_columns=self._columns,
            num_weights=math.prod(self._record.shape),
            num_bytes=TensorRecord(self._record.name, self._choice.type, self._record.shape).num_bytes,
            has_importance=self._importance is not None,
            is_calibrated=is_calibrated,
            relative_error=error,
        )

    def _encode(self, chunk: NDArray[np.uint8], matrix: int, first_row: int) -> NDArray[np.uint8]:
        rows = source_rows(chunk, self._record.type, self._columns)
        importance = None if self._importance is None else self._importance[matrix]
        encoded = encode(self._pool, rows, self._choice.type, importance)
        every = max(1, self._num_matrices * self._rows_each // ROWS_SAMPLED)
        sampled = slice(-(matrix * self._rows_each + first_row) % every, None, every)
        wanted = as_float32(rows[sampled]).astype(np.float64)
        if len(wanted):
            found = dequantize(np.ascontiguousarray(encoded[sampled]), self._choice.type, wanted.shape)
            weights = 1.0 if importance is None else importance.astype(np.float64)
            self._error += float((weights * (found - wanted) ** 2).sum())
            self._scale += float((weights * wanted**2).sum())
        return encoded
