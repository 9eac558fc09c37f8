"""Quantize a model on disk: open it, calibrate it if the method needs that, write the new file."""

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from localinfer.apps.evaluate.texts import CalibrationText, read_calibration
from localinfer.errors import ModelFileError, RequestError
from localinfer.kernels.cpu.encoding import ENCODERS, prepare_encoders
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.models.calibration.run import calibrate, calibration_sequences
from localinfer.models.calibration.scales import round_by_calibration, scale_for_rounding
from localinfer.models.checkpoint.model import CheckpointModel
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.load.device_request import calibration_device
from localinfer.models.load.loader import open_model_file, read_tokenizer
from localinfer.models.load.threads import available_threads, checked_threads
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.types import bits_per_weight
from localinfer.quant.methods.imatrix import Importance, ImportanceVisitor, read_imatrix, write_imatrix
from localinfer.quant.methods.presets import ModelFacts, Preset, TypeChoice, choose_types, find_preset
from localinfer.quant.methods.workers import Workers
from localinfer.quant.pipeline.quantize import PartialResults, QuantizedModel, check_target, quantize_model
from localinfer.system.files import check_output, is_written_in_place
from localinfer.types import ProgressCallback

logger = logging.getLogger(__name__)

Method = Literal["auto", "rtn", "imatrix", "gptq", "awq"]

CALIBRATION_TOKENS = 16384
_ALGORITHM, _SCALES_ALGORITHM = "gptq 2", " awq 1"
"""Part of the key of partial results: to be changed when the same inputs give other bytes."""
_BITS_WORTH_CALIBRATING = 8.0


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    type: str = "Q4_K_M",
    method: Method = "auto",
    calibration: str | os.PathLike[str] | None = None,
    calibration_tokens: int = CALIBRATION_TOKENS,
    imatrix: str | os.PathLike[str] | None = None,
    save_imatrix: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    device: str = "auto",
    progress: ProgressCallback | None = None,
) -> QuantizedModel:
    """Write a model as GGUF with quantized matrices; the result lists every tensor's type and error.

    source: a GGUF file, or a Hugging Face folder. target: written atomically, replacing an older file.
    type: a preset such as Q4_K_M, in any case. F16 and BF16 write plain numbers, the others blocks.
    method: rtn rounds to nearest. imatrix weights errors by the importance of each column, from a file or a calibration
        text. gptq compensates the errors of a column in later columns, and those of a layer in later layers; it takes
        minutes per billion weights, and resumes after its last finished layer if the same call is made again. awq
        applies activation-aware scales between matrices before gptq, in the layers where that lowers the error; it
        takes several times as long. auto: imatrix if a file is given, else gptq below 8 bits, else rtn.
    calibration: a text file, or a folder of text files; None: the bundled text.
    imatrix: a file of llama.cpp's importance. save_imatrix: where to write the importance of the calibration text.
    threads: None for the physical cores. The bytes do not depend on it.
    device: for calibration. auto: a GPU if torch finds one, else the CPU. A GPU sums in another order, so a few codes
        differ from the CPU's.
    progress: called with a stage's name, the units done and the total.
    Raises: ModelFileError, RequestError; BackendUnavailableError if device is cuda and torch finds no GPU.
    """
    preset = find_preset(type)
    num_threads = available_threads() if threads is None else checked_threads(threads)
    if imatrix is not None and method in ("rtn", "gptq", "awq"):
        raise RequestError(f"method {method} uses no imatrix file; leave it out, or use method imatrix")
    if preset.is_plain and (method not in ("auto", "rtn") or imatrix is not None):
        raise RequestError(f"type {preset.name} has plain numbers, which nothing is fitted to; take method rtn or auto")
    if calibration_tokens < 1:
        raise RequestError(f"calibration_tokens is {calibration_tokens}; wanted at least 1")
    if device not in ("auto", "cpu", "cuda"):
        raise RequestError(f"there is no device {device!r}; wanted auto, cpu or cuda")
    gpu = calibration_device(device) if method in ("auto", "gptq", "awq") else None
    with contextlib.closing(open_model_file(source)) as file:
        if isinstance(file, CheckpointModel) and file.adapter:
            logger.warning("%s: the new file hears nothing, and is without the %s", file.path.name, file.adapter)
            file.leave_out_adapter()
        check_target(file, Path(target))
        read = [*file.paths, *(path for path in (calibration, imatrix) if path is not None)]
        check_output(target, inputs=read)
        if save_imatrix is not None:
            check_output(save_imatrix, inputs=read)
            if os.path.realpath(save_imatrix) == os.path.realpath(target) and not is_written_in_place(target):
                raise RequestError(f"{target} would be both the model and its imatrix; give them different names")
        work = _Work(file, Path(target), preset, num_threads, gpu, calibration_tokens, save_imatrix, progress)
        return work.run(method, calibration, imatrix)


@dataclass
class _Work:
    """The quantization of one model."""

    file: ModelFile
    target: Path
    preset: Preset
    num_threads: int
    gpu: str | None
    max_tokens: int
    save_imatrix: str | os.PathLike[str] | None
    progress: ProgressCallback | None

    def run(
        self, method: Method, calibration: str | os.PathLike[str] | None, imatrix: str | os.PathLike[str] | None
    ) -> QuantizedModel:
        importance = None if imatrix is None else read_imatrix(imatrix)
        if importance is not None and not importance.mean_squares.keys() & self.file.tensors.keys():
            raise RequestError(
                f"{importance.name} names no tensor of {self.file.path.name}; wanted the imatrix of this model"
            )
        self._warn_of_losses()
        if importance is not None or method == "rtn":
            return self._write(importance)
        if method == "auto" and bits_per_weight(self.preset.default) >= _BITS_WORTH_CALIBRATING:
            return self._write(None)
        text = read_calibration(calibration)
        try:
            token_ids = self._sequences(text)
        except ModelFileError as error:
            if method != "auto":
                raise
            logger.warning("%s; weights are rounded without calibration", error)
            return self._write(None)
        if method == "imatrix":
            return self._write(self._importance(text, token_ids))
        if self.save_imatrix is not None:
            self._importance(text, token_ids)
        return self._with_feedback(token_ids, with_scales=method == "awq")

    def _warn_of_losses(self) -> None:
        if not isinstance(self.file, CheckpointModel):
            return
        if self.file.tokenizer_error is not None:
            logger.warning("%s; the new file will have no tokenizer", self.file.tokenizer_error)
        if self.file.unknown_settings:
            logger.warning(
                "%s: settings unknown to this version will not be in the new file: %s",
                self.file.path.name,
                ", ".join(self.file.unknown_settings),
            )

    def _sequences(self, text: CalibrationText) -> "NDArray[np.int32]":
        shapes = {name: info.shape for name, info in self.file.tensors.items()}
        config = ModelConfig.from_metadata(self.file.metadata, shapes)
        return calibration_sequences(read_tokenizer(self.file), text.text, self.max_tokens, config.context_length)

    def _choices(self, *, has_importance: bool) -> dict[str, TypeChoice]:
        facts = ModelFacts.from_metadata(self.file.metadata)
        return choose_types(self.preset, self.file.tensors, facts, has_importance=has_importance)

    def _pool(self, choices: Mapping[str, TypeChoice], *, with_feedback: bool = False) -> ThreadPool:
        names = sorted({choice.type.name for choice in choices.values()} & ENCODERS.keys())
        prepare_encoders(names, self.progress, with_feedback=with_feedback)
        return ThreadPool(self.num_threads)

    def _write(self, importance: Importance | None) -> QuantizedModel:
        choices = self._choices(has_importance=importance is not None)
        with contextlib.closing(self._pool(choices)) as pool:
            return quantize_model(
                self.file, self.target, self.preset, pool, importance=importance, progress=self.progress
            )

    def _workers(self) -> Workers:
        from localinfer.quant.methods.workers import TorchWorkers

        return Workers(self.num_threads) if self.gpu is None else TorchWorkers(self.num_threads, self.gpu)

    def _importance(self, text: CalibrationText, token_ids: NDArray[np.int32]) -> Importance:
        visitor = ImportanceVisitor()
        with self._workers() as workers:
            calibrate(self.file, token_ids, workers, visitor, progress=self.progress)
        importance = visitor.importance(text.name, len(token_ids))
        # Layers only, as llama-imatrix.
        layers = {name: squares for name, squares in importance.mean_squares.items() if name.startswith("blk.")}
        importance = replace(importance, mean_squares=layers)
        if self.save_imatrix is not None:
            write_imatrix(self.save_imatrix, importance, token_ids.shape[1])
        return importance

    def _with_feedback(self, token_ids: NDArray[np.int32], *, with_scales: bool) -> QuantizedModel:
        choices = self._choices(has_importance=True)
        identity = self._identity(token_ids, choices, with_scales)
        with self._unfinished_folder() as folder, contextlib.closing(self._pool(choices, with_feedback=True)) as pool:
            results = PartialResults(folder, identity)
            with self._workers() as workers:
                file: ModelFile = self.file
                if with_scales:
                    file, found = scale_for_rounding(file, token_ids, choices, pool, workers, progress=self.progress)
                    logger.info("scales of %d groups: %s", len(found), ", ".join(one.group.name for one in found))
                prepared = round_by_calibration(
                    file, token_ids, choices, pool, workers, results, progress=self.progress
                )
            model = quantize_model(file, self.target, self.preset, pool, prepared=prepared, progress=self.progress)
            results.delete()
        # A scaled tensor is read as F32, but its source may be quantized.
        types = {name: record.type for name, record in self.file.tensors.items()}
        return replace(model, tensors=tuple(replace(one, source_type=types[one.name]) for one in model.tensors))

    @contextlib.contextmanager
    def _unfinished_folder(self) -> Iterator[Path]:
        """The folder of finished layers: beside the target, unless that is a pipe or a device."""
        if not is_written_in_place(self.target):
            yield self.target.with_name(f"{self.target.name}.partial")
            return
        with tempfile.TemporaryDirectory(prefix="localinfer-") as folder:
            yield Path(folder) / "partial"

    def _identity(self, token_ids: NDArray[np.int32], choices: Mapping[str, TypeChoice], with_scales: bool) -> str:
        """A hash of everything that the quantized tensors depend on."""
        place = "" if self.gpu is None else f" on {self.gpu}"
        digest = hashlib.sha256((_ALGORITHM + (_SCALES_ALGORITHM if with_scales else "") + place).encode())
        for path in self.file.paths:
            status = path.stat()
            digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
        for name, choice in choices.items():
            digest.update(f"{name} {choice.type.name}\n".encode())
        digest.update(f"{token_ids.shape}".encode())
        digest.update(token_ids.tobytes())
        return digest.hexdigest()
