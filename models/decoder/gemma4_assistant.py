"""Gemma 4's draft models: few narrow layers that attend to the keys and values of the model they draft for.

A draft model stores nothing. Every token of a draft is asked for at the position after the last one that the target has
computed, from the token before it and a state of the target's width: first the target's own, normed, then what the
draft model made of its last.
"""

import math
from collections.abc import Sequence

from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import Buffer, KVLayerShape, OpGraph, Projection, Rows, WeightSource
from localinfer.models.decoder.architecture import Blocks
from localinfer.models.decoder.attention import RopeTables
from localinfer.models.decoder.block_config import OF_ANOTHER_CACHE
from localinfer.models.decoder.checked_weights import CheckedWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.dense_architectures import gemma_with_shared_keys
from localinfer.models.decoder.gemma_blocks import is_windowed, source_layer, write_gemma4_layer
from localinfer.models.decoder.graph import Graph, refuse


def write_assistant(
    config: ModelConfig,
    weights: WeightSource,
    target: ModelConfig,
    target_weights: WeightSource,
    kv_layers: Sequence[KVLayerShape],
) -> OpGraph:
    """Write one step of a draft model, over the target's cache of `kv_layers`, of one row per segment.

    A row is a token and the state float32[target's hidden_size] that its segment carries, at the first position that
    the target has not computed, which is never 0. It gives the logits of the next token and, as hidden states, the
    state to be carried with that, by a row at the same position.
    Raises: UnsupportedFormatError for a draft model that does not fit the target; CorruptFileError as `write_decoder`.
    """
    difference = misfit(config, target, kv_layers)
    if difference is not None:
        raise refuse(config, difference)
    architecture = gemma_with_shared_keys(config, Blocks.GEMMA4, period=6)
    checked = CheckedWeights(weights, config.architecture)
    graph = Graph(config, architecture, checked, GraphBuilder(kv_layers))
    tables = RopeTables(graph, config.context_length)
    hidden = _write_input(graph, target, CheckedWeights(target_weights, target.architecture))
    for layer in range(config.num_layers):
        is_last = layer == config.num_layers - 1
        hidden = write_gemma4_layer(graph, layer, hidden, tables, target, selects_output=is_last)
    normed = graph.buffer("output_norm", hidden.width, hidden.rows)
    graph.norm(normed, hidden, "output_norm")
    logits = graph.buffer("logits", config.vocab_size, hidden.rows)
    state = graph.buffer("next_state", target.hidden_size, hidden.rows)
    head = graph.weights.linear("token_embd.weight", config.vocab_size, hidden.width)
    back = graph.weights.linear("nextn.post_projection.weight", state.width, hidden.width)
    graph.tape.matmul(normed, [Projection(head, logits), Projection(back, state)])
    return graph.tape.finish(logits, state)


def misfit(config: ModelConfig, target: ModelConfig, kv_layers: Sequence[KVLayerShape]) -> str | None:
    """What keeps a draft model from drafting for a target with such a cache, in words; None if it does."""
    drafts_for = OF_ANOTHER_CACHE[config.architecture]
    if target.architecture != drafts_for:
        return f"drafts for {drafts_for!r} models, and its target is of the architecture {target.architecture!r}"
    if config.vocab_size != target.vocab_size:
        return f"has {config.vocab_size} tokens, and its target {target.vocab_size}"
    if config.target_hidden_size != target.hidden_size:
        return f"reads states of {config.target_hidden_size} numbers, and those of its target have {target.hidden_size}"
    if config.sliding_window != target.sliding_window:
        return f"has windows of {config.sliding_window}, and its target of {target.sliding_window}"
    first_shared = target.num_layers - target.num_shared_layers
    for layer in range(config.num_layers):
        windowed = is_windowed(config, layer)
        if not any(is_windowed(target, source) == windowed for source in range(first_shared)):
            return f"has a {'windowed' if windowed else 'full'} layer {layer}, and its target none that it could read"
        kept = kv_layers[source_layer(target, None, windowed)]
        found_sizes, kept_sizes = config.head_sizes(layer), (kept.key_size, kept.value_size)
        if found_sizes != kept_sizes or config.num_heads[layer] % kept.num_kv_heads:
            return (
                f"has {config.num_heads[layer]} heads of sizes {found_sizes} in layer {layer}, where its target keeps "
                f"{kept.num_kv_heads} of {kept_sizes}"
            )
    return None


def _write_input(graph: Graph, target: ModelConfig, target_weights: CheckedWeights) -> Buffer:
    """The embedding of the target beside the carried state, projected to the draft model's width."""
    tape, width = graph.tape, target.hidden_size
    embedded, state = graph.buffer("embedding", width, Rows.BATCH), graph.buffer("state", width, Rows.BATCH)
    tape.embed(embedded, target_weights.embedding("token_embd.weight", target.vocab_size, width), math.sqrt(width))
    tape.previous_row(state)
    joined = graph.buffer("joined", 2 * width, Rows.BATCH)
    for index, part in enumerate((embedded, state)):
        tape.copy_heads(joined, part, 1, width, joined.width, width, out_offset=index * width)
    hidden = graph.buffer("hidden", graph.config.hidden_size, Rows.BATCH)
    weight = graph.weights.linear("nextn.pre_projection.weight", hidden.width, joined.width)
    tape.matmul(joined, [Projection(weight, hidden)])
    return hidden
