"""Latent attention in the form of older files: every head's keys and values are made before they are cached."""

from localinfer.kernels.ops import Buffer
from localinfer.models.decoder.attention import (
    RopeTables,
    attention_shape,
    sharpen_queries,
    write_latent,
    write_split_queries,
)
from localinfer.models.decoder.block_config import LatentConfig
from localinfer.models.decoder.graph import Graph


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
