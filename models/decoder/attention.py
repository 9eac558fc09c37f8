"""The attention block: projections, norms of queries and keys, RoPE, the cache, attention itself."""

import math
from dataclasses import replace

import numpy as np

from localinfer.kernels.ops import AttentionShape, Buffer, FloatArray, LinearWeight, Projection, RopeTable
from localinfer.models.decoder.architecture import QueryKeyNorm
from localinfer.models.decoder.graph import Graph
from localinfer.models.decoder.rope import rope_table


class RopeTables:
    """The rotations of one model: layers with a sliding window may have a base of their own, or no scaling."""

    def __init__(self, graph: Graph, context_length: int) -> None:
        architecture = graph.architecture
        rope = replace(graph.config.rope, base=architecture.rope_base or graph.config.rope.base)
        divisors = _divisors(graph, context_length)
        windowed = replace(rope, base=architecture.windowed_rope_base or rope.base_windowed or rope.base)
        if not architecture.scales_windowed_rope:
            windowed = replace(windowed, scaling="none", attention_factor=1.0)
        pairing, magnitude = architecture.pairing, architecture.rope_magnitude
        self._full = rope_table(rope, pairing, divisors, magnitude)
        self._windowed = rope_table(windowed, pairing, divisors, magnitude)

    def for_layer(self, windowed: bool) -> RopeTable:
        """The table of a layer with or without a sliding window."""
        return self._windowed if windowed else self._full


def write_attention(graph: Graph, layer: int, x: Buffer, tables: RopeTables) -> Buffer:
    """Write one layer's attention over x; the result still needs its output projection."""
    config, architecture, tape = graph.config, graph.architecture, graph.tape
    num_heads, num_kv_heads = config.num_heads[layer], config.num_kv_heads[layer]
    if not graph.weights.has(f"blk.{layer}.attn_qkv.weight"):
        for letter in "qkv":
            # Sizes that no tensor has confirmed must not reserve memory.
            graph.weights.shape(f"blk.{layer}.attn_{letter}.weight")
    queries = graph.buffer("queries", num_heads * config.head_dim, x.rows)
    keys = graph.buffer("keys", num_kv_heads * config.head_dim, x.rows)
    values = graph.buffer("values", num_kv_heads * config.value_head_dim, x.rows)
    tape.matmul(x, _projections(graph, layer, queries, keys, values))

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
    tape.store_kv(layer, keys, values)
    attended = graph.buffer("attended", num_heads * config.value_head_dim, x.rows)
    tape.attention(attended, queries, layer, attention_shape(graph, layer, window, chunk))
    return attended


def write_attention_output(graph: Graph, layer: int, hidden: Buffer, attended: Buffer) -> None:
    """Add the output projection of one layer's attention to hidden."""
    name = f"blk.{layer}.attn_output"
    weight = graph.weights.linear(f"{name}.weight", hidden.width, attended.width)
    post_norm = graph.architecture.attention_post_norm
    graph.add_branch(hidden, attended, weight, graph.bias(name, hidden.width), post_norm and f"blk.{layer}.{post_norm}")


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
        softcap=config.attention_softcap,
        window=window,
        chunk=chunk,
        sinks=graph.weights.optional_vector(f"blk.{layer}.attn_sinks.weight", (num_heads,)),
        alibi_slopes=alibi_slopes(num_heads, architecture.max_alibi_bias) if architecture.max_alibi_bias else None,
    )


def alibi_slopes(num_heads: int, max_bias: float) -> FloatArray:
    """One slope per head, float32[num_heads]: a geometric sequence, odd powers filling up to num_heads.

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
        names = [f"blk.{layer}.attn_{letter}" for letter in "qkv"]
        return [
            Projection(graph.weights.linear(f"{name}.weight", out.width, hidden_size), out, graph.bias(name, out.width))
            for name, out in zip(names, outs, strict=True)
        ]
    num_rows = sum(out.width for out in outs)
    bias = graph.bias(fused, num_rows)
    projections = []
    first = 0
    for out in outs:
        rows = slice(first, first + out.width)
        weight: LinearWeight = graph.weights.linear(f"{fused}.weight", num_rows, hidden_size, rows)
        projections.append(Projection(weight, out, None if bias is None else bias[rows]))
        first += out.width
    return projections


def _norm_queries_and_keys(graph: Graph, layer: int, queries: Buffer, keys: Buffer) -> None:
    kind = graph.architecture.query_key_norm
    for buffer, letter in ((queries, "q"), (keys, "k")):
        name = f"blk.{layer}.attn_{letter}_norm"
        is_absent = kind is QueryKeyNorm.OPTIONAL and not graph.weights.has(f"{name}.weight")
        if kind is QueryKeyNorm.NONE or is_absent:
            continue
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
