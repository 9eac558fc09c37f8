"""The attention blocks: projections, norms of queries and keys, RoPE, KV cache, attention.

Attention biases by the distance of two positions: T5's buckets as MPNet has them, and DeBERTa's products.

What an op needs is a bucket for every distance, and one number of each head for each bucket: learned ones, or products
with the row's query and the other's key.
"""

import math
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import Activation, AttentionShape, Buffer, Projection, Relative, RopeTable
from localinfer.models.decoder.architecture import OUTPUT_NAMES, Mixer, QueryKeyNorm, RelativeBias
from localinfer.models.decoder.block_config import LatentConfig
from localinfer.models.decoder.graph import Graph, refuse
from localinfer.models.decoder.rope import rope_table
from localinfer.models.decoder.sparse_attention import choose_blocks, choose_latents
from localinfer.types import FloatArray

_T5_MAX_DISTANCE = 128
"""Of MPNet, whatever its context: further positions share a bucket (transformers, modeling_mpnet.py)."""


def write_relative_bias(graph: Graph, layer: int, queries: Buffer, keys: Buffer) -> Relative | None:
    """Write what attention adds to scores by distance; None for architectures without. Raises: as `write_decoder`."""
    config, kind = graph.config, graph.architecture.relative_bias
    if kind is None:
        return None
    num_heads, count = config.num_heads[layer], config.num_relative_buckets
    if kind is RelativeBias.TABLE:
        if count < 4 or count % 4:
            raise refuse(config, f"has {count} buckets of distances (attention.relative_buckets_count)")
        learned = graph.weights.vector("attn_rel_b.weight", (count, num_heads))
        buckets = t5_buckets(count, _T5_MAX_DISTANCE, _T5_MAX_DISTANCE)
        return Relative(buckets, count, table=np.ascontiguousarray(learned.T))
    span = config.max_relative_distance if count == 0 else count // 2
    if span < 1 or count % 2:
        raise refuse(config, f"tells {span} distances apart (attention.max_relative_positions)")
    reach = max(config.context_length, config.max_relative_distance)
    buckets = log_buckets(span, config.max_relative_distance, reach, is_plain=count == 0)
    parts = [
        _products(graph, f"blk.{layer}.attn_rel_{letter}", x, num_heads, 2 * span)
        for letter, x in (("k", queries), ("q", keys))
    ]
    return Relative(buckets, 2 * span, by_row=parts[0], by_key=parts[1])


def _products(graph: Graph, name: str, x: Buffer, num_heads: int, num_buckets: int) -> Buffer | None:
    """Every head of x times the vectors of all buckets, where the file has such a stack."""
    if not graph.weights.has(f"{name}.weight"):
        return None
    head_dim = x.width // num_heads
    out = graph.buffer(name.rpartition(".")[2], num_heads * num_buckets, x.rows)
    weight = graph.weights.experts(f"{name}.weight", num_heads, num_buckets, head_dim)
    graph.tape.head_matmul(out, x, weight, num_buckets, head_dim)
    return out


def t5_buckets(num_buckets: int, max_distance: int, reach: int) -> NDArray[np.int64]:
    """The bucket of every distance from -reach to reach, int64[2 * reach + 1]: half of them for positions after a row.

    Of each half, the first half is of single distances, the others of ranges that grow up to max_distance.
    Source: T5 (arXiv 1910.10683, section 2.1), as transformers rounds it.
    """
    distances = np.arange(-reach, reach + 1)
    side, far = num_buckets // 2, np.abs(distances)
    exact = side // 2
    with np.errstate(divide="ignore"):
        logs = np.log(far.astype(np.float32) / np.float32(exact)) / np.float32(np.log(max_distance / exact))
    large = exact + np.where(far < exact, 0.0, logs * np.float32(side - exact)).astype(np.int64)
    return np.where(distances > 0, side, 0) + np.where(far < exact, far, np.minimum(large, side - 1))


def log_buckets(span: int, max_distance: int, reach: int, *, is_plain: bool) -> NDArray[np.int64]:
    """The bucket of every distance from -reach to reach, int64[2 * reach + 1], of 2 * span: the furthest last.

    Distances up to span / 2 have buckets of their own, further ones share them by their logarithm, up to max_distance;
    is_plain: all have their own. Source: DeBERTa (arXiv 2006.03654, section 3.1) and DeBERTa V3's buckets, as
    transformers rounds them (modeling_deberta_v2.py).
    """
    behind = -np.arange(-reach, reach + 1)
    far, middle = np.abs(behind), span // 2
    if not is_plain and middle:
        steps = np.log(np.maximum(far, 1).astype(np.float32) / np.float32(middle))
        steps /= np.log(np.float32((max_distance - 1) / middle))
        large = np.ceil(steps * np.float32(middle - 1)) + middle
        behind = np.where(far <= middle, behind, large * np.sign(behind)).astype(np.int64)
    return np.clip(behind + span, 0, 2 * span - 1)


class RopeTables:
    """The RoPE tables of one model: sliding-window layers may have another base, or no scaling."""

    def __init__(self, graph: Graph, context_length: int) -> None:
        architecture = graph.architecture
        rope = replace(graph.config.rope, base=architecture.rope_base or graph.config.rope.base)
        divisors = _divisors(graph, context_length)
        windowed = replace(rope, base=architecture.windowed_rope_base or rope.base_windowed or rope.base)
        if rope.has_plain_windows or not architecture.scales_windowed_rope:
            windowed = replace(windowed, scaling="none", attention_factor=1.0)
        is_divided = architecture.divides_windowed_rope and not rope.has_plain_windows
        windowed_divisors = divisors if is_divided else None
        if architecture.full_rotary_size is not None:
            rope = replace(rope, rotary_size=architecture.full_rotary_size)
            divisors = None if divisors is None else divisors[: rope.rotary_size // 2]
        pairing, magnitude = architecture.pairing, architecture.rope_magnitude
        self._full = rope_table(rope, pairing, divisors, magnitude)
        windowed = replace(windowed, rotary_size=windowed.rotary_size_windowed or windowed.rotary_size)
        self._windowed = rope_table(windowed, pairing, windowed_divisors, magnitude)

    def for_layer(self, windowed: bool) -> RopeTable:
        """The table of a layer with or without a sliding window."""
        return self._windowed if windowed else self._full


def write_attention(graph: Graph, layer: int, x: Buffer, tables: RopeTables) -> Buffer:
    """Write one layer's attention over x; the result still needs its output projection."""
    config, architecture, tape = graph.config, graph.architecture, graph.tape
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
    tape.attention(attended, queries, kv_layer, attention_shape(graph, layer, window, chunk), chosen, relative)
    if gate is not None:
        tape.multiply_sigmoid(attended, attended, gate)
    elif graph.weights.has(f"blk.{layer}.attn_gate.weight"):
        _gate_heads(graph, layer, x, attended)
    return attended


def _write_projections(
    graph: Graph, layer: int, x: Buffer, queries: Buffer, keys: Buffer, values: Buffer
) -> Buffer | None:
    """Project x to queries, keys and values; returns the gates of the result that some have beside queries."""
    config, tape = graph.config, graph.tape
    if not graph.architecture.gates_attention:
        tape.matmul(x, _projections(graph, layer, queries, keys, values))
        return None
    num_heads, size = config.num_heads[layer], config.head_dim
    together = graph.buffer("queries_and_gates", 2 * queries.width, x.rows)
    gate = graph.buffer("attention_gate", queries.width, x.rows)
    tape.matmul(x, _projections(graph, layer, together, keys, values))
    tape.copy_heads(queries, together, num_heads, size, size, 2 * size)
    tape.copy_heads(gate, together, num_heads, size, size, 2 * size, x_offset=size)
    return gate


def write_mixer_output(graph: Graph, layer: int, hidden: Buffer, attended: Buffer, mixer: Mixer) -> None:
    """Add the output projection of one layer's attention or recurrent block to hidden."""
    block, post_norm = f"blk.{layer}", graph.architecture.of_layer(layer).attention_post_norm
    if graph.weights.has(f"{block}.attn_sub_norm.weight"):
        graph.norm(attended, attended, f"{block}.attn_sub_norm")
    name, scale = OUTPUT_NAMES[mixer], graph.architecture.attention_output_scale
    graph.add_branch(hidden, attended, f"{block}.{name}", post_norm and f"{block}.{post_norm}", scale)


def _gate_heads(graph: Graph, layer: int, x: Buffer, attended: Buffer) -> None:
    """Weigh attention's result by a sigmoid of x (arXiv 2505.06708), or a softplus: a gate per head, or per element."""
    name, num_heads = f"blk.{layer}.attn_gate", graph.config.num_heads[layer]
    by_head = graph.weights.shape(f"{name}.weight")[0] == num_heads
    gate = graph.buffer("attention_gate", num_heads if by_head else attended.width, x.rows)
    graph.tape.matmul(x, [graph.projection(name, gate, x.width)])
    if graph.architecture.has_softplus_gates:
        graph.tape.activation(gate, gate, Activation.SOFTPLUS)
        graph.tape.multiply(attended, attended, gate)
    else:
        graph.tape.multiply_sigmoid(attended, attended, gate)


def sharpen_queries(graph: Graph, queries: Buffer) -> None:
    """Scale queries by the logarithm of their position, in the models that do."""
    architecture = graph.architecture
    if architecture.temperature_length and architecture.temperature_scale:
        graph.tape.scale_by_position(
            queries, architecture.temperature_length, architecture.temperature_scale, architecture.temperature_offset
        )


def attention_shape(graph: Graph, layer: int, window: int, chunk: int) -> AttentionShape:
    """Sizes and mask of one layer's attention."""
    config, architecture = graph.config, graph.architecture
    num_heads = config.num_heads[layer]
    scale = architecture.attention_scale or config.attention_scale or 1.0 / math.sqrt(config.head_dim)
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=config.num_kv_heads[layer],
        key_size=config.head_dim,
        value_size=config.value_head_dim,
        scale=scale,
        softcap=config.attention_softcap if architecture.attention_softcap is None else architecture.attention_softcap,
        window=window,
        chunk=chunk,
        sinks=graph.weights.optional_vector(f"blk.{layer}.attn_sinks.weight", (num_heads,)),
        alibi_slopes=alibi_slopes(num_heads, architecture.max_alibi_bias) if architecture.max_alibi_bias else None,
        bidirectional=not architecture.causal,
    )


def alibi_slopes(num_heads: int, max_bias: float) -> FloatArray:
    """One slope per head, float32[num_heads]: a geometric sequence, extended by odd powers to num_heads.

    Source: ALiBi (arXiv 2108.12409), section 3, and its published rule for counts that are not powers of two.
    """
    power = 1 << (num_heads.bit_length() - 1)
    exponents = [(head + 1) / power for head in range(power)]
    exponents += [(2 * head + 1) / (2 * power) for head in range(num_heads - power)]
    return np.asarray(2.0 ** (-max_bias * np.asarray(exponents)), dtype=np.float32)


def _projections(graph: Graph, layer: int, *outs: Buffer) -> list[Projection]:
    """Queries, keys and values: three matrices, or the rows of one."""
    hidden_size = graph.config.hidden_size
    fused = f"blk.{layer}.attn_qkv"
    if not graph.weights.has(f"{fused}.weight"):
        return [
            graph.projection(f"blk.{layer}.attn_{letter}", out, hidden_size)
            for letter, out in zip("qkv", outs, strict=True)
        ]
    num_rows = sum(out.width for out in outs)
    firsts = [sum(out.width for out in outs[:index]) for index in range(len(outs))]
    return [
        graph.projection(fused, out, hidden_size, rows=(first, num_rows))
        for out, first in zip(outs, firsts, strict=True)
    ]


def _norm_queries_and_keys(graph: Graph, layer: int, queries: Buffer, keys: Buffer) -> None:
    kind = graph.architecture.query_key_norm
    if kind is QueryKeyNorm.NONE:
        return
    if kind is QueryKeyNorm.OPTIONAL and not graph.weights.has(f"blk.{layer}.attn_q_norm.weight"):
        return
    for buffer, letter in ((queries, "q"), (keys, "k")):
        name = f"blk.{layer}.attn_{letter}_norm"
        is_whole = graph.weights.shape(f"{name}.weight") == (buffer.width,)
        graph.norm(buffer, buffer, name, 0 if is_whole else graph.config.head_dim)


def _divisors(graph: Graph, context_length: int) -> FloatArray | None:
    """Divisors of the frequencies: LongRoPE has one set for short contexts and one for those past the original."""
    config = graph.config
    is_long = context_length > config.rope.original_context_length
    longrope = "rope_factors_long.weight" if is_long else "rope_factors_short.weight"
    shape = (config.rope.rotary_size // 2,)
    for name in ("rope_freqs.weight", longrope):
        if graph.weights.has(name):
            return graph.weights.vector(name, shape)
    return None


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

    split = write_split_queries(graph, layer, x, latent)
    queries = graph.buffer("queries", num_heads * head_size, x.rows)
    k_b = weights.experts(f"blk.{layer}.attn_k_b.weight", num_heads, latent.kv_rank, plain_size)
    tape.head_matmul(queries, split, k_b, head_size, latent.key_size)
    tape.copy_heads(queries, split, num_heads, rotary_size, head_size, latent.key_size, latent.kv_rank, plain_size)
    has_rope = not architecture.has_rope or architecture.has_rope[layer]
    if has_rope:
        tape.rope(queries, table, head_size, latent.kv_rank)
    sharpen_queries(graph, queries)

    values, keys = _latent_and_keys(graph, layer, x, latent)
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


def write_split_queries(graph: Graph, layer: int, x: Buffer, latent: LatentConfig) -> Buffer:
    """Write the queries of every head, the part without RoPE first: from x, or from a latent of their own."""
    tape = graph.tape
    width = graph.config.num_heads[layer] * latent.key_size
    queries = graph.buffer("split_queries", width, x.rows)
    if not latent.query_rank:
        tape.matmul(x, [graph.projection(f"blk.{layer}.attn_q", queries, x.width)])
        return queries
    query_latent = graph.buffer("query_latent", latent.query_rank, x.rows)
    tape.matmul(x, [graph.projection(f"blk.{layer}.attn_q_a", query_latent, x.width)])
    graph.norm(query_latent, query_latent, f"blk.{layer}.attn_q_a_norm", epsilon=latent.norm_epsilon)
    tape.matmul(query_latent, [graph.projection(f"blk.{layer}.attn_q_b", queries, latent.query_rank)])
    return queries


def _latent_and_keys(graph: Graph, layer: int, x: Buffer, latent: LatentConfig) -> tuple[Buffer, Buffer]:
    """The normed latent, and the key made of it and of the part that will rotate."""
    tape, rotary_size = graph.tape, graph.config.rope.rotary_size
    head_size = latent.kv_rank + rotary_size
    values, rotating = write_latent(graph, layer, x, latent)
    keys = graph.buffer("keys", head_size, x.rows)
    tape.copy_heads(keys, values, 1, latent.kv_rank, head_size, latent.kv_rank)
    tape.copy_heads(keys, rotating, 1, rotary_size, head_size, rotary_size, out_offset=latent.kv_rank)
    return values, keys


def write_latent(graph: Graph, layer: int, x: Buffer, latent: LatentConfig) -> tuple[Buffer, Buffer]:
    """Write the normed latent, and the part of the keys that will rotate, which all heads share."""
    rotary_size = graph.config.rope.rotary_size
    name, num_rows = f"blk.{layer}.attn_kv_a_mqa", latent.kv_rank + rotary_size
    values = graph.buffer("latent", latent.kv_rank, x.rows)
    rotating = graph.buffer("rotating_keys", rotary_size, x.rows)
    parts = [(values, 0), (rotating, latent.kv_rank)]
    graph.tape.matmul(x, [graph.projection(name, out, x.width, rows=(first, num_rows)) for out, first in parts])
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

    queries = write_split_queries(graph, layer, x, latent)
    tape.rope(queries, table, latent.key_size, plain_size)
    sharpen_queries(graph, queries)
    normed, rotating = write_latent(graph, layer, x, latent)
    tape.rope(rotating, table, rotary_size)
    pairs = graph.buffer("keys_and_values", num_heads * pair_size, x.rows)
    tape.matmul(normed, [graph.projection(f"blk.{layer}.attn_kv_b", pairs, latent.kv_rank)])
    keys = graph.buffer("keys", num_heads * latent.key_size, x.rows)
    values = graph.buffer("values", num_heads * latent.value_size, x.rows)
    tape.copy_heads(keys, pairs, num_heads, plain_size, latent.key_size, pair_size)
    tape.copy_heads(keys, rotating, num_heads, rotary_size, latent.key_size, 0, out_offset=plain_size)
    tape.copy_heads(values, pairs, num_heads, latent.value_size, latent.value_size, pair_size, x_offset=plain_size)
    tape.store_kv(layer, keys, values)
    attended = graph.buffer("attended", values.width, x.rows)
    tape.attention(attended, queries, layer, attention_shape(graph, layer, window=0, chunk=0))
    return attended
