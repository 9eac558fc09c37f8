"""The decoder: from a model's configuration and weights to a graph of ops, layer by layer."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer, KVLayerShape, OpGraph, Projection, Rows, StateShape, WeightSource
from localinfer.models.decoder import draft_layers
from localinfer.models.decoder.architecture import Blocks, Mixer
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.attention import (
    write_attention,
    write_latent_attention,
    write_mixer_output,
    write_unabsorbed_attention,
)
from localinfer.models.decoder.checked_weights import ROW_TYPES, CheckedWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.feed_forward import has_feed_forward, write_feed_forward, write_router
from localinfer.models.decoder.graph import Graph, divided, refuse
from localinfer.models.decoder.positions import RopeTables
from localinfer.models.decoder.sparse_attention import index_cache_shapes
from localinfer.system.registry import Registry, find_part

if TYPE_CHECKING:
    from localinfer.models.decoder.recurrent import RecurrentMixer

_ADAPTED = "localinfer.models.decoder.adapters:AdaptedBuilder"
_BLOCKS = "localinfer.models.decoder.gemma_blocks"
_RECURRENT = "localinfer.models.decoder.recurrent"
RECURRENT_MIXERS: "Registry[Mixer, RecurrentMixer]" = Registry(
    tables={f"{_RECURRENT}:RECURRENT_MIXERS": set(Mixer) - {Mixer.ATTENTION, Mixer.NONE}}
)
"""Recurrent blocks, whose module is imported for a model that has some."""
_WHOLE_LAYERS: Registry[Blocks, Callable[..., Buffer]] = Registry(
    {
        Blocks.GEMMA4: f"{_BLOCKS}:write_gemma4_layer",
        Blocks.ZAMBA2: f"{_RECURRENT}:write_zamba2_layer",
    }
)
"""Functions that write a layer as a whole, by its kind of blocks."""


def write_decoder(
    config: ModelConfig,
    weights: WeightSource,
    context_length: int | None = None,
    *,
    kv_layers: Sequence[KVLayerShape] | None = None,
    has_output_head: bool = True,
    shows_states: bool = False,
    marks: list[int] | None = None,
) -> OpGraph:
    """Write every op of the model.

    context_length: the longest sequence, if it differs from the model's own (for LongRoPE).
    kv_layers: the cache's layers, if not `kv_layer_shapes(config)`.
    has_output_head: if false, the graph returns normed hidden states in place of logits; an encoder's always does.
    shows_states: beside the logits the graph shows what they come from, normed, for a draft model.
    marks: gets the number of ops before each layer, and before what follows the last.
    Raises: UnsupportedFormatError if the architecture is unknown; CorruptFileError if a tensor is missing or its shape
    contradicts the metadata.
    """
    graph, tables = begin_graph(config, weights, kv_layers, context_length)
    has_drafts = has_output_head and config.num_draft_layers > 0
    hidden = write_layers(graph, tables, context_length, selects_output=not has_drafts, marks=marks)
    normed = write_output_norm(graph, hidden)
    if not has_output_head or config.is_encoder:
        return graph.tape.finish(normed)
    if not has_drafts:
        return graph.tape.finish(_write_logits(graph, normed), normed if shows_states else None)
    states = normed if graph.architecture.draft_layers.from_normed else hidden
    previous = draft_layers.write_previous_states(graph, states)
    for layer in range(config.num_main_layers, config.num_layers):
        x = draft_layers.write_draft_input(graph, layer, previous)
        x = graph.block_norm(layer, graph.architecture.attention_norm, x, "attention_input")
        _write_mixer(graph, layer, x, tables)
    selected = graph.select_output(normed)
    shown = selected if states is normed else graph.select_output(hidden)
    # Of those layers only what they cache is needed.
    return draft_layers.without_unused(graph.tape.finish(_write_logits(graph, selected), shown))


def write_layers(
    graph: Graph, tables: RopeTables, context_length: int | None, *, selects_output: bool, marks: list[int] | None
) -> Buffer:
    """Write the embedding and all layers but draft layers; selects_output: the result has the output rows only."""
    marks, last = [] if marks is None else marks, graph.config.num_main_layers - 1
    hidden = write_embedding(graph, context_length)
    for layer in range(last + 1):
        marks.append(len(graph.tape.ops))
        if layer == graph.architecture.first_decision_layer and graph.architecture.output_norm is not None:
            graph.norm(hidden, hidden, graph.architecture.output_norm)
            _write_token_types(graph, hidden)
        hidden = write_layer(graph, layer, hidden, tables, selects_output=selects_output and layer == last)
        if graph.config.takes_media and layer < graph.config.num_deepstack_layers:
            graph.tape.embed_media(hidden, layer + 1, adds=True)
    marks.append(len(graph.tape.ops))
    return hidden


def write_draft_layer(
    config: ModelConfig,
    weights: WeightSource,
    layer: int,
    context_length: int | None = None,
    *,
    kv_layers: Sequence[KVLayerShape] | None = None,
    num_tokens: int | None = None,
) -> OpGraph:
    """Write a layer for next-token prediction as a model of its own, of one row per segment.

    Its row at position t has the token there and the hidden states that the segment carries of position t - 1, and
    gives the logits of token t + 1 and the hidden states for the next row. num_tokens: the logits of the first tokens
    of the vocabulary only, None for all. Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2.
    Raises: as `write_decoder`.
    """
    graph, tables = begin_graph(config, weights, kv_layers, context_length)
    previous = graph.buffer("previous_hidden", config.hidden_size, Rows.BATCH)
    graph.tape.previous_row(previous)
    hidden = write_layer(
        graph, layer, draft_layers.write_draft_input(graph, layer, previous), tables, selects_output=True
    )
    normed = draft_layers.write_draft_norm(graph, layer, hidden)
    name = f"blk.{layer}.nextn.shared_head_head"
    logits = _write_logits(graph, normed, name if graph.weights.has(f"{name}.weight") else None, num_tokens)
    return graph.tape.finish(logits, normed if graph.architecture.draft_layers.from_normed else hidden)


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
    checked = CheckedWeights(weights, config.architecture)
    layers = kv_layer_shapes(config) if kv_layers is None else kv_layers
    # Adapters change texts with pictures or sounds.
    is_adapted = config.takes_media and checked.has(ROW_TYPES)
    builder: GraphBuilder = find_part(_ADAPTED)(layers, checked) if is_adapted else GraphBuilder(layers)
    graph = Graph(config, architecture, checked, builder)
    return graph, RopeTables(graph, context_length or config.context_length)


def kv_layer_shapes(config: ModelConfig, *, parts_windows: bool = False) -> list[KVLayerShape]:
    """Keys and values of each layer per position, in layer order, no heads in a layer that caches nothing, and one
    layer for all of an encoder's that are alike; then the keys of indexers.

    parts_windows: sliding-window layers are stored apart from the others.
    """
    architecture = find_architecture(config)
    if config.is_encoder:
        return [KVLayerShape(*shape) for shape in config.cached_shapes]
    # Positions before a chunk are also before a window of the same size.
    limits = (architecture.windows or architecture.chunks) if parts_windows else ()
    windows = [limit if limit < config.context_length else 0 for limit in limits or [0] * config.num_layers]
    first_shared = config.num_layers - config.num_shared_layers
    kept = [num_kv_heads if layer < first_shared else 0 for layer, num_kv_heads in enumerate(config.num_kv_heads)]
    layers = [
        KVLayerShape(num_kv_heads, *config.head_sizes(layer), window if num_kv_heads else 0)
        for layer, (num_kv_heads, window) in enumerate(zip(kept, windows, strict=True))
    ]
    return [*layers, *index_cache_shapes(config)]


def crosses_layers(config: ModelConfig) -> bool:
    """Return whether layers read keys and values, choices or inputs from further back than the layer before."""
    indexer = config.indexer
    takes_choices = indexer is not None and indexer.block_size == 1 and not all(indexer.layers)
    is_streamed = find_architecture(config).blocks is Blocks.GEMMA3N
    return bool(config.num_shared_layers or config.per_layer_size or takes_choices or is_streamed)


def state_shapes(config: ModelConfig) -> list[StateShape]:
    """The states that the recurrent layers keep per sequence, in the order of the graph; empty without such layers."""
    architecture = find_architecture(config)
    beside = architecture.mixer_beside
    mixers = architecture.mixers if beside is None else (beside,) * config.num_layers
    found = [RECURRENT_MIXERS[mixer].states(config) for mixer in mixers if mixer in RECURRENT_MIXERS]
    shapes = [shape for states in found for shape in states]
    return shapes + draft_layers.carried_states(config) if shapes else []


def write_embedding(graph: Graph, context_length: int | None = None) -> Buffer:
    """Write the embedding and return its result. context_length: the longest sequence, if longer than the model's."""
    config, architecture, tape = graph.config, graph.architecture, graph.tape
    is_projected = architecture.projects_embedding and graph.weights.has("token_embd_proj.weight")
    width = graph.weights.shape("token_embd_proj.weight")[-1] if is_projected else config.hidden_size
    hidden = graph.buffer("embedding" if is_projected else "hidden", width, Rows.BATCH)
    table = graph.weights.embedding("token_embd.weight", config.vocab_size, width)
    scales_media = config.takes_media and architecture.scales_media
    tape.embed(hidden, table, 1.0 if scales_media else architecture.embedding_scale)
    if config.takes_media and not is_projected:
        tape.embed_media(hidden)
    if scales_media and architecture.embedding_scale != 1.0:
        tape.scale(hidden, architecture.embedding_scale)
    if architecture.learned_positions:
        longest = max(context_length or 0, config.context_length)
        num_positions = max(longest, graph.weights.shape("position_embd.weight")[0])
        tape.embed_positions(hidden, graph.weights.embedding("position_embd.weight", num_positions, hidden.width))
    if architecture.normalises_embedding:
        tape.rms_norm(hidden, hidden, None, config.norm_epsilon)
    if architecture.has_token_types and graph.weights.has("token_types.weight"):
        _write_token_types(graph, hidden)
    if architecture.embedding_norm is not None:
        graph.norm(hidden, hidden, architecture.embedding_norm)
    if is_projected:
        hidden = graph.product("token_embd_proj", hidden, "hidden", config.hidden_size)
        if config.takes_media:
            tape.embed_media(hidden)
    if config.per_layer_size:
        find_part(f"{_BLOCKS}:write_layer_inputs")(graph, hidden)
    if architecture.blocks is Blocks.ZAMBA2:
        find_part(f"{_RECURRENT}:write_embedding_pair")(graph, hidden)
    if architecture.blocks is Blocks.GEMMA3N:
        hidden = find_part(f"{_BLOCKS}:write_streams")(graph, hidden)
    return hidden


def _write_token_types(graph: Graph, hidden: Buffer) -> None:
    """Add the vector of each row's token type, or the only one."""
    name, width = "token_types.weight", hidden.width
    shape = graph.weights.shape(name)
    if len(shape) == 2 and shape[0] > 1:
        graph.tape.embed_types(hidden, graph.weights.embedding(name, shape[0], width))
    else:
        graph.tape.add_vector(hidden, graph.weights.vector(name, (width,), (1, width)).reshape(-1))


def write_layer(
    graph: Graph, layer: int, hidden: Buffer, tables: RopeTables, *, selects_output: bool = False
) -> Buffer:
    """Write one layer and return its result: `hidden` itself, or with selects_output the output rows only."""
    architecture = graph.architecture.of_layer(layer)
    if architecture.blocks in _WHOLE_LAYERS:
        write = _WHOLE_LAYERS[architecture.blocks]
        return write(graph, layer, hidden, tables, selects_output=selects_output)
    if architecture.blocks is Blocks.GEMMA3N:
        streams: Buffer = find_part(f"{_BLOCKS}:write_gemma3n_layer")(graph, layer, hidden, tables)
        return streams
    mixer = architecture.mixer(layer)
    if mixer is Mixer.WKV:
        written: Buffer = find_part(f"{_RECURRENT}:write_rwkv_layer")(graph, layer, hidden, is_last=selects_output)
        return written
    router_logits = write_router(graph, layer, hidden) if architecture.routes_layer_input else None
    x = attended = beside = parallel_x = expert_x = None
    if architecture.expert_norm is not None:
        expert_x = graph.block_norm(layer, architecture.expert_norm, hidden, "expert_input")
    if mixer in RECURRENT_MIXERS or (mixer is Mixer.ATTENTION and graph.config.num_heads[layer]):
        has_norm = layer > 0 or architecture.first_attention_norm
        x = graph.block_norm(layer, architecture.attention_norm if has_norm else None, hidden, "attention_input")
        attended = _write_mixer(graph, layer, x, tables)
        graph.weigh_stream(hidden, x)
        if architecture.mixer_beside is not None:
            beside = RECURRENT_MIXERS[architecture.mixer_beside].write(graph, layer, x)
    if architecture.parallel:
        is_shared = architecture.feed_forward_norm == architecture.attention_norm
        is_written = x is not None and is_shared
        parallel_x = x if is_written else graph.block_norm(layer, architecture.feed_forward_norm, hidden, "ffn_input")
    if selects_output:
        # After the last cache write only output rows are needed, so prompts skip the rest of this layer.
        hidden = graph.select_output(hidden)
        attended, beside, parallel_x, router_logits, expert_x = (
            one and graph.select_output(one) for one in (attended, beside, parallel_x, router_logits, expert_x)
        )
    entered = None
    if architecture.second_sum_norm is not None:
        entered = graph.buffer("layer_input", hidden.width, hidden.rows)
        graph.tape.add(entered, hidden, hidden, 0.0)
    if attended is not None:
        write_mixer_output(graph, layer, hidden, attended, mixer)
    if beside is not None and architecture.mixer_beside is not None:
        write_mixer_output(graph, layer, hidden, beside, architecture.mixer_beside)
    graph.sum_norm(layer, architecture.attention_sum_norm, hidden)
    if entered is not None:
        graph.tape.add(hidden, hidden, entered)
        graph.sum_norm(layer, architecture.second_sum_norm, hidden)
    if has_feed_forward(graph, layer):
        if parallel_x is None:
            is_draft = layer >= graph.config.num_main_layers
            norm = (is_draft and architecture.draft_layers.feed_forward_norm) or architecture.feed_forward_norm
            parallel_x = graph.block_norm(layer, norm, hidden, "ffn_input")
            graph.weigh_stream(hidden, parallel_x)
        write_feed_forward(graph, layer, hidden, parallel_x, router_logits, expert_x)
    graph.sum_norm(layer, architecture.feed_forward_sum_norm, hidden)
    return hidden


def _write_mixer(graph: Graph, layer: int, x: Buffer, tables: RopeTables) -> Buffer:
    """Write one layer's attention or recurrent block; the result still needs its output projection."""
    mixer = graph.architecture.mixer(layer)
    if mixer in RECURRENT_MIXERS:
        return RECURRENT_MIXERS[mixer].write(graph, layer, x)
    config, latent = graph.config, graph.config.latent
    if graph.architecture.latent_attention:
        if latent is not None and not latent.is_absorbed:
            return write_unabsorbed_attention(graph, layer, x, tables, latent)
        return write_latent_attention(graph, layer, x, tables)
    if config.num_kv_heads[layer]:
        return write_attention(graph, layer, x, tables)
    if graph.weights.has(f"blk.{layer}.attn_k.weight"):
        raise refuse(config, f"has keys in layer {layer}, and no heads of them (attention.head_count_kv)")
    # In place of attention a single matrix (Puzzle, arXiv 2411.19146).
    return x


def write_output_norm(graph: Graph, hidden: Buffer) -> Buffer:
    """Write the norm after the last layer, if there is one, and return its result."""
    if graph.architecture.blocks is Blocks.GEMMA3N:
        hidden = find_part(f"{_BLOCKS}:merge_streams")(graph, hidden)
    name = graph.architecture.output_norm
    if name is None or graph.architecture.first_decision_layer is not None:
        return hidden
    normed = graph.buffer("output_norm", hidden.width, hidden.rows)
    graph.norm(normed, hidden, name)
    if graph.architecture.has_output_projection:
        return graph.product("output_proj", normed, "output_proj", graph.weights.shape("output_proj.weight")[0])
    return normed


def _write_prediction_head(graph: Graph, normed: Buffer) -> Buffer:
    """The matrix, activation and norm before the output matrix, in models that have them (BERT's kin)."""
    activation = graph.architecture.classifier_activation
    if not graph.architecture.has_prediction_head or activation is None:
        return normed
    found = graph.product("output_proj", normed, "prediction_head", normed.width)
    graph.tape.activation(found, found, activation)
    graph.norm(found, found, "output_proj_norm")
    return found


def _write_logits(graph: Graph, normed: Buffer, head: str | None = None, num_tokens: int | None = None) -> Buffer:
    """Write the output head; head: the name of its matrix, None for the model's. num_tokens: of its first rows only."""
    config, tape, normed = graph.config, graph.tape, _write_prediction_head(graph, normed)
    name = head or ("output" if graph.weights.has("output.weight") else "token_embd")
    logits = graph.buffer("logits", num_tokens or config.vocab_size, normed.rows)
    rows = None if num_tokens is None else slice(0, num_tokens)
    weight = graph.weights.linear(f"{name}.weight", config.vocab_size, normed.width, rows)
    bias = graph.bias("output", config.vocab_size) if graph.architecture.has_output_bias else None
    bias, factor = bias if bias is None else bias[: logits.width], graph.factor(name)
    scale = graph.architecture.logit_scale * factor
    tape.matmul(normed, [Projection(weight, logits, divided(bias, factor), scale=scale)])
    softcap = config.logit_softcap or graph.architecture.logit_softcap
    if softcap:
        tape.softcap(logits, softcap)
    return logits
