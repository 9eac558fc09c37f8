"""A graph from texts to their vectors or scores: pooling, and the matrices of an embedding model or a reranker."""

from collections.abc import Sequence

from localinfer.errors import CorruptFileError
from localinfer.kernels.ops import Buffer, KVLayerShape, OpGraph, Projection, Rows, WeightSource
from localinfer.models.decoder.block_config import Pooling
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.decoder import (
    begin_graph,
    state_shapes,
    write_embedding,
    write_layer,
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
    output row per text, through the matrices after pooling (`dense_2`, `dense_3`) if the model has them; MEAN so for
    the mean of each output row's text, which the batch then holds as a whole; RANK scores, float32[rows, labels], of
    what `classified` says. marks: as in `write_decoder`.
    Raises: as `write_decoder`; CorruptFileError for a reranker without a classifier.
    """
    graph, tables = begin_graph(config, weights, kv_layers, context_length)
    is_mean = Pooling.MEAN in (pooling, classified if pooling is Pooling.RANK else pooling)
    hidden = write_embedding(graph, max(context_length or 0, config.context_length))
    # The states of every row are among those of the sequence, which a graph writes all of or none.
    carries = bool(config.num_draft_layers and state_shapes(config))
    marks = [] if marks is None else marks
    for layer in range(config.num_main_layers):
        marks.append(len(graph.tape.ops))
        is_last = layer == config.num_main_layers - 1
        hidden = write_layer(graph, layer, hidden, tables, selects_output=is_last and not is_mean and not carries)
    marks.append(len(graph.tape.ops))
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
            x = _product(graph, name, x, graph.weights.shape(f"{name}.weight")[0])
    return x


def _write_classifier(graph: Graph, x: Buffer) -> Buffer:
    weights, tape = graph.weights, graph.tape
    if weights.has("cls.weight"):
        x = _product(graph, "cls", x, x.width)
        activation = graph.architecture.classifier_activation
        if activation is None:
            tape.softcap(x, 1.0)  # tanh
        else:
            tape.activation(x, x, activation)
        if weights.has("cls.norm.weight"):
            graph.norm(x, x, "cls.norm")
    elif not weights.has("cls.output.weight"):
        raise CorruptFileError(
            "cls.weight and cls.output.weight are not in the file; a reranker (pooling_type 4) needs one of them. "
            "Convert the model again or download another copy."
        )
    if weights.has("cls.output.weight"):
        shape = weights.shape("cls.output.weight")
        x = _product(graph, "cls.output", x, shape[0] if len(shape) == 2 else 1)
    return x


def _product(graph: Graph, name: str, x: Buffer, num_rows: int) -> Buffer:
    """The named matrix times x, plus its bias if there is one."""
    out = graph.buffer(name, num_rows, x.rows)
    weight = graph.weights.linear(f"{name}.weight", num_rows, x.width)
    graph.tape.matmul(x, [Projection(weight, out, graph.bias(name, num_rows))])
    return out
