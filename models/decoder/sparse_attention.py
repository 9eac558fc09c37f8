"""Sparse attention: an indexer with keys of its own chooses the positions, or blocks of them, that a layer attends to.

Sources: DeepSeek-V3.2 (arXiv 2512.02556, section 2: single positions, by a weighted sum over small heads) and GLM-5,
where some layers take the choice of the last one before them that makes its own; MiniMax M3 (blocks of positions, one
list per KV head). The indexer's keys are further layers of the cache, after those of the model, which keep no values.
A context in which every position would be chosen has none of this.
"""

import math
from dataclasses import replace

from localinfer.kernels.ops import Buffer, KVLayerShape, Pairing, RopeTable, Rows, SparseSelection
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.graph import Graph, refuse

_DEEPSEEK_EPSILON = 1e-6


def index_layers(config: ModelConfig) -> list[int]:
    """The layers that choose by keys of their own."""
    indexer = config.indexer
    if indexer is None or config.context_length <= indexer.num_selected * indexer.block_size:
        return []
    return [layer for layer, has_indexer in enumerate(indexer.layers) if has_indexer]


def index_cache_shapes(config: ModelConfig) -> list[KVLayerShape]:
    """The indexers' layers of the cache, after the model's."""
    return [KVLayerShape(1, config.indexer.key_size, 0) for _ in index_layers(config) if config.indexer]


def choose_latents(
    graph: Graph, layer: int, x: Buffer, query_latent: Buffer | None, table: RopeTable
) -> SparseSelection | None:
    """Write the choice of positions of a layer with latent attention; None where all are attended to.

    x: the layer's normed input. query_latent: normed too. table: RoPE of the layer's keys.
    Raises: UnsupportedFormatError for a model without query latents.
    """
    config, tape, weights = graph.config, graph.tape, graph.weights
    indexer, layers = config.indexer, index_layers(config)
    if indexer is None or not layers or layer >= config.num_main_layers:
        return None
    chosen = _chosen(graph, num_lists=1)
    if layer not in layers:
        return chosen
    if query_latent is None:
        raise refuse(config, "has an indexer and no query latents")
    name, num_heads, size = f"blk.{layer}.indexer", indexer.num_heads, indexer.key_size
    queries = graph.buffer("index_queries", num_heads * size, x.rows)
    tape.matmul(query_latent, [graph.projection(f"{name}.attn_q_b", queries, query_latent.width)])
    keys = graph.buffer("index_keys", size, x.rows)
    head_weights = graph.buffer("index_weights", num_heads, x.rows)
    projections = [
        graph.projection(f"{name}.{part}", out, x.width) for part, out in (("attn_k", keys), ("proj", head_weights))
    ]
    tape.matmul(x, projections)
    weight, bias = (weights.vector(f"{name}.k_norm.{part}", (size,)) for part in ("weight", "bias"))
    is_deepseek = config.architecture == "deepseek32"
    tape.layer_norm(keys, keys, weight, bias, _DEEPSEEK_EPSILON if is_deepseek else 0.0)
    table = replace(table, pairing=Pairing.HALVES if is_deepseek else Pairing.ADJACENT)
    tape.rope(queries, table, size)
    tape.rope(keys, table, size)
    cached = config.num_layers + layers.index(layer)
    tape.store_kv(cached, keys, None)
    scale = 1.0 / math.sqrt(size * num_heads)
    tape.choose_blocks(
        chosen, queries, cached, num_heads, size, config.context_length, scale, head_weights, indexer.num_local
    )
    return chosen


def choose_blocks(graph: Graph, layer: int, x: Buffer, table: RopeTable) -> SparseSelection | None:
    """Write the choice of blocks of a layer with ordinary heads, a list per KV head; None where all are attended to."""
    config, tape = graph.config, graph.tape
    indexer, layers = config.indexer, index_layers(config)
    if indexer is None or layer not in layers:
        return None
    if indexer.num_heads != config.num_kv_heads[layer]:
        raise refuse(config, f"has {indexer.num_heads} index heads for {config.num_kv_heads[layer]} KV heads")
    name, num_heads, size = f"blk.{layer}.indexer", indexer.num_heads, indexer.key_size
    queries = graph.buffer("index_queries", num_heads * size, x.rows)
    keys = graph.buffer("index_keys", size, x.rows)
    projections = [
        graph.projection(f"{name}.{letter}_proj", out, x.width) for letter, out in (("q", queries), ("k", keys))
    ]
    tape.matmul(x, projections)
    for letter, out in (("q", queries), ("k", keys)):
        graph.norm(out, out, f"{name}.{letter}_norm", size)
        tape.rope(out, table, size)
    cached = config.num_layers + layers.index(layer)
    tape.store_kv(cached, keys, None)
    chosen = _chosen(graph, num_heads)
    tape.choose_blocks(chosen, queries, cached, num_heads, size, config.context_length, num_local=indexer.num_local)
    return chosen


def _chosen(graph: Graph, num_lists: int) -> SparseSelection:
    indexer = graph.config.indexer
    assert indexer is not None, "the caller has checked that the model has an indexer"
    blocks = graph.buffer("chosen", num_lists * indexer.num_selected, Rows.BATCH)
    return SparseSelection(blocks, indexer.num_selected, indexer.block_size)
