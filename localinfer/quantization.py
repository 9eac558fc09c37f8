"""Quantize a model on disk: open it, compile the encoders it takes, write the new file."""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.quant.quantize_model import QuantizedModel

logger = logging.getLogger(__name__)


def quantize(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    type: str = "Q4_K_M",
    imatrix: str | os.PathLike[str] | None = None,
    threads: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> "QuantizedModel":
    """Write a model again as GGUF with its matrices quantized; what was written has every tensor's type and error.

    source: a GGUF file, or a Hugging Face folder. target: appears when it is whole, in place of an older file.
    type: a preset such as Q4_K_M, in any case. imatrix: a file of llama.cpp's importance, which rounding then minds.
    threads: how many compute; None takes the physical cores. The bytes do not depend on it.
    progress: called with a stage's name, the units done and the units in all.
    Raises: ModelFileError, RequestError.
    """
    from localinfer.kernels.cpu.encoding import ENCODERS, prepare_encoders
    from localinfer.kernels.cpu.pool import ThreadPool
    from localinfer.models.loader import open_model_file
    from localinfer.models.thread_choice import available_threads, checked_threads
    from localinfer.quant.imatrix import read_imatrix
    from localinfer.quant.presets import ModelFacts, choose_types, find_preset
    from localinfer.quant.quantize_model import quantize_model

    preset = find_preset(type)
    importance = None if imatrix is None else read_imatrix(imatrix)
    num_threads = available_threads() if threads is None else checked_threads(threads)
    file = open_model_file(source)
    pool = None
    try:
        if importance is not None and not importance.mean_squares.keys() & file.tensors.keys():
            raise RequestError(
                f"{importance.name} names no tensor of {file.path.name}; wanted the imatrix of this very model"
            )
        if file.tokenizer_error is not None:
            logger.warning("%s; the new file will have no tokenizer", file.tokenizer_error)
        facts = ModelFacts.from_metadata(file.metadata)
        choices = choose_types(preset, file.tensors, facts, has_importance=importance is not None)
        prepare_encoders(sorted({choice.type.name for choice in choices.values()} & ENCODERS.keys()), progress)
        pool = ThreadPool(num_threads)
        return quantize_model(file, target, preset, pool, importance=importance, progress=progress)
    finally:
        if pool is not None:
            pool.close()
        file.close()
