"""The decoder: from a model's configuration and weights to a graph of ops, layer by layer."""

from collections.abc import Sequence

from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer, KVLayerShape, OpGraph, Projection, Rows, WeightSource
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.attention import (
    RopeTables,
    write_attention,
    write_attention_output,
    write_latent_attention,
)
from localinfer.models.decoder.checked_weights import CheckedWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.feed_forward import write_feed_forward
from localinfer.models.decoder.graph import Graph, refuse


def write_decoder(
    config: ModelConfig,
    weights: WeightSource,
    context_length: int | None = None,
    *,
    kv_layers: Sequence[KVLayerShape] | None = None,
    has_output_head: bool = True,
) -> OpGraph:
    """Write every op of the model.

    context_length: the longest sequence, if it differs from the model's own (for LongRoPE).
    kv_layers: the cache's layers, if not `kv_layer_shapes(config)`.
    has_output_head: if false, the graph returns normed hidden states in place of logits; an encoder's always does.
    Raises: UnsupportedFormatError if the architecture is unknown; CorruptFileError if a tensor is missing or its shape
    contradicts the metadata.
    """
    graph, tables = begin_graph(config, weights, kv_layers, context_length)
    hidden = write_embedding(graph, max(context_length or 0, config.context_length))
    for layer in range(config.num_layers):
        hidden = write_layer(graph, layer, hidden, tables)
    has_logits = has_output_head and not config.is_encoder
    return graph.tape.finish(_write_logits(graph, hidden) if has_logits else write_output_norm(graph, hidden))


def write_first_layers(
    config: ModelConfig,
    weights: WeightSource,
    num_layers: int,
    context_length: int,
    kv_layers: Sequence[KVLayerShape],
) -> OpGraph:
    """Write the embedding and the first layers, fewer than all: see `write_decoder`.

    The graph returns the hidden states of the output rows, float32[rows, hidden_size].
    """
    assert num_layers < config.num_layers, "the last layer goes with the output head"
    graph, tables = begin_graph(config, weights, kv_layers, context_length)
    hidden = write_embedding(graph, max(context_length, config.context_length))
    for layer in range(num_layers):
        hidden = write_layer(graph, layer, hidden, tables)
    return graph.tape.finish(graph.select_output(hidden))


def write_last_layers(
    config: ModelConfig,
    weights: WeightSource,
    first_layer: int,
    context_length: int,
    kv_layers: Sequence[KVLayerShape],
) -> OpGraph:
    """Write the layers from `first_layer` on and the output head, which read received hidden states."""
    graph, tables = begin_graph(config, weights, kv_layers, context_length)
    hidden = graph.buffer("hidden", config.hidden_size, Rows.BATCH)
    graph.tape.receive(hidden)
    for layer in range(first_layer, config.num_layers):
        hidden = write_layer(graph, layer, hidden, tables)
    return graph.tape.finish(_write_logits(graph, hidden))


def begin_graph(
    config: ModelConfig,
    weights: WeightSource,
    kv_layers: Sequence[KVLayerShape] | None,
    context_length: int | None,
) -> tuple[Graph, RopeTables]:
    """An empty graph and the model's RoPE tables: see `write_decoder`."""
    architecture = find_architecture(config)
    if config.latent is not None and not architecture.latent_attention:
        raise refuse(config, "has the settings of latent attention")
    builder = GraphBuilder(kv_layer_shapes(config) if kv_layers is None else kv_layers)
    graph = Graph(config, architecture, CheckedWeights(weights, config.architecture), builder)
    return graph, RopeTables(graph, context_length or config.context_length)


def kv_layer_shapes(config: ModelConfig, *, parts_windows: bool = False) -> list[KVLayerShape]:
    """Keys and values of each layer per position, in layer order; all layers of an encoder share one.

    parts_windows: sliding-window layers are stored apart from the others.
    """
    architecture = find_architecture(config)
    if config.is_encoder:
        if len(set(config.num_kv_heads)) > 1:
            raise refuse(config, "has different numbers of KV heads in its layers")
        return [KVLayerShape(config.num_kv_heads[0], config.head_dim, config.value_head_dim)]
    # Positions before a chunk are also before a window of the same size.
    limits = (architecture.windows or architecture.chunks) if parts_windows else ()
    windows = [limit if limit < config.context_length else 0 for limit in limits or [0] * config.num_layers]
    return [
        KVLayerShape(num_kv_heads, config.head_dim, config.value_head_dim, window)
        for num_kv_heads, window in zip(config.num_kv_heads, windows, strict=True)
    ]


def write_embedding(graph: Graph, context_length: int) -> Buffer:
    """Write the embedding and return its result. context_length: the longest sequence."""
    config, architecture, tape = graph.config, graph.architecture, graph.tape
    hidden = graph.buffer("hidden", config.hidden_size, Rows.BATCH)
    table = graph.weights.embedding("token_embd.weight", config.vocab_size, config.hidden_size)
    tape.embed(hidden, table, architecture.embedding_scale)
    if architecture.learned_positions:
        num_positions = max(context_length, graph.weights.shape("position_embd.weight")[0])
        tape.embed_positions(hidden, graph.weights.embedding("position_embd.weight", num_positions, hidden.width))
    if architecture.has_token_types:
        width = hidden.width
        types = graph.weights.shape("token_types.weight")
        types_table = graph.weights.vector("token_types.weight", (types[0], width) if len(types) == 2 else (width,))
        # Texts are of the first type throughout, as in the runtimes that GGUF files are made for.
        tape.add_vector(hidden, types_table.reshape(-1)[:width])
    if architecture.embedding_norm is not None:
        graph.norm(hidden, hidden, architecture.embedding_norm)
    return hidden


def write_layer(graph: Graph, layer: int, hidden: Buffer, tables: RopeTables, *, selects_output: bool = True) -> Buffer:
    """Write one layer and return its result: `hidden` itself, or in the last layer the output rows only.

    selects_output: whether the last layer does that.
    """
    architecture = graph.architecture
    has_norm = layer > 0 or architecture.first_attention_norm
    x = graph.block_norm(layer, architecture.attention_norm if has_norm else None, hidden, "attention_input")
    write = write_latent_attention if architecture.latent_attention else write_attention
    attended = write(graph, layer, x, tables)
    parallel_x = None
    if architecture.parallel:
        is_shared = architecture.feed_forward_norm == architecture.attention_norm
        parallel_x = x if is_shared else graph.block_norm(layer, architecture.feed_forward_norm, hidden, "ffn_input")
    if layer == graph.config.num_layers - 1 and selects_output:
        # After the last cache write only output rows are needed, so prompts skip the rest of this layer.
        hidden, attended = graph.select_output(hidden), graph.select_output(attended)
        parallel_x = parallel_x and graph.select_output(parallel_x)
    entered = None
    if architecture.second_sum_norm is not None:
        entered = graph.buffer("layer_input", hidden.width, hidden.rows)
        graph.tape.add(entered, hidden, hidden, 0.0)
    write_attention_output(graph, layer, hidden, attended)
    graph.sum_norm(layer, architecture.attention_sum_norm, hidden)
    if entered is not None:
        graph.tape.add(hidden, hidden, entered)
        graph.sum_norm(layer, architecture.second_sum_norm, hidden)
    if parallel_x is None:
        parallel_x = graph.block_norm(layer, architecture.feed_forward_norm, hidden, "ffn_input")
    write_feed_forward(graph, layer, hidden, parallel_x)
    graph.sum_norm(layer, architecture.feed_forward_sum_norm, hidden)
    return hidden


def write_output_norm(graph: Graph, hidden: Buffer) -> Buffer:
    """Write the norm after the last layer, if there is one, and return its result."""
    name = graph.architecture.output_norm
    if name is None:
        return hidden
    normed = graph.buffer("output_norm", hidden.width, hidden.rows)
    graph.norm(normed, hidden, name)
    return normed


def _write_logits(graph: Graph, hidden: Buffer) -> Buffer:
    config, tape = graph.config, graph.tape
    normed = write_output_norm(graph, hidden)
    is_tied = not graph.weights.has("output.weight")
    name = "token_embd.weight" if is_tied else "output.weight"
    logits = graph.buffer("logits", config.vocab_size, hidden.rows)
    weight = graph.weights.linear(name, config.vocab_size, hidden.width)
    bias = graph.bias("output", config.vocab_size)
    tape.matmul(normed, [Projection(weight, logits, bias, scale=graph.architecture.logit_scale)])
    if config.logit_softcap:
        tape.softcap(logits, config.logit_softcap)
    return logits
