"""The layers of Gemma 3n and Gemma 4, and Gemma 4's draft models, as published.

Of both: per-layer inputs, and keys and values that layers share. Gemma 4: two head sizes, experts beside a dense block.
Gemma 3n: residual streams that are predicted and corrected (AltUp, arXiv 2301.13310: a layer computes one, the others
follow by small matrices; they lie side by side in one buffer, the active one first), and a low-rank branch beside
attention (LAuReL, arXiv 2411.07501).

A draft model stores nothing: its few narrow layers attend to the keys and values of the model it drafts for. Every
token of a draft is computed at the position after the last one that the target has computed, from the token before it
and a state of the target's width: first the target's own, normed, then the draft model's last one.
"""

import math
from collections.abc import Sequence

from localinfer.kernels.graph_builder import GraphBuilder
from localinfer.kernels.ops import (
    Activation,
    AttentionShape,
    Buffer,
    KVLayerShape,
    OpGraph,
    Projection,
    Routing,
    Rows,
    WeightSource,
)
from localinfer.models.decoder.architecture import Blocks, Mixer
from localinfer.models.decoder.attention import write_mixer_output
from localinfer.models.decoder.block_config import OF_ANOTHER_CACHE
from localinfer.models.decoder.checked_weights import CheckedWeights
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.dense_architectures import gemma_with_shared_keys
from localinfer.models.decoder.feed_forward import multiply_experts, write_feed_forward
from localinfer.models.decoder.graph import Graph, refuse
from localinfer.models.decoder.positions import RopeTables


def write_gemma4_layer(
    graph: Graph,
    layer: int,
    hidden: Buffer,
    tables: RopeTables,
    target: ModelConfig | None = None,
    *,
    selects_output: bool,
) -> Buffer:
    """Write one layer and return its result: `hidden` itself, or with selects_output the output rows only.

    target: the model whose keys and values a draft model attends to, up to the position before a row's own.
    """
    x = graph.block_norm(layer, "attn_norm", hidden, "attention_input")
    windowed = is_windowed(graph.config, layer)
    source = source_layer(graph.config, layer, windowed) if target is None else source_layer(target, None, windowed)
    attended = write_shared_attention(graph, layer, x, tables, source, is_draft=target is not None)
    own_input = layer_input(graph, layer)
    if selects_output:
        hidden, attended = graph.select_output(hidden), graph.select_output(attended)
        own_input = own_input and graph.select_output(own_input)
    write_mixer_output(graph, layer, hidden, attended, Mixer.ATTENTION)
    if graph.weights.has(f"blk.{layer}.ffn_gate_inp.weight"):
        _write_dense_and_experts(graph, layer, hidden)
    else:
        write_feed_forward(graph, layer, hidden, graph.block_norm(layer, "ffn_norm", hidden, "ffn_input"))
    if own_input is not None:
        graph.tape.add(hidden, hidden, input_branch(graph, layer, hidden, own_input))
    scale = graph.weights.optional_vector(f"blk.{layer}.layer_output_scale.weight", (1,))
    if scale is not None:
        graph.tape.scale(hidden, float(scale[0]))
    return hidden


def source_layer(config: ModelConfig, layer: int | None, windowed: bool) -> int:
    """The layer whose keys and values are attended to: `layer` itself, or the last one of a kind that has some."""
    first = config.num_layers - config.num_shared_layers
    if layer is not None and layer < first:
        return layer
    for source in reversed(range(first)):
        if is_windowed(config, source) == windowed:
            return source
    kind = "windowed" if windowed else "full"
    raise refuse(config, f"has {kind} layers without keys and values of their own, and none that has some")


def is_windowed(config: ModelConfig, layer: int) -> bool:
    """Return whether a layer has a sliding window."""
    return bool(config.windowed_layers) and config.windowed_layers[layer]


def write_shared_attention(
    graph: Graph, layer: int, x: Buffer, tables: RopeTables, source: int, *, is_draft: bool = False
) -> Buffer:
    """Write one layer's attention over the keys and values of `source`, itself or another layer of the cache.

    is_draft: the cache is another model's, which has not computed the rows' own positions.

    Without a matrix of their own, values are the keys before their norm and RoPE. The result still needs its output
    projection.
    """
    config, tape = graph.config, graph.tape
    num_heads, (key_size, value_size) = config.num_heads[layer], config.head_sizes(layer)
    table = tables.for_layer(is_windowed(config, layer))
    queries = graph.buffer("queries", num_heads * key_size, x.rows)
    projections = [graph.projection(f"blk.{layer}.attn_q", queries, x.width)]
    if source == layer and not is_draft:
        keys = graph.buffer("keys", config.num_kv_heads[layer] * key_size, x.rows)
        values = graph.buffer("values", config.num_kv_heads[layer] * value_size, x.rows)
        projections.append(graph.projection(f"blk.{layer}.attn_k", keys, x.width))
        has_values = graph.weights.has(f"blk.{layer}.attn_v.weight")
        if has_values:
            projections.append(graph.projection(f"blk.{layer}.attn_v", values, x.width))
        tape.matmul(x, projections)
        if not has_values:
            tape.copy_heads(values, keys, config.num_kv_heads[layer], key_size, value_size, key_size)
        graph.norm(keys, keys, f"blk.{layer}.attn_k_norm", key_size)
        tape.rms_norm(values, values, None, config.norm_epsilon, value_size)
        tape.rope(keys, table, key_size)
        tape.store_kv(config.cached_layer(layer), keys, values)
    else:
        tape.matmul(x, projections)
    graph.norm(queries, queries, f"blk.{layer}.attn_q_norm", key_size)
    tape.rope(queries, table, key_size)
    attended = graph.buffer("attended", num_heads * value_size, x.rows)
    kv_layer = source if is_draft else config.cached_layer(source)
    shape = AttentionShape(
        num_heads=num_heads,
        num_kv_heads=tape.kv_layers[kv_layer].num_kv_heads,
        key_size=key_size,
        value_size=value_size,
        scale=graph.architecture.attention_scale or 1.0,
        window=config.sliding_window if is_windowed(config, layer) else 0,
        excludes_own=is_draft,
        bidirectional=not graph.architecture.causal,
    )
    takes_ranges = not is_draft and graph.takes_ranges(windowed=is_windowed(config, layer))
    tape.attention(attended, queries, kv_layer, shape, takes_ranges=takes_ranges)
    return attended


def write_layer_inputs(graph: Graph, hidden: Buffer) -> None:
    """Write what every layer reads for itself, float32[rows, layers * per_layer_size], from the embeddings."""
    config, tape = graph.config, graph.tape
    size, width = config.per_layer_size, config.num_layers * config.per_layer_size
    inputs = graph.buffer("layer_inputs", width, hidden.rows)
    scale, looked_up = 1.0 / math.sqrt(hidden.width), None
    # EmbeddingGemma 2's follow from the embedding alone.
    if graph.weights.has("per_layer_token_embd.weight"):
        looked_up = graph.buffer("layer_embeddings", width, hidden.rows)
        table = graph.weights.embedding("per_layer_token_embd.weight", config.vocab_size, width)
        tape.embed(looked_up, table, math.sqrt(size))
    tape.matmul(hidden, [graph.projection("per_layer_model_proj", inputs, hidden.width, scale=scale)])
    graph.norm(inputs, inputs, "per_layer_proj_norm", size)
    if looked_up is not None:
        tape.add(inputs, inputs, looked_up)
        tape.scale(inputs, 1.0 / math.sqrt(2.0))


def layer_input(graph: Graph, layer: int) -> Buffer | None:
    """The part of `write_layer_inputs` that one layer reads; None in models without."""
    config = graph.config
    size = config.per_layer_size
    if not size:
        return None
    width = config.num_layers * size
    out, inputs = graph.buffer("layer_input", size, Rows.BATCH), graph.buffer("layer_inputs", width, Rows.BATCH)
    graph.tape.copy_heads(out, inputs, 1, size, size, width, x_offset=layer * size)
    return out


def input_branch(graph: Graph, layer: int, x: Buffer, own_input: Buffer) -> Buffer:
    """norm(proj (gelu(inp_gate x) * the layer's own input)), to be added to the residual stream."""
    block, tape = f"blk.{layer}", graph.tape
    gate = graph.buffer("input_gate", own_input.width, x.rows)
    out = graph.buffer("branch", x.width, x.rows)
    tape.matmul(x, [graph.projection(f"{block}.inp_gate", gate, x.width)])
    tape.gated_activation(gate, gate, own_input, graph.architecture.activation)
    tape.matmul(gate, [graph.projection(f"{block}.proj", out, gate.width)])
    graph.norm(out, out, f"{block}.post_norm")
    return out


def _write_dense_and_experts(graph: Graph, layer: int, hidden: Buffer) -> None:
    """Add the sum of a dense feed-forward block and of the experts, which read the same residual stream."""
    block, tape = f"blk.{layer}", graph.tape
    x = graph.block_norm(layer, "ffn_norm", hidden, "ffn_input")
    size = graph.weights.shape(f"{block}.ffn_down.weight")[-1]
    gate, up = graph.buffer("gate", size, x.rows), graph.buffer("up", size, x.rows)
    parts = [graph.projection(f"{block}.ffn_{name}", out, x.width) for name, out in (("gate", gate), ("up", up))]
    tape.matmul(x, parts)
    tape.gated_activation(up, gate, up, graph.architecture.activation)
    dense = graph.product(f"{block}.ffn_down", up, "branch", hidden.width)
    graph.norm(dense, dense, f"{block}.post_ffw_norm_1")
    routed = _experts(graph, layer, hidden)
    graph.norm(routed, routed, f"{block}.post_ffw_norm_2")
    tape.add(dense, dense, routed)
    graph.add_normed(hidden, dense, f"{block}.post_ffw_norm")


def _experts(graph: Graph, layer: int, hidden: Buffer) -> Buffer:
    """The weighted sum of a row's experts. Its router reads the residual stream, normed in a way of its own."""
    block, tape, config, weights = f"blk.{layer}", graph.tape, graph.config, graph.weights
    experts = config.experts
    if experts is None:
        raise refuse(config, "has a router (ffn_gate_inp) but no expert_count")
    num_experts, num_selected, width = experts.num_experts, experts.num_selected, hidden.width
    router_input = graph.buffer("router_input", width, hidden.rows)
    tape.rms_norm(router_input, hidden, weights.vector(f"{block}.ffn_gate_inp.scale", (width,)), config.norm_epsilon)
    logits = graph.buffer("router_logits", num_experts, hidden.rows)
    router = weights.linear(f"{block}.ffn_gate_inp.weight", num_experts, width)
    tape.matmul(router_input, [Projection(router, logits, scale=1.0 / math.sqrt(width))])
    expert_ids = graph.buffer("expert_ids", num_selected, hidden.rows)
    expert_weights = graph.buffer("expert_weights", num_selected, hidden.rows)
    routing = Routing(
        num_experts=num_experts,
        num_selected=num_selected,
        gating=graph.architecture.gating,
        normalise=True,
        output_scales=weights.optional_vector(f"{block}.ffn_down_exps.scale", (num_experts,)),
    )
    tape.route(expert_ids, expert_weights, logits, routing)

    x = graph.block_norm(layer, "pre_ffw_norm_2", hidden, "expert_input")
    size = weights.shape(f"{block}.ffn_down_exps.weight")[-1]
    gate = graph.buffer("expert_gate", num_selected * size, x.rows)
    up = graph.buffer("expert_up", num_selected * size, x.rows)
    multiply_experts(graph, block, [("gate", gate), ("up", up)], size, x, expert_ids)
    tape.gated_activation(up, gate, up, graph.architecture.activation)
    down = graph.buffer("expert_down", num_selected * width, x.rows)
    weight = weights.experts(f"{block}.ffn_down_exps.weight", num_experts, width, size)
    tape.expert_matmul(down, up, weight, expert_ids, input_per_slot=True)
    out = graph.buffer("expert_branch", width, x.rows)
    tape.expert_sum(out, down, expert_weights)
    return out


_TINY = 1e-12
"""Instead of 0 below a square root that divides."""


def write_streams(graph: Graph, hidden: Buffer) -> Buffer:
    """Write the streams that the first layer reads, from the embeddings: themselves, and matrices times them.

    Every stream has the embedding's length.
    """
    tape, width = graph.tape, hidden.width
    num_others = _num_streams(graph) - 1
    repeated = graph.buffer("other_inputs", num_others * width, hidden.rows)
    for stream in range(num_others):
        tape.copy_heads(repeated, hidden, 1, width, num_others * width, width, out_offset=stream * width)
    streams = graph.buffer("streams", (num_others + 1) * width, hidden.rows)
    tape.copy_heads(streams, hidden, 1, width, streams.width, width)
    others = _resized_products(graph, "altup_proj.weight", repeated, hidden)
    tape.copy_heads(streams, others, 1, others.width, streams.width, others.width, out_offset=width)
    return streams


def merge_streams(graph: Graph, streams: Buffer) -> Buffer:
    """Write the mean of the streams after the last layer, each brought back by its matrix to the first one's length."""
    tape, width = graph.tape, graph.config.hidden_size
    first = graph.buffer("hidden", width, streams.rows)
    tape.copy_heads(first, streams, 1, width, width, streams.width)
    repeated = graph.buffer("other_inputs", streams.width - width, streams.rows)
    tape.copy_heads(repeated, streams, 1, repeated.width, repeated.width, streams.width, x_offset=width)
    others = _resized_products(graph, "altup_unembd_proj.weight", repeated, first)
    merged = graph.buffer("merged", width, streams.rows)
    tape.mix_slots(merged, others, others.width // width, residual=first)
    tape.scale(merged, width / streams.width)
    return merged


def _resized_products(graph: Graph, name: str, x: Buffer, like: Buffer) -> Buffer:
    """One matrix times each slot of x, every product of the length of the row of `like`."""
    tape, width = graph.tape, like.width
    out = graph.buffer("other_streams", x.width, x.rows)
    weight = graph.weights.experts(name, x.width // width, width, width)
    tape.head_matmul(out, x, weight, width, width)
    tape.rms_norm(out, out, None, _TINY, width)
    magnitude = graph.buffer("magnitude", 1, x.rows)
    tape.magnitude(magnitude, like)
    tape.multiply(out, out, magnitude)
    return out


def _num_streams(graph: Graph) -> int:
    """Number of the matrices of other streams, and the active one."""
    shape = graph.weights.shape("altup_proj.weight")
    return (shape[0] if len(shape) == 3 else 1) + 1


def write_gemma3n_layer(graph: Graph, layer: int, streams: Buffer, tables: RopeTables) -> Buffer:
    """Write one layer over the streams and return them, in the last layer the output rows only."""
    tape, config, block = graph.tape, graph.config, f"blk.{layer}"
    width = config.hidden_size
    num_streams = streams.width // width
    predicted = graph.buffer("predicted", streams.width, streams.rows)
    hidden = graph.buffer("hidden", width, streams.rows)
    tape.copy_heads(hidden, streams, 1, width, width, streams.width)
    modalities = _modalities(graph, layer, hidden)
    coefficients = graph.product(f"{block}.altup_predict_coef", modalities, "coefficients", num_streams**2)
    tape.mix_slots(predicted, streams, num_streams, coefficients, streams)
    tape.copy_heads(hidden, predicted, 1, width, width, streams.width)

    x = graph.block_norm(layer, "attn_norm", hidden, "attention_input")
    attended = write_shared_attention(graph, layer, x, tables, source_layer(config, layer, is_windowed(config, layer)))
    own_input = layer_input(graph, layer)
    if own_input is None:
        raise refuse(config, "has no per-layer inputs")
    if layer == config.num_layers - 1:
        hidden, attended, x = (graph.select_output(buffer) for buffer in (hidden, attended, x))
        predicted, own_input = graph.select_output(predicted), graph.select_output(own_input)
    active = _active_result(graph, layer, hidden, x, attended)

    # What the layer made of the active stream, less what was predicted of it, corrects every stream.
    first = graph.buffer("first_stream", width, active.rows)
    tape.copy_heads(first, predicted, 1, width, width, predicted.width)
    tape.add(first, active, first, -1.0)
    modalities = _modalities(graph, layer, active)
    coefficients = graph.product(f"{block}.altup_correct_coef", modalities, "coefficients", num_streams)
    corrected = graph.buffer("streams", predicted.width, predicted.rows)
    tape.mix_slots(corrected, first, 1, coefficients, predicted)
    tape.mix_slots(corrected, first, 1, None, corrected)

    tape.copy_heads(first, corrected, 1, width, width, corrected.width)
    tape.multiply(first, first, graph.weights.vector(f"{block}.altup_correct_scale.weight", (width,)))
    branch = input_branch(graph, layer, first, own_input)
    tape.mix_slots(corrected, branch, 1, residual=corrected, first_slot=1)
    return corrected


def _active_result(graph: Graph, layer: int, hidden: Buffer, x: Buffer, attended: Buffer) -> Buffer:
    """The layer's result of the active stream, `hidden`: attention beside a low-rank branch, then feed-forward."""
    tape, block = graph.tape, f"blk.{layer}"
    # The low-rank branch and its input.
    low = graph.product(f"{block}.laurel_l", x, "low_rank", graph.weights.shape(f"{block}.laurel_l.weight")[0])
    laurel = graph.product(f"{block}.laurel_r", low, "laurel", x.width)
    graph.norm(laurel, laurel, f"{block}.laurel_post_norm")
    tape.add(laurel, laurel, x)

    branch = graph.product(f"{block}.attn_output", attended, "branch", hidden.width)
    graph.norm(branch, branch, f"{block}.post_attention_norm")
    tape.add(hidden, hidden, branch)
    tape.add(hidden, hidden, laurel)
    tape.scale(hidden, 1.0 / math.sqrt(2.0))

    ffn_input = graph.block_norm(layer, "ffn_norm", hidden, "ffn_input")
    size = graph.weights.shape(f"{block}.ffn_down.weight")[-1]
    gate, up = graph.buffer("gate", size, hidden.rows), graph.buffer("up", size, hidden.rows)
    parts = [graph.projection(f"{block}.ffn_{name}", out, hidden.width) for name, out in (("gate", gate), ("up", up))]
    tape.matmul(ffn_input, parts)
    deviations = graph.config.activation_sparsity[layer]
    if math.isfinite(deviations):
        tape.gaussian_top_k(gate, gate, deviations)
    tape.gated_activation(up, gate, up, graph.architecture.activation)
    tape.matmul(up, [graph.projection(f"{block}.ffn_down", branch, size)])
    graph.norm(branch, branch, f"{block}.post_ffw_norm")
    tape.add(hidden, hidden, branch)
    return hidden


def _modalities(graph: Graph, layer: int, x: Buffer) -> Buffer:
    """tanh(router (norm(x) / width)): what the coefficients of predictions and corrections are computed from."""
    tape, name = graph.tape, f"blk.{layer}.altup_router"
    normed = graph.buffer("router_input", x.width, x.rows)
    graph.norm(normed, x, f"{name}_norm")
    out = graph.product(name, normed, "modalities", graph.weights.shape(f"{name}.weight")[0], 1.0 / x.width)
    tape.activation(out, out, Activation.TANH)
    return out


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
    """Say why a draft model cannot draft for a target with such a cache; None if it can."""
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
