"""The attention blocks: projections, norms of queries and keys, RoPE, KV cache, attention; and latent attention."""

import math

from localinfer.kernels.ops import Activation, AttentionShape, Buffer
from localinfer.models.decoder.architecture import OUTPUT_NAMES, Mixer, QueryKeyNorm
from localinfer.models.decoder.block_config import LatentConfig
from localinfer.models.decoder.graph import Graph, refuse
from localinfer.models.decoder.positions import RopeTables, alibi_slopes, write_relative_bias
from localinfer.models.decoder.sparse_attention import choose_blocks, choose_latents


def write_attention(graph: Graph, layer: int, x: Buffer, tables: RopeTables) -> Buffer:
    """Write one layer's attention over x; the result still needs its output projection."""
    config, architecture, tape = graph.config, graph.architecture.of_layer(layer), graph.tape
    num_heads, num_kv_heads = config.num_heads[layer], config.num_kv_heads[layer]
    if not graph.weights.has(f"blk.{layer}.attn_qkv.weight"):
        for letter in "qkv":
            # Do not reserve memory for sizes that no tensor confirms.
            graph.weights.shape(f"blk.{layer}.attn_{letter}.weight")
    queries = graph.buffer("queries", num_heads * config.head_dim, x.rows)
    keys = graph.buffer("keys", num_kv_heads * config.head_dim, x.rows)
    values = graph.buffer("values", num_kv_heads * config.value_head_dim, x.rows)
    gate = _write_projections(graph, layer, x, queries, keys, values)
    if architecture.projection_clamp:
        for buffer in (queries, keys, values):
            tape.clamp(buffer, architecture.projection_clamp)

    window = architecture.windows[layer] if architecture.windows else 0
    chunk = architecture.chunks[layer] if architecture.chunks else 0
    has_rope = config.rope.rotary_size > 0 and (architecture.has_rope[layer] if architecture.has_rope else True)
    if architecture.query_key_norm is not QueryKeyNorm.AFTER_ROPE:
        _norm_queries_and_keys(graph, layer, queries, keys)
    if has_rope:
        table = tables.for_layer(window > 0 or chunk > 0)
        tape.rope(queries, table, config.head_dim)
        tape.rope(keys, table, config.head_dim)
        if architecture.unweighted_query_key_norm:
            tape.rms_norm(queries, queries, None, config.norm_epsilon, config.head_dim)
            tape.rms_norm(keys, keys, None, config.norm_epsilon, config.head_dim)
    if architecture.query_key_norm is QueryKeyNorm.AFTER_ROPE:
        _norm_queries_and_keys(graph, layer, queries, keys)
    if not (has_rope and architecture.temperature_without_rope_only):
        sharpen_queries(graph, queries)
    # Layers of an encoder share one of the cache: its texts are read by the batch that computes them only.
    kv_layer = config.cached_layer(layer)
    tape.store_kv(kv_layer, keys, values)
    chosen = choose_blocks(graph, layer, x, tables.for_layer(windowed=False))
    attended = graph.buffer("attended", num_heads * config.value_head_dim, x.rows)
    relative = write_relative_bias(graph, layer, queries, keys)
    shape, takes_ranges = attention_shape(graph, layer, window, chunk), graph.takes_ranges(windowed=window > 0)
    tape.attention(attended, queries, kv_layer, shape, chosen, relative, takes_ranges)
    if gate is not None:
        tape.multiply_sigmoid(attended, attended, gate)
    elif graph.weights.has(f"blk.{layer}.attn_gate.weight"):
        _gate_heads(graph, layer, x, attended)
    return attended


def _write_projections(
    graph: Graph, layer: int, x: Buffer, queries: Buffer, keys: Buffer, values: Buffer
) -> Buffer | None:
    """Project x to queries, keys and values, by three matrices or one; returns the result's gates beside queries."""
    first, gate = queries, None
    if graph.architecture.gates_attention:
        first = graph.buffer("queries_and_gates", 2 * queries.width, x.rows)
        gate = graph.buffer("attention_gate", queries.width, x.rows)
    if graph.weights.has(f"blk.{layer}.attn_qkv.weight"):
        projections = graph.row_parts(f"blk.{layer}.attn_qkv", x, first, keys, values)
    else:
        outs = zip("qkv", (first, keys, values), strict=True)
        projections = [graph.projection(f"blk.{layer}.attn_{letter}", out, x.width) for letter, out in outs]
    graph.tape.matmul(x, projections)
    if gate is not None:
        graph.cut_heads(first, graph.config.num_heads[layer], queries, gate)
    return gate


def write_mixer_output(graph: Graph, layer: int, hidden: Buffer, attended: Buffer, mixer: Mixer) -> None:
    """Add the output projection of one layer's attention or recurrent block to hidden."""
    block, post_norm = f"blk.{layer}", graph.architecture.of_layer(layer).attention_post_norm
    if graph.weights.has(f"{block}.attn_sub_norm.weight"):
        graph.norm(attended, attended, f"{block}.attn_sub_norm")
    name, scale = f"{block}.{OUTPUT_NAMES[mixer]}", graph.architecture.attention_output_scale
    graph.add_branch(hidden, attended, name, post_norm and f"{block}.{post_norm}", scale)


def _gate_heads(graph: Graph, layer: int, x: Buffer, attended: Buffer) -> None:
    """Weigh attention's result by a sigmoid of x (arXiv 2505.06708), or a softplus: a gate per head, or per element."""
    name, num_heads = f"blk.{layer}.attn_gate", graph.config.num_heads[layer]
    by_head = graph.weights.shape(f"{name}.weight")[0] == num_heads
    gate = graph.product(name, x, "attention_gate", num_heads if by_head else attended.width)
    if graph.architecture.has_softplus_gates:
        graph.tape.activation(gate, gate, Activation.SOFTPLUS)
        graph.tape.multiply(attended, attended, gate)
    else:
        graph.tape.multiply_sigmoid(attended, attended, gate)


def sharpen_queries(graph: Graph, queries: Buffer) -> None:
    """Scale queries by the logarithm of their position, in the models that do."""
    one = graph.architecture
    if one.temperature_length and one.temperature_scale:
        graph.tape.scale_by_position(queries, one.temperature_length, one.temperature_scale, one.temperature_offset)


def attention_shape(graph: Graph, layer: int, window: int, chunk: int) -> AttentionShape:
    """Sizes and mask of one layer's attention."""
    config, architecture = graph.config, graph.architecture
    num_heads, softcap = config.num_heads[layer], architecture.attention_softcap
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=config.num_kv_heads[layer],
        key_size=config.head_dim,
        value_size=config.value_head_dim,
        scale=architecture.attention_scale or config.attention_scale or 1.0 / math.sqrt(config.head_dim),
        softcap=config.attention_softcap if softcap is None else softcap,
        window=window,
        chunk=chunk,
        sinks=graph.weights.optional_vector(f"blk.{layer}.attn_sinks.weight", (num_heads,)),
        alibi_slopes=alibi_slopes(num_heads, architecture.max_alibi_bias) if architecture.max_alibi_bias else None,
        bidirectional=not architecture.causal,
    )


def _norm_queries_and_keys(graph: Graph, layer: int, queries: Buffer, keys: Buffer) -> None:
    kind = graph.architecture.of_layer(layer).query_key_norm
    is_absent = kind is QueryKeyNorm.OPTIONAL and not graph.weights.has(f"blk.{layer}.attn_q_norm.weight")
    if kind is QueryKeyNorm.NONE or is_absent:
        return
    for buffer, letter in ((queries, "q"), (keys, "k")):
        name = f"blk.{layer}.attn_{letter}_norm"
        is_whole = graph.weights.shape(f"{name}.weight") == (buffer.width,)
        graph.norm(buffer, buffer, name, 0 if is_whole else graph.config.head_dim)


def write_latent_attention(graph: Graph, layer: int, x: Buffer, tables: RopeTables) -> Buffer:
    """Write one layer's latent attention over x; the result still needs its output projection.

    In its absorbed form all heads share one cached latent (DeepSeek-V2, arXiv 2405.04434). A head's key is a matrix
    times the latent, so its score with a query is the latent's with that matrix's transpose times the query; GGUF
    stores the transpose as `attn_k_b`. Likewise `attn_v_b` may wait until attention has averaged latents. What is
    cached per position is the latent and one rotated part that all heads share: one wide key head whose first elements
    are the value.
    Raises: UnsupportedFormatError for a file without the latent's sizes.
    """
    config, architecture, tape, weights = graph.config, graph.architecture, graph.tape, graph.weights
    latent = config.latent
    if latent is None:
        raise refuse(config, "has no attention.kv_lora_rank, the size of its latent")
    if config.num_kv_heads[layer] != 1:
        raise refuse(config, f"caches a latent for {config.num_kv_heads[layer]} heads instead of one for all")
    num_heads, rotary_size = config.num_heads[layer], config.rope.rotary_size
    plain_size, head_size = latent.key_size - rotary_size, latent.kv_rank + rotary_size
    table = tables.for_layer(windowed=False)

    split = _write_split_queries(graph, layer, x, latent)
    queries = graph.buffer("queries", num_heads * head_size, x.rows)
    k_b = weights.experts(f"blk.{layer}.attn_k_b.weight", num_heads, latent.kv_rank, plain_size)
    tape.head_matmul(queries, split, k_b, head_size, latent.key_size)
    tape.copy_heads(queries, split, num_heads, rotary_size, head_size, latent.key_size, latent.kv_rank, plain_size)
    has_rope = not architecture.has_rope or architecture.has_rope[layer]
    if has_rope:
        tape.rope(queries, table, head_size, latent.kv_rank)
    sharpen_queries(graph, queries)

    values, rotating = _write_latent(graph, layer, x, latent)
    keys = graph.buffer("keys", head_size, x.rows)
    tape.copy_heads(keys, values, 1, latent.kv_rank, head_size, latent.kv_rank)
    tape.copy_heads(keys, rotating, 1, rotary_size, head_size, rotary_size, out_offset=latent.kv_rank)
    if has_rope:
        tape.rope(keys, table, head_size, latent.kv_rank)
    tape.store_kv(layer, keys, values)
    query_latent = graph.buffer("query_latent", latent.query_rank, x.rows) if latent.query_rank else None
    chosen = choose_latents(graph, layer, x, query_latent, table)
    averaged = graph.buffer("averaged_latents", num_heads * latent.kv_rank, x.rows)
    tape.attention(averaged, queries, layer, attention_shape(graph, layer, window=0, chunk=0), chosen)
    attended = graph.buffer("attended", num_heads * latent.value_size, x.rows)
    v_b = weights.experts(f"blk.{layer}.attn_v_b.weight", num_heads, latent.value_size, latent.kv_rank)
    tape.head_matmul(attended, averaged, v_b, latent.value_size, latent.kv_rank)
    if weights.has(f"blk.{layer}.attn_gate.weight"):
        _gate_heads(graph, layer, x, attended)
    return attended


def _write_split_queries(graph: Graph, layer: int, x: Buffer, latent: LatentConfig) -> Buffer:
    """Write the queries of every head, the part without RoPE first: from x, or from a latent of their own."""
    queries = graph.buffer("split_queries", graph.config.num_heads[layer] * latent.key_size, x.rows)
    if not latent.query_rank:
        return graph.product(f"blk.{layer}.attn_q", x, "split_queries", queries.width)
    query_latent = graph.product(f"blk.{layer}.attn_q_a", x, "query_latent", latent.query_rank)
    graph.norm(query_latent, query_latent, f"blk.{layer}.attn_q_a_norm", epsilon=latent.norm_epsilon)
    return graph.product(f"blk.{layer}.attn_q_b", query_latent, "split_queries", queries.width)


def _write_latent(graph: Graph, layer: int, x: Buffer, latent: LatentConfig) -> tuple[Buffer, Buffer]:
    """Write the normed latent, and the part of the keys that will rotate, which all heads share."""
    values = graph.buffer("latent", latent.kv_rank, x.rows)
    rotating = graph.buffer("rotating_keys", graph.config.rope.rotary_size, x.rows)
    graph.tape.matmul(x, graph.row_parts(f"blk.{layer}.attn_kv_a_mqa", x, values, rotating))
    graph.norm(values, values, f"blk.{layer}.attn_kv_a_norm", epsilon=latent.norm_epsilon)
    return values, rotating


def write_unabsorbed_attention(graph: Graph, layer: int, x: Buffer, tables: RopeTables, latent: LatentConfig) -> Buffer:
    """Write one layer's latent attention over x; the result still needs its output projection.

    DeepSeek-V2 (arXiv 2405.04434), section 2.1.2: `attn_kv_b` makes of the latent, per head, the part of the key that
    does not rotate and the value; the rotated part is one for all heads.
    """
    tape, num_heads, rotary_size = graph.tape, graph.config.num_heads[layer], graph.config.rope.rotary_size
    plain_size = latent.key_size - rotary_size
    pair_size = plain_size + latent.value_size
    table = tables.for_layer(windowed=False)

    queries = _write_split_queries(graph, layer, x, latent)
    tape.rope(queries, table, latent.key_size, plain_size)
    sharpen_queries(graph, queries)
    normed, rotating = _write_latent(graph, layer, x, latent)
    tape.rope(rotating, table, rotary_size)
    pairs = graph.product(f"blk.{layer}.attn_kv_b", normed, "keys_and_values", num_heads * pair_size)
    keys = graph.buffer("keys", num_heads * latent.key_size, x.rows)
    values = graph.buffer("values", num_heads * latent.value_size, x.rows)
    tape.copy_heads(keys, pairs, num_heads, plain_size, latent.key_size, pair_size)
    tape.copy_heads(keys, rotating, num_heads, rotary_size, latent.key_size, 0, out_offset=plain_size)
    tape.copy_heads(values, pairs, num_heads, latent.value_size, latent.value_size, pair_size, x_offset=plain_size)
    tape.store_kv(layer, keys, values)
    attended = graph.buffer("attended", values.width, x.rows)
    tape.attention(attended, queries, layer, attention_shape(graph, layer, window=0, chunk=0))
    return attended
