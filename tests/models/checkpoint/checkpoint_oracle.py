"""Logits of a model file, of either kind, by the NumPy oracle: weights dequantized to float64, activations exact."""

import hashlib
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
        self._tensors = {name: (info, file.tensor_bytes(name)) for name, info in file.tensors.items()}
        self.shapes = {name: info.shape for name, info in file.tensors.items()}

    def digest(self) -> bytes:
        """Equal for equal names, types, shapes and bytes of all tensors."""
        found = hashlib.sha256()
        for name, (info, data) in self._tensors.items():
            found.update(f"{name} {info.type} {info.shape}\n".encode())
            found.update(np.ascontiguousarray(data))
        return found.digest()

    def _values(self, name: str) -> NDArray[np.float64]:
        info, data = self._tensors[name]
        return dequantize(data, info.type, info.shape).astype(np.float64)


def oracle_logits(
    path: Path, token_ids: NDArray[np.int32], known: dict[tuple[str, bytes], FloatArray] | None = None
) -> FloatArray:
    """float32[T, vocab_size] of every position.

    known: of the same token ids by what a file says, its metadata and tensors; what is computed is added.
    """
    with closing(open_model_file(path)) as file:
        weights = OracleWeights(file)
        if known is not None:
            contents = (repr(sorted(file.metadata.items())), weights.digest())
            if contents in known:
                return known[contents]
            known[contents] = found = _logits(file, weights, token_ids)
            return found
        return _logits(file, weights, token_ids)


def _logits(file: ModelFile, weights: OracleWeights, token_ids: NDArray[np.int32]) -> FloatArray:
    program = NumpyProgram(write_decoder(ModelConfig.from_metadata(file.metadata, weights.shapes), weights))
    pages = np.array([1], dtype=np.int64)
    rows = np.arange(len(token_ids), dtype=np.int32)
    return program.run(Batch(token_ids, [Segment(0, len(token_ids), pages, state=StateStep(0))], rows))
