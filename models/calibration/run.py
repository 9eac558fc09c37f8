"""The calibration pass: a text goes through a model layer by layer, and a visitor is called with every product.

Only one layer's work is in memory at a time, and the next layer's input is all that has to be kept to resume later.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError, UnsupportedFormatError
from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer, Rows, WeightSource
from localinfer.models.calibration.evaluator import Evaluator, Streams
from localinfer.models.calibration.weights import StreamedWeights
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.checked_weights import CheckedWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import (
    crosses_layers,
    kv_layer_shapes,
    write_embedding,
    write_layer,
    write_output_norm,
)
from localinfer.models.decoder.graph import Graph
from localinfer.models.decoder.positions import RopeTables
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.methods.imatrix import ProductVisitor
from localinfer.quant.methods.workers import Workers
from localinfer.types import FloatArray, ProgressCallback

SEQUENCE_LENGTH = 512


@dataclass(frozen=True)
class CalibrationState:
    """State between two layers of a pass."""

    num_layers_done: int
    hidden: Streams
    """Input of the next layer, one float32[tokens, hidden_size] per model."""


def calibration_sequences(tokenizer: Tokenizer, text: str, max_tokens: int, context_length: int) -> NDArray[np.int32]:
    """Cut a text into sequences of equal length, int32[sequences, length], with the BOS token the model expects.

    Raises: RequestError if the text does not fill one sequence.
    """
    length = min(SEQUENCE_LENGTH, context_length, max_tokens)
    token_ids = np.array(tokenizer.encode(text), np.int32)
    count = min(token_ids.size, max_tokens) // length
    if count < 1:
        raise RequestError(
            f"the calibration text has {token_ids.size} tokens, but one sequence takes {length}; use a longer text"
        )
    # Spread over the whole text: its parts may differ.
    starts = np.arange(count) * (token_ids.size // length) // count
    sequences: NDArray[np.int32] = token_ids[starts[:, None] * length + np.arange(length)]
    if tokenizer.adds_bos and tokenizer.bos_token_id is not None:
        sequences[:, 0] = tokenizer.bos_token_id
    return sequences


def calibrate(
    file: ModelFile,
    token_ids: NDArray[np.int32],
    workers: Workers,
    visitor: ProductVisitor,
    *,
    quantized_rows: Callable[[str, NDArray[np.int32]], FloatArray] | None = None,
    start: CalibrationState | None = None,
    layer_done: Callable[[CalibrationState], None] | None = None,
    progress: ProgressCallback | None = None,
) -> int:
    """Run a model over a text and pass every product of its layers, then that of its output matrix, to a visitor.

    Returns the number of layers.

    The output matrix is left out where it is the embedding's. The visitor returns the matrix that the second model
    multiplies with from then on; it runs beside the original one if `quantized_rows` says what its embedding holds.

    token_ids: int32[sequences, length], as `calibration_sequences` gives them.
    quantized_rows: rows of an embedding in the second model, by the tensor's name and token ids; None runs the original
        model alone, and both inputs of a product are then the same.
    start: continue from this state. layer_done: called after every layer with the state to resume from.
    progress: called with a stage's name, the layers done and the layers in all; the output matrix counts as one.
    Raises: ModelFileError and below if the model cannot be run.
    """
    run = LayerRun(file, StreamedWeights(file), token_ids, workers, visitor, quantized_rows)
    total = run.num_layers + 1
    num_done, hidden = (0, run.embed()) if start is None else (start.num_layers_done, list(start.hidden))
    for layer in range(num_done, run.num_layers):
        if progress is not None:
            progress("calibrating", layer, total)
        hidden = run.layer(layer, hidden)
        if layer_done is not None:
            layer_done(CalibrationState(layer + 1, hidden))
    if progress is not None:
        progress("calibrating", run.num_layers, total)
    run.output(hidden)
    if progress is not None:
        progress("calibrating", total, total)
    return run.num_layers


class LayerRun:
    """A model over a text, one layer at a time, each from hidden states float32[tokens, hidden_size], one per model.

    Arguments and errors: as `calibrate`.
    """

    def __init__(
        self,
        file: ModelFile,
        weights: WeightSource,
        token_ids: NDArray[np.int32],
        workers: Workers,
        visitor: ProductVisitor,
        quantized_rows: Callable[[str, NDArray[np.int32]], FloatArray] | None = None,
    ) -> None:
        shapes = {name: record.shape for name, record in file.tensors.items()}
        length = token_ids.shape[1]
        config = replace(ModelConfig.from_metadata(file.metadata, shapes), context_length=max(length, 1))
        if config.is_encoder:
            raise RequestError(
                f"this model is an encoder ({config.architecture}), and calibration follows texts through models that "
                "generate; quantize it with the method rtn"
            )
        if crosses_layers(config):
            raise UnsupportedFormatError(
                f"the layers of this {config.architecture} model read more than the layer before them wrote, and a "
                "calibration holds one layer at a time; quantize it without a calibration text"
            )
        self.num_layers = config.num_layers
        self._evaluator = Evaluator(token_ids, workers, visitor, quantized_rows)
        self._builder = GraphBuilder(kv_layer_shapes(config))
        checked = CheckedWeights(weights, config.architecture)
        self._graph = Graph(config, find_architecture(config), checked, self._builder)
        self._tables = RopeTables(self._graph, length)
        self._hidden = self._graph.buffer("hidden", config.hidden_size, Rows.BATCH)

    def embed(self) -> Streams:
        """Compute the first layer's input."""
        return self._evaluated(write_embedding(self._graph))

    def layer(self, layer: int, hidden: Streams) -> Streams:
        """Compute the next layer's input from this one's."""
        self._evaluator.set_streams(self._hidden, hidden)
        return self._evaluated(write_layer(self._graph, layer, self._hidden, self._tables))

    def output(self, hidden: Streams) -> None:
        """Pass the output matrix to the visitor, where it is not the embedding's."""
        config, weights = self._graph.config, self._graph.weights
        if weights.has("output.weight"):
            self._evaluator.set_streams(self._hidden, hidden)
            normed = write_output_norm(self._graph, self._hidden)
            self._evaluated(normed)
            self._evaluator.visit(normed, [weights.linear("output.weight", config.vocab_size, config.hidden_size)])

    def _evaluated(self, out: Buffer) -> Streams:
        """Compute what was written since, and keep nothing but `out` and what later layers read."""
        self._evaluator.run(self._builder.ops)
        self._builder.ops.clear()
        self._evaluator.forget_all_but(out, *self._graph.carried)
        return self._evaluator.streams(out)
