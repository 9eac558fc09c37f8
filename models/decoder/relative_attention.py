"""Attention biases by the distance of two positions: T5's buckets as MPNet has them, and DeBERTa's products.

What an op needs is a bucket for every distance, and one number of each head for each bucket: learned ones, or products
with the row's query and the other's key.
"""

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import Buffer, Relative
from localinfer.models.decoder.architecture import RelativeBias
from localinfer.models.decoder.graph import Graph, refuse

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
