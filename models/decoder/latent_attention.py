"""Multi-head latent attention in its absorbed form: all heads share one cached latent (DeepSeek-V2, arXiv 2405.04434).

A head's key is a matrix times the latent, so its score with a query is the latent's with that matrix's transpose times
the query; GGUF stores the transpose as `attn_k_b`. Likewise `attn_v_b` may wait until attention has averaged latents.
What is cached per position is the latent and one rotated part that all heads share: one wide key head whose first
elements are the value.
"""

from localinfer.kernels.ops import Buffer, Projection
from localinfer.models.decoder.attention import RopeTables, attention_shape, sharpen_queries
from localinfer.models.decoder.config import LatentConfig
from localinfer.models.decoder.graph import Graph, refuse


def write_latent_attention(graph: Graph, layer: int, x: Buffer, tables: RopeTables) -> Buffer:
    """Write one layer's attention over x; the result still needs its output projection.

    Raises: UnsupportedFormatError for files from before the latent was cached, which hold `attn_kv_b` instead.
    """
    config, tape, weights = graph.config, graph.tape, graph.weights
    latent = config.latent
    if latent is None or config.num_kv_heads[layer] != 1 or not weights.has(f"blk.{layer}.attn_k_b.weight"):
        raise refuse(config, "stores its latent attention in the old form (attn_kv_b)")
    num_heads, rotary_size = config.num_heads[layer], config.rope.rotary_size
    plain_size, head_size = latent.key_size - rotary_size, latent.kv_rank + rotary_size
    table = tables.for_layer(windowed=False)

    split_queries = _split_queries(graph, layer, x, latent)
    queries = graph.buffer("queries", num_heads * head_size, x.rows)
    k_b = weights.experts(f"blk.{layer}.attn_k_b.weight", num_heads, latent.kv_rank, plain_size)
    tape.head_matmul(queries, split_queries, k_b, head_size, latent.key_size)
    tape.copy_heads(
        queries, split_queries, num_heads, rotary_size, head_size, latent.key_size, latent.kv_rank, plain_size
    )
    tape.rope(queries, table, head_size, latent.kv_rank)
    sharpen_queries(graph, queries)

    values, keys = _latent_and_keys(graph, layer, x, latent)
    tape.rope(keys, table, head_size, latent.kv_rank)
    tape.store_kv(layer, keys, values)
    averaged = graph.buffer("averaged_latents", num_heads * latent.kv_rank, x.rows)
    tape.attention(averaged, queries, layer, attention_shape(graph, layer, window=0, chunk=0))
    attended = graph.buffer("attended", num_heads * latent.value_size, x.rows)
    v_b = weights.experts(f"blk.{layer}.attn_v_b.weight", num_heads, latent.value_size, latent.kv_rank)
    tape.head_matmul(attended, averaged, v_b, latent.value_size, latent.kv_rank)
    return attended


def _split_queries(graph: Graph, layer: int, x: Buffer, latent: LatentConfig) -> Buffer:
    """Queries of every head, the part without RoPE first: from x, or from a latent of their own."""
    tape, weights = graph.tape, graph.weights
    width = graph.config.num_heads[layer] * latent.key_size
    queries = graph.buffer("split_queries", width, x.rows)
    if not latent.query_rank:
        tape.matmul(x, [Projection(weights.linear(f"blk.{layer}.attn_q.weight", width, x.width), queries)])
        return queries
    query_latent = graph.buffer("query_latent", latent.query_rank, x.rows)
    q_a = weights.linear(f"blk.{layer}.attn_q_a.weight", latent.query_rank, x.width)
    tape.matmul(x, [Projection(q_a, query_latent)])
    graph.norm(query_latent, query_latent, f"blk.{layer}.attn_q_a_norm")
    q_b = weights.linear(f"blk.{layer}.attn_q_b.weight", width, latent.query_rank)
    tape.matmul(query_latent, [Projection(q_b, queries)])
    return queries


def _latent_and_keys(graph: Graph, layer: int, x: Buffer, latent: LatentConfig) -> tuple[Buffer, Buffer]:
    """The normed latent, and the key made of it and of the part that will rotate."""
    tape, rotary_size = graph.tape, graph.config.rope.rotary_size
    head_size = latent.kv_rank + rotary_size
    name = f"blk.{layer}.attn_kv_a_mqa.weight"
    values = graph.buffer("values", latent.kv_rank, x.rows)
    rotating = graph.buffer("rotating_keys", rotary_size, x.rows)
    keys = graph.buffer("keys", head_size, x.rows)
    latent_rows = graph.weights.linear(name, head_size, x.width, slice(0, latent.kv_rank))
    rotating_rows = graph.weights.linear(name, head_size, x.width, slice(latent.kv_rank, head_size))
    tape.matmul(x, [Projection(latent_rows, values), Projection(rotating_rows, rotating)])
    graph.norm(values, values, f"blk.{layer}.attn_kv_a_norm")
    tape.copy_heads(keys, values, 1, latent.kv_rank, head_size, latent.kv_rank)
    tape.copy_heads(keys, rotating, 1, rotary_size, head_size, rotary_size, out_offset=latent.kv_rank)
    return values, keys
