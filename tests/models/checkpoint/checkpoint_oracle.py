"""Logits of a model file, of either kind, by the NumPy oracle: weights dequantized to float64, activations exact."""

from contextlib import closing
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.program import Batch, Segment, StateStep
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import write_decoder
from localinfer.models.load.loader import open_model_file
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.formats.dequantize import dequantize
from localinfer.types import FloatArray
from tests.support.oracle import NumpyProgram, NumpyWeights


class OracleWeights(NumpyWeights):
    """The oracle's `WeightSource` over an open model file of either kind."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self.shapes = {name: info.shape for name, info in file.tensors.items()}

    def _values(self, name: str) -> NDArray[np.float64]:
        info = self._file.tensor(name)
        return dequantize(self._file.tensor_bytes(name), info.type, info.shape).astype(np.float64)


def oracle_logits(path: Path, token_ids: NDArray[np.int32]) -> FloatArray:
    """float32[T, vocab_size] of every position."""
    with closing(open_model_file(path)) as file:
        weights = OracleWeights(file)
        program = NumpyProgram(write_decoder(ModelConfig.from_metadata(file.metadata, weights.shapes), weights))
        pages = np.array([1], dtype=np.int64)
        rows = np.arange(len(token_ids), dtype=np.int32)
        return program.run(Batch(token_ids, [Segment(0, len(token_ids), pages, state=StateStep(0))], rows))
