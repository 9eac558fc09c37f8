"""The layers of Gemma 4: two head sizes, shared keys and values, per-layer inputs, experts beside a dense block.

Sources: Gemma 3n and Gemma 4 as published; the per-layer inputs and shared keys and values of both are the same.
"""

import math

from localinfer.kernels.ops import AttentionShape, Buffer, Projection, Routing, Rows
from localinfer.models.decoder.architecture import Mixer
from localinfer.models.decoder.attention import RopeTables, write_mixer_output
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.feed_forward import write_feed_forward
from localinfer.models.decoder.graph import Graph, refuse


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
    """Whether a layer has a sliding window."""
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
    tape.attention(attended, queries, kv_layer, shape)
    return attended


def write_layer_inputs(graph: Graph, hidden: Buffer) -> None:
    """Write what every layer reads for itself, float32[rows, layers * per_layer_size], from the embeddings."""
    config, tape = graph.config, graph.tape
    size, width = config.per_layer_size, config.num_layers * config.per_layer_size
    inputs = graph.buffer("layer_inputs", width, hidden.rows)
    scale = 1.0 / math.sqrt(hidden.width)
    if not graph.weights.has("per_layer_token_embd.weight"):
        # EmbeddingGemma 2's follow from the embedding alone.
        tape.matmul(hidden, [graph.projection("per_layer_model_proj", inputs, hidden.width, scale=scale)])
        graph.norm(inputs, inputs, "per_layer_proj_norm", size)
        return
    looked_up = graph.buffer("layer_embeddings", width, hidden.rows)
    table = graph.weights.embedding("per_layer_token_embd.weight", config.vocab_size, width)
    tape.embed(looked_up, table, math.sqrt(size))
    tape.matmul(hidden, [graph.projection("per_layer_model_proj", inputs, hidden.width, scale=scale)])
    graph.norm(inputs, inputs, "per_layer_proj_norm", size)
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
    dense = graph.buffer("branch", hidden.width, hidden.rows)
    tape.matmul(up, [graph.projection(f"{block}.ffn_down", dense, up.width)])
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
    fused = f"{block}.ffn_gate_up_exps"
    for part, (name, out) in enumerate((("gate", gate), ("up", up))):
        if weights.has(f"{fused}.weight"):
            graph.expert_product(fused, out, x, expert_ids, width, rows=(part * size, 2 * size))
        else:
            graph.expert_product(f"{block}.ffn_{name}_exps", out, x, expert_ids, width)
    tape.gated_activation(up, gate, up, graph.architecture.activation)
    down = graph.buffer("expert_down", num_selected * width, x.rows)
    weight = weights.experts(f"{block}.ffn_down_exps.weight", num_experts, width, size)
    tape.expert_matmul(down, up, weight, expert_ids, input_per_slot=True)
    out = graph.buffer("expert_branch", width, x.rows)
    tape.expert_sum(out, down, expert_weights)
    return out
