"""Whether the rows of queries and keys lie in the order in which rotary embeddings pair them.

A pair of rows turns with one frequency, and training gives both about the same size, which changes little from one
frequency to the next. So the sizes of rows tell the order that they are in: whole conversions have been published with
the rows of each head in the order of Hugging Face where GGUF has pairs, or permuted twice.
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import Pairing
from localinfer.models.checks.finding import Finding
from localinfer.models.decoder.architecture import QueryKeyNorm
from localinfer.models.decoder.architectures import find_architecture
from localinfer.models.decoder.config import ModelConfig

_LEAST_HEAD_DIM = 32
_LEAST_PAIRS = 350
_PAIRED, _OPPOSED = 0.2, -0.1
"""Correlations of the rows of a pair: 0.3 to 0.8 in trained models, -0.5 to 0 where rows are taken for a pair that are
none, and with so many pairs within 0.15 of 0 where there is no order."""
_LEAST_RATIO = 0.6


def judge_head_order(row_rms: Mapping[str, NDArray[np.float64]], config: ModelConfig) -> Iterator[Finding]:
    """Yield that heads are permuted. row_rms: float64[rows] of each tensor, by its name."""
    wrong: dict[str, list[str]] = {}
    for kind in ("q", "k"):
        sizes = _head_sizes(row_rms, config, kind)
        order = None if sizes is None else _other_order(sizes, find_architecture(config).pairing)
        if order is not None:
            wrong.setdefault(order, []).append(f"attn_{kind}")
    for order, names in wrong.items():
        yield Finding(
            "head order",
            f"the rows of {' and '.join(names)} {order}, so {config.architecture} pairs rows that are none: positions "
            "are lost on it; get a current conversion of the model",
        )


def _other_order(sizes: NDArray[np.float64], pairing: Pairing) -> str | None:
    """The order that rows are in if it is another than a pairing wants."""
    adjacent, halves = _correlation(sizes, 1), _correlation(sizes, sizes.shape[1] // 2)
    if pairing is Pairing.HALVES:
        is_opposed = halves < _OPPOSED and adjacent > _PAIRED
        return "are permuted as Llama's are" if is_opposed else None
    if adjacent < _OPPOSED and _correlation(_unpermuted(sizes), 1) > _PAIRED:
        return "were permuted twice"
    if halves > max(_PAIRED, _LEAST_RATIO * adjacent):
        return "lie in halves of a head, as Hugging Face has them"
    return None


def _head_sizes(
    row_rms: Mapping[str, NDArray[np.float64]], config: ModelConfig, kind: str
) -> NDArray[np.float64] | None:
    """Logarithms of the sizes of the rows of queries ("q") or keys ("k"), float64[heads of all layers, head_dim], less
    the mean of each head; None where the order cannot be told: with other heads, norms of queries, or too few."""
    dim, architecture = config.head_dim, find_architecture(config)
    has_norms = architecture.query_key_norm is not QueryKeyNorm.NONE or architecture.unweighted_query_key_norm
    if has_norms or config.rope.rotary_size != dim or dim < _LEAST_HEAD_DIM or config.windowed_head_dim:
        return None
    found = []
    for layer, count in enumerate(config.num_heads if kind == "q" else config.num_kv_heads):
        rows = row_rms.get(f"blk.{layer}.attn_{kind}.weight")
        has_rope = architecture.has_rope[layer] if architecture.has_rope else True
        if has_rope and rows is not None and len(rows) == count * dim and (rows > 0).all():
            found.append(np.log(rows).reshape(count, dim))
    if sum(one.size for one in found) < 2 * _LEAST_PAIRS:
        return None
    sizes = np.concatenate(found)
    centred: NDArray[np.float64] = sizes - sizes.mean(axis=1, keepdims=True)
    return centred


def _correlation(sizes: NDArray[np.float64], distance: int) -> float:
    """Of rows of a head that lie a distance apart, in pairs."""
    heads, dim = sizes.shape
    pairs = sizes.reshape(heads, dim // (2 * distance), 2, distance)
    spread = float(np.mean(sizes**2))
    return float(np.mean(pairs[:, :, 0] * pairs[:, :, 1])) / spread if spread else 0.0


def _unpermuted(sizes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Undo one permutation from halves to pairs."""
    heads, dim = sizes.shape
    return np.ascontiguousarray(sizes.reshape(heads, dim // 2, 2).swapaxes(1, 2)).reshape(heads, dim)
