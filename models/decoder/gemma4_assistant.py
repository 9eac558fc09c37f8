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
from localinfer.models.decoder.checked_weights import CheckedWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.gemma_blocks import is_windowed, source_layer, write_gemma4_layer
from localinfer.models.decoder.graph import Graph, refuse
from localinfer.models.decoder.windowed_architectures import gemma_with_shared_keys


def write_assistant(
    config: ModelConfig,
    weights: WeightSource,
    target: ModelConfig,
    target_weights: WeightSource,
    kv_layers: Sequence[KVLayerShape],
) -> OpGraph:
    """Write one step of a draft model, over the target's cache of `kv_layers`.

    A row is a token and a received state float32[target's hidden_size], at the first position that the target has not
    computed, which is never 0. Its result is float32[vocab_size + target's hidden_size]: logits of the next token, and
    the state to be handed over with it, for a row at the same position.
    Raises: UnsupportedFormatError for a draft model that does not fit the target; CorruptFileError as `write_decoder`.
    """
    _check_fits(config, target, kv_layers)
    architecture = gemma_with_shared_keys(config, Blocks.GEMMA4, period=6)
    checked = CheckedWeights(weights, config.architecture)
    graph = Graph(config, architecture, checked, GraphBuilder(kv_layers))
    tables = RopeTables(graph, config.context_length)
    hidden = _write_input(graph, target, CheckedWeights(target_weights, target.architecture))
    for layer in range(config.num_layers):
        hidden = write_gemma4_layer(graph, layer, hidden, tables, target)
    return graph.tape.finish(_write_result(graph, target, hidden))


def _check_fits(config: ModelConfig, target: ModelConfig, kv_layers: Sequence[KVLayerShape]) -> None:
    if config.vocab_size != target.vocab_size:
        raise refuse(config, f"has {config.vocab_size} tokens and the model it drafts for {target.vocab_size}")
    if config.sliding_window != target.sliding_window:
        raise refuse(config, f"has windows of {config.sliding_window} and its target of {target.sliding_window}")
    for layer in range(config.num_layers):
        kept = kv_layers[source_layer(target, None, is_windowed(config, layer))]
        found, wanted = config.head_sizes(layer), (kept.key_size, kept.value_size)
        if found != wanted or config.num_heads[layer] % kept.num_kv_heads:
            raise refuse(
                config,
                f"has {config.num_heads[layer]} heads of sizes {found} in layer {layer}, where its target keeps "
                f"{kept.num_kv_heads} of {wanted}",
            )


def _write_input(graph: Graph, target: ModelConfig, target_weights: CheckedWeights) -> Buffer:
    """The embedding of the target beside the received state, projected to the draft model's width."""
    tape, width = graph.tape, target.hidden_size
    embedded, state = graph.buffer("embedding", width, Rows.BATCH), graph.buffer("state", width, Rows.BATCH)
    tape.embed(embedded, target_weights.embedding("token_embd.weight", target.vocab_size, width), math.sqrt(width))
    tape.receive(state)
    joined = graph.buffer("joined", 2 * width, Rows.BATCH)
    for index, part in enumerate((embedded, state)):
        tape.copy_heads(joined, part, 1, width, joined.width, width, out_offset=index * width)
    hidden = graph.buffer("hidden", graph.config.hidden_size, Rows.BATCH)
    weight = graph.weights.linear("nextn.pre_projection.weight", hidden.width, joined.width)
    tape.matmul(joined, [Projection(weight, hidden)])
    return hidden


def _write_result(graph: Graph, target: ModelConfig, hidden: Buffer) -> Buffer:
    """Logits, and the next state, side by side."""
    tape, config = graph.tape, graph.config
    normed = graph.buffer("output_norm", hidden.width, hidden.rows)
    graph.norm(normed, hidden, "output_norm")
    logits = graph.buffer("logits", config.vocab_size, hidden.rows)
    state = graph.buffer("next_state", target.hidden_size, hidden.rows)
    head = graph.weights.linear("token_embd.weight", config.vocab_size, hidden.width)
    back = graph.weights.linear("nextn.post_projection.weight", state.width, hidden.width)
    tape.matmul(normed, [Projection(head, logits), Projection(back, state)])
    result = graph.buffer("logits_and_state", logits.width + state.width, hidden.rows)
    tape.copy_heads(result, logits, 1, logits.width, result.width, logits.width)
    tape.copy_heads(result, state, 1, state.width, result.width, state.width, out_offset=logits.width)
    return result
