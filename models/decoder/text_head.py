"""A graph from texts to their vectors or scores: pooling, and the matrices of an embedding model or a reranker."""

from collections.abc import Sequence

from localinfer.errors import CorruptFileError
from localinfer.kernels.ops import Buffer, KVLayerShape, OpGraph, Rows, WeightSource
from localinfer.models.decoder.architecture import Norm
from localinfer.models.decoder.block_config import Pooling
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import (
    begin_graph,
    state_shapes,
    write_layers,
    write_output_norm,
)
from localinfer.models.decoder.draft_layers import write_previous_states
from localinfer.models.decoder.graph import Graph


def write_text_model(
    config: ModelConfig,
    weights: WeightSource,
    pooling: Pooling,
    classified: Pooling = Pooling.FIRST,
    context_length: int | None = None,
    *,
    kv_layers: Sequence[KVLayerShape] | None = None,
    marks: list[int] | None = None,
) -> OpGraph:
    """Write a model that gives what `pooling` makes of each text of a batch.

    NONE gives the normed hidden states of the output rows, float32[rows, hidden_size]; FIRST and LAST the same of one
    output row per text, through the matrices after pooling (`dense_2`, `dense_3`) if the model has them; LATE so for
    all of the output rows; MEAN so for the mean of each output row's text, which the batch then holds as a whole; RANK
    scores, float32[rows, labels], of what `classified` says. marks: as in `write_decoder`.
    Raises: as `write_decoder`; CorruptFileError for a reranker without a classifier.
    """
    graph, tables = begin_graph(config, weights, kv_layers, context_length)
    classified = Pooling.FIRST if graph.architecture.first_decision_layer is not None else classified
    is_mean = Pooling.MEAN in (pooling, classified if pooling is Pooling.RANK else pooling)
    # The states of every row are among those of the sequence, which a graph writes all of or none.
    carries = bool(config.num_draft_layers and state_shapes(config))
    hidden = write_layers(graph, tables, context_length, selects_output=not is_mean and not carries, marks=marks)
    states, hidden = hidden, write_output_norm(graph, hidden)
    if carries:
        write_previous_states(graph, hidden if graph.architecture.draft_layers.from_normed else states)
        hidden = hidden if is_mean else graph.select_output(hidden)
    if is_mean:
        pooled = graph.buffer("pooled", hidden.width, Rows.OUTPUT)
        graph.tape.mean_rows(pooled, hidden)
        hidden = pooled
    if pooling is Pooling.RANK:
        hidden = _write_classifier(graph, hidden)
    elif pooling is not Pooling.NONE:
        hidden = _write_dense(graph, hidden)
    return graph.tape.finish(hidden)


def _write_dense(graph: Graph, x: Buffer) -> Buffer:
    """The matrices after pooling, which Sentence Transformers calls Dense."""
    for name in ("dense_2", "dense_3"):
        if graph.weights.has(f"{name}.weight"):
            x = graph.product(name, x, name, graph.weights.shape(f"{name}.weight")[0])
    return x


def _write_classifier(graph: Graph, x: Buffer) -> Buffer:
    weights, tape = graph.weights, graph.tape
    is_decision = graph.architecture.first_decision_layer is not None
    if is_decision:
        graph.norm(x, x, "cls.norm", kind=Norm.LAYER)
    if weights.has("cls.weight"):
        x = graph.product("cls", x, "cls", x.width)
        activation = graph.architecture.classifier_activation
        if activation is None:
            tape.softcap(x, 1.0)  # tanh
        else:
            tape.activation(x, x, activation)
        if weights.has("cls.norm.weight") and not is_decision:
            graph.norm(x, x, "cls.norm")
    elif not weights.has("cls.output.weight"):
        raise CorruptFileError(
            "cls.weight and cls.output.weight are not in the file; a reranker (pooling_type 4) needs one of them. "
            "Convert the model again or download another copy."
        )
    if weights.has("cls.output.weight"):
        shape = weights.shape("cls.output.weight")
        x = graph.product("cls.output", x, "cls.output", shape[0] if len(shape) == 2 else 1)
    return x
