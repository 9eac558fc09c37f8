"""Quantize a whole model by calibration, layer by layer, each one kept on disk when it is done."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu.program import ThreadPool
from localinfer.models.calibration.run import CalibrationState, calibrate
from localinfer.models.calibration.scales import GroupScales, choose_scales, fold
from localinfer.models.calibration.weights import embedding_rows
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.encoding import encode
from localinfer.quant.formats.reference import dequantize
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.methods.awq import Rounding, ScaledModel
from localinfer.quant.methods.gptq import PreparedTensor, RoundingVisitor
from localinfer.quant.methods.grids import LEVEL_RANGES
from localinfer.quant.methods.presets import TypeChoice, is_quantized
from localinfer.quant.methods.workers import Workers
from localinfer.quant.pipeline.partial_results import PartialResults
from localinfer.types import FloatArray, ProgressCallback


def round_by_calibration(
    file: ModelFile,
    token_ids: NDArray[np.int32],
    choices: Mapping[str, TypeChoice],
    pool: ThreadPool,
    workers: Workers,
    results: PartialResults,
    *,
    progress: ProgressCallback | None = None,
) -> Mapping[str, PreparedTensor]:
    """Quantize the matrices that presets touch, but for embeddings, and return them by name.

    Those that the preset leaves in floats compensate for earlier errors too; blocks of the wanted type stay.

    They stay in `results` and are read from there on access; the caller deletes those afterwards. A run that finds
    results of its own there continues after their last layer.

    token_ids: int32[sequences, length] of the calibration text. choices: what each tensor becomes.
    Raises: ModelFileError and below if the model cannot be run, RequestError if a weight cannot be encoded.
    """
    todo = {name: choice for name, choice in choices.items() if _changes(file.tensors[name], choice)}
    visitor = RoundingVisitor(todo, file.tensors, pool, workers)

    def quantized_rows(name: str, ids: NDArray[np.int32]) -> FloatArray:
        rows, type = embedding_rows(file, name, ids), choices[name].type
        return dequantize(encode(pool, rows, type), type, rows.shape)

    def layer_done(state: CalibrationState) -> None:
        results.save(state.num_layers_done, visitor.take_finished(), state.hidden)

    found = results.load()
    start = None if found is None else CalibrationState(found[0], found[1])
    num_layers = calibrate(
        file,
        token_ids,
        workers,
        visitor,
        quantized_rows=quantized_rows,
        start=start,
        layer_done=layer_done,
        progress=progress,
    )
    return results.tensors(num_layers, visitor.take_finished())


def _changes(record: TensorRecord, choice: TypeChoice) -> bool:
    is_plain = choice.type in (TensorType.F16, TensorType.BF16)
    return is_quantized(record) and (record.type is not choice.type or is_plain)


def scale_for_rounding(
    file: ModelFile,
    token_ids: NDArray[np.int32],
    choices: Mapping[str, TypeChoice],
    pool: ThreadPool,
    workers: Workers,
    *,
    is_proven_by_feedback: bool = True,
    progress: ProgressCallback | None = None,
) -> tuple[ScaledModel, list[GroupScales]]:
    """Fold scales into a model that make its matrices round better; return it and what was folded.

    is_proven_by_feedback: keep a layer's scales only if `round_by_calibration` loses less with them, too.
    Other arguments and errors: as there.
    """
    todo = {name: choice for name, choice in choices.items() if is_quantized(file.tensors[name])}

    def rounding_of(name: str) -> Rounding | None:
        if name not in todo or todo[name].type not in LEVEL_RANGES:
            return None
        type = todo[name].type

        def rounded(weights: FloatArray, importance: FloatArray) -> FloatArray:
            return dequantize(encode(pool, weights, type, importance), type, weights.shape)

        return rounded

    def final() -> RoundingVisitor:
        return RoundingVisitor(todo, file.tensors, pool, workers)

    found = choose_scales(
        file, token_ids, workers, rounding_of, final=final if is_proven_by_feedback else None, progress=progress
    )
    return fold(file, found), found
