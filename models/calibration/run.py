"""The calibration pass: a text goes through a model layer by layer, and a visitor sees every product on the way.

Only one layer's work is in memory at a time, and what the next layer reads is all that has to be kept to go on later.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import RequestError
from localinfer.models.calibration.tape import CalibrationTape, StreamedWeights, Streams
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.attention import RopeTables
from localinfer.models.decoder.checked_weights import CheckedWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import write_embedding, write_layer, write_output_norm
from localinfer.models.decoder.graph import Graph
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.quant.checkpoint.model_file import ModelFile
from localinfer.quant.methods.hooks import ProductVisitor
from localinfer.quant.methods.workers import Workers

SEQUENCE_LENGTH = 512

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class CalibrationState:
    """Where a pass stands: layers done, and what the next layer reads, one float32[tokens, hidden_size] per model."""

    num_layers_done: int
    hidden: Streams


def calibration_sequences(tokenizer: Tokenizer, text: str, max_tokens: int, context_length: int) -> NDArray[np.int32]:
    """Cut a text into sequences of equal length, int32[sequences, length], each starting as the model wants a text.

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
    progress: Callable[[str, int, int], None] | None = None,
) -> int:
    """Run a model over a text and show every product of its layers, then that of its output matrix, to a visitor.

    Returns the number of layers.

    The output matrix is not shown where it is the embedding's. What the visitor returns is what the second model
    multiplies with from then on; it runs beside the original one if `quantized_rows` says what its embedding holds.

    token_ids: int32[sequences, length], as `calibration_sequences` gives them.
    quantized_rows: rows of an embedding in the second model, by the tensor's name and token ids; None runs the original
        model alone, and both inputs of a product are then the same.
    start: continue from this state. layer_done: called after every layer with the state to go on from.
    progress: called with a stage's name, the layers done and the layers in all; the output matrix counts as one.
    Raises: ModelFileError and below if the model cannot be run.
    """
    shapes = {name: info.shape for name, info in file.tensors.items()}
    config = ModelConfig.from_metadata(file.metadata, shapes)
    length = token_ids.shape[1]
    config = replace(config, context_length=max(length, 1))
    tape = CalibrationTape(token_ids, workers, visitor, quantized_rows)
    graph = Graph(config, find_architecture(config), CheckedWeights(StreamedWeights(file), config.architecture), tape)
    tables = RopeTables(graph, length)
    total = config.num_layers + 1
    hidden = write_embedding(graph, length)
    num_done = 0
    if start is not None:
        num_done = start.num_layers_done
        tape.set_streams(hidden, list(start.hidden))
    for layer in range(num_done, config.num_layers):
        if progress is not None:
            progress("calibrating", layer, total)
        hidden = write_layer(graph, layer, hidden, tables)
        tape.forget_all_but(hidden)
        if layer_done is not None:
            layer_done(CalibrationState(layer + 1, tape.streams(hidden)))
    if progress is not None:
        progress("calibrating", config.num_layers, total)
    if graph.weights.has("output.weight"):
        normed = write_output_norm(graph, hidden)
        tape.forget_all_but(normed)
        tape.visit(normed, [graph.weights.linear("output.weight", config.vocab_size, config.hidden_size)])
    if progress is not None:
        progress("calibrating", total, total)
    return config.num_layers
