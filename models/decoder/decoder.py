"""The decoder: from a model's configuration and weights to a graph of ops, layer by layer."""

from collections.abc import Callable, Sequence

from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer, KVLayerShape, OpGraph, Projection, Rows, WeightSource
from localinfer.models.decoder.architecture import Blocks
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
from localinfer.models.decoder.gemma3n_blocks import merge_streams, write_gemma3n_layer, write_streams
from localinfer.models.decoder.gemma_blocks import write_gemma4_layer, write_layer_inputs
from localinfer.models.decoder.graph import Graph, refuse
from localinfer.models.decoder.sparse_attention import index_cache_shapes


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
    has_output_head: if false, the graph returns normed hidden states in place of logits.
    Raises: UnsupportedFormatError if the architecture is unknown; CorruptFileError if a tensor is missing or its shape
    contradicts the metadata.
    """
    graph, tables = _begin(config, weights, kv_layers, context_length)
    hidden = write_embedding(graph, max(context_length or 0, config.context_length))
    for layer in range(config.num_layers):
        hidden = write_layer(graph, layer, hidden, tables)
    return graph.tape.finish(_write_logits(graph, hidden) if has_output_head else write_output_norm(graph, hidden))


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
    graph, tables = _begin(config, weights, kv_layers, context_length)
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
    graph, tables = _begin(config, weights, kv_layers, context_length)
    hidden = graph.buffer("hidden", config.hidden_size, Rows.BATCH)
    graph.tape.receive(hidden)
    for layer in range(first_layer, config.num_layers):
        hidden = write_layer(graph, layer, hidden, tables)
    return graph.tape.finish(_write_logits(graph, hidden))


def _begin(
    config: ModelConfig,
    weights: WeightSource,
    kv_layers: Sequence[KVLayerShape] | None,
    context_length: int | None,
) -> tuple[Graph, RopeTables]:
    architecture = find_architecture(config)
    if config.latent is not None and not architecture.latent_attention:
        raise refuse(config, "has the settings of latent attention")
    builder = GraphBuilder(kv_layer_shapes(config) if kv_layers is None else kv_layers)
    graph = Graph(config, architecture, CheckedWeights(weights, config.architecture), builder)
    return graph, RopeTables(graph, context_length or config.context_length)


def kv_layer_shapes(config: ModelConfig, *, parts_windows: bool = False) -> list[KVLayerShape]:
    """Keys and values of each layer per position, in layer order, then the keys of indexers.

    parts_windows: sliding-window layers are stored apart from the others.
    """
    architecture = find_architecture(config)
    # Positions before a chunk are also before a window of the same size.
    limits = (architecture.windows or architecture.chunks) if parts_windows else ()
    windows = [limit if limit < config.context_length else 0 for limit in limits or [0] * config.num_layers]
    first_shared = config.num_layers - config.num_shared_layers
    layers = [
        KVLayerShape(num_kv_heads if layer < first_shared else 0, *config.head_sizes(layer), window)
        for layer, (num_kv_heads, window) in enumerate(zip(config.num_kv_heads, windows, strict=True))
    ]
    return [*layers, *index_cache_shapes(config)]


def crosses_layers(config: ModelConfig) -> bool:
    """Whether layers read more than the layer before wrote: keys and values, choices or inputs from further back."""
    indexer = config.indexer
    takes_choices = indexer is not None and indexer.block_size == 1 and not all(indexer.layers)
    is_streamed = find_architecture(config).blocks is Blocks.GEMMA3N
    return bool(config.num_shared_layers or config.per_layer_size or takes_choices or is_streamed)


def write_embedding(graph: Graph, context_length: int) -> Buffer:
    """Write the embedding and return its result. context_length: the longest sequence."""
    config, architecture, tape = graph.config, graph.architecture, graph.tape
    hidden = graph.buffer("hidden", config.hidden_size, Rows.BATCH)
    table = graph.weights.embedding("token_embd.weight", config.vocab_size, config.hidden_size)
    tape.embed(hidden, table, architecture.embedding_scale)
    if architecture.learned_positions:
        num_positions = max(context_length, graph.weights.shape("position_embd.weight")[0])
        tape.embed_positions(hidden, graph.weights.embedding("position_embd.weight", num_positions, hidden.width))
    if architecture.embedding_norm is not None:
        graph.norm(hidden, hidden, architecture.embedding_norm)
    if config.per_layer_size:
        write_layer_inputs(graph, hidden)
    return write_streams(graph, hidden) if architecture.blocks is Blocks.GEMMA3N else hidden


def write_layer(graph: Graph, layer: int, hidden: Buffer, tables: RopeTables) -> Buffer:
    """Write one layer and return its result: `hidden` itself, or in the last layer the output rows only."""
    architecture = graph.architecture
    if architecture.blocks is not Blocks.PLAIN:
        return _LAYER_WRITERS[architecture.blocks](graph, layer, hidden, tables)
    x = graph.block_norm(layer, architecture.attention_norm, hidden, "attention_input")
    write = write_latent_attention if architecture.latent_attention else write_attention
    attended = write(graph, layer, x, tables)
    parallel_x = None
    if architecture.parallel:
        is_shared = architecture.feed_forward_norm == architecture.attention_norm
        parallel_x = x if is_shared else graph.block_norm(layer, architecture.feed_forward_norm, hidden, "ffn_input")
    if layer == graph.config.num_layers - 1:
        # After the last cache write only output rows are needed, so prompts skip the rest of this layer.
        hidden, attended = graph.select_output(hidden), graph.select_output(attended)
        parallel_x = parallel_x and graph.select_output(parallel_x)
    write_attention_output(graph, layer, hidden, attended)
    if parallel_x is None:
        parallel_x = graph.block_norm(layer, architecture.feed_forward_norm, hidden, "ffn_input")
    write_feed_forward(graph, layer, hidden, parallel_x)
    return hidden


_LAYER_WRITERS: dict[Blocks, Callable[[Graph, int, Buffer, RopeTables], Buffer]] = {
    Blocks.GEMMA3N: write_gemma3n_layer,
    Blocks.GEMMA4: write_gemma4_layer,
}


def write_output_norm(graph: Graph, hidden: Buffer) -> Buffer:
    """Write the norm after the last layer and return its result."""
    if graph.architecture.blocks is Blocks.GEMMA3N:
        hidden = merge_streams(graph, hidden)
    normed = graph.buffer("output_norm", hidden.width, hidden.rows)
    graph.norm(normed, hidden, "output_norm")
    return normed


def _write_logits(graph: Graph, hidden: Buffer) -> Buffer:
    config, tape = graph.config, graph.tape
    normed = write_output_norm(graph, hidden)
    is_tied = not graph.weights.has("output.weight")
    name = "token_embd.weight" if is_tied else "output.weight"
    logits = graph.buffer("logits", config.vocab_size, hidden.rows)
    weight = graph.weights.linear(name, config.vocab_size, normed.width)
    bias = graph.bias("output", config.vocab_size)
    tape.matmul(normed, [Projection(weight, logits, bias, scale=graph.architecture.logit_scale)])
    softcap = config.logit_softcap or graph.architecture.logit_softcap
    if softcap:
        tape.softcap(logits, softcap)
    return logits
