"""Formulas of the op set that are longer than a line, for one row or any shape, in float64."""

import math

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import Activation, AttentionShape, ChooseBlocks, Gating, Routing, SparseSelection
from localinfer.types import FloatArray

Float64Array = NDArray[np.float64]


def groups(x: Float64Array, group_size: int) -> Float64Array:
    size = group_size or x.shape[1]
    return x.reshape(x.shape[0], x.shape[1] // size, size)


def affine(groups: Float64Array, weight: FloatArray | None, bias: FloatArray | None) -> Float64Array:
    if weight is not None:
        groups = groups * weight.reshape(-1, groups.shape[-1])
    if bias is not None:
        groups = groups + bias.reshape(-1, groups.shape[-1])
    return groups


def attend(
    query: Float64Array,
    keys: Float64Array,
    values: Float64Array,
    positions: range,
    shape: AttentionShape,
    position: int | None = None,
    chosen: NDArray[np.bool_] | None = None,
    biases: tuple[Float64Array, Float64Array] | None = None,
) -> Float64Array:
    """Attention of one row, at `position` or else the last of `positions`, over keys and values of these.

    chosen: bool[1 or num_kv_heads, len(positions)], those that count. biases: [1 or num_heads, len(positions)], added
    before scores are scaled, and after.
    """
    own = np.array([positions[-1] if position is None else position])
    counted = np.ones((1, 1, len(positions)), np.bool_) if chosen is None else chosen[None]
    of_row = None if biases is None else (biases[0][None], biases[1][None])
    return attend_rows(query[None], keys, values, np.asarray(positions), shape, own, counted, of_row)[0]


def attend_rows(
    queries: Float64Array,
    keys: Float64Array,
    values: Float64Array,
    positions: NDArray[np.int64],
    shape: AttentionShape,
    own: NDArray[np.int64],
    counted: NDArray[np.bool_],
    biases: tuple[Float64Array, Float64Array] | None = None,
) -> Float64Array:
    """Attention of rows at the positions `own`, over keys and values of `positions`.

    counted: bool[rows, 1 or num_kv_heads, positions], those that a row sees. biases: [rows, 1 or num_heads,
    positions], added before scores are scaled, and after.
    """
    num_rows, num_shared = len(queries), shape.num_heads // shape.num_kv_heads
    keys = keys.reshape(len(positions), shape.num_kv_heads, shape.key_size)
    values = values.reshape(len(positions), shape.num_kv_heads, shape.value_size)
    result = np.empty((num_rows, shape.num_heads, shape.value_size))
    for head, head_queries in enumerate(np.moveaxis(queries.reshape(num_rows, shape.num_heads, shape.key_size), 1, 0)):
        kv_head = head // num_shared
        scores = shape.scale * (head_queries @ keys[:, kv_head].T)
        if biases is not None:
            scaled, plain = (part[:, head % part.shape[1]] for part in biases)
            scores = scores + shape.scale * scaled + plain
        if shape.softcap:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        if shape.alibi_slopes is not None:
            scores = scores - float(shape.alibi_slopes[head]) * np.abs(positions - own[:, None])
        scores = np.where(counted[:, kv_head % counted.shape[1]], scores, -np.inf)
        sink = -np.inf if shape.sinks is None else float(shape.sinks[head])
        highest = np.maximum(scores.max(axis=1, keepdims=True), sink)
        weights = np.exp(scores - highest)
        total = weights.sum(axis=1, keepdims=True) + np.exp(sink - highest)
        result[:, head] = weights @ values[:, kv_head] / total
    return result.reshape(num_rows, -1)


def choose(op: ChooseBlocks, queries: Float64Array, keys: Float64Array, weights: Float64Array | None) -> Float64Array:
    """The lists of one row, from queries [num_heads, key_size] and the keys [positions, key_size] up to its own."""
    scores = op.scale * (queries @ keys.T)
    if weights is not None:
        scores = (weights @ np.maximum(scores, 0.0))[None]
    count, size = op.chosen.count, op.chosen.block_size
    num_blocks = -(-len(keys) // size)
    lists = np.full((len(scores), count), -1.0)
    for index, of_list in enumerate(scores):
        best = np.array([of_list[block * size : (block + 1) * size].max() for block in range(num_blocks)])
        best[num_blocks - min(op.num_local, num_blocks) :] = np.inf
        # Of local blocks beyond the count, the nearest.
        if op.num_local > count:
            best[: num_blocks - count] = -np.inf
        chosen = np.sort(np.argsort(-best, kind="stable")[:count])
        lists[index, : len(chosen)] = chosen
    return lists.reshape(-1)


def is_chosen(lists: Float64Array, chosen: SparseSelection, num_positions: int) -> NDArray[np.bool_]:
    """Which positions the lists of a row hold, bool[lists, positions]."""
    blocks = np.arange(num_positions) // chosen.block_size
    return np.stack([np.isin(blocks, one) for one in lists.reshape(chosen.num_lists, -1)])


def route(logits: Float64Array, routing: Routing) -> tuple[NDArray[np.int64], Float64Array]:
    values = logits
    if routing.gating is Gating.SIGMOID:
        values = sigmoid(logits)
    elif routing.gating is Gating.SOFTMAX:
        values = np.exp(logits - logits.max())
        values = values / values.sum()
    merit = values if routing.selection_bias is None else values + routing.selection_bias
    if routing.num_groups > 1:
        groups = merit.reshape(routing.num_groups, -1)
        group_merit = np.sort(groups, axis=1)[:, -routing.num_group_values :].sum(axis=1)
        kept = np.argsort(-group_merit, kind="stable")[: routing.num_selected_groups]
        is_kept = np.isin(np.arange(routing.num_groups), kept)
        merit = np.where(is_kept[:, None], groups, -np.inf).reshape(-1)
    ids = np.argsort(-merit, kind="stable")[: routing.num_selected]
    weights = values[ids]
    if routing.gating is Gating.SPARSE_MIXER:
        left = merit.copy()
        for slot, expert in enumerate(ids):
            near = merit[expert] - merit <= routing.margin * np.maximum(np.abs(merit), merit[expert])
            weights[slot] = 1.0 / np.exp(left[near] - merit[expert]).sum()
            left[expert] = -np.inf
    if routing.gating is Gating.SOFTMAX_SELECTED:
        weights = np.exp(weights - weights.max())
        weights = weights / weights.sum()
    if routing.normalise:
        weights = weights / weights.sum()
    if routing.output_scales is not None:
        weights = weights * routing.output_scales[ids]
    return ids, weights * routing.scale


def sigmoid(x: Float64Array) -> Float64Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)), dtype=np.float64)


def activate(x: Float64Array, kind: Activation) -> Float64Array:
    if kind is Activation.SILU:
        return x * sigmoid(x)
    if kind is Activation.GELU_TANH:
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    if kind is Activation.GELU_ERF:
        return 0.5 * x * (1.0 + erf(x / math.sqrt(2.0)))
    if kind is Activation.GELU_QUICK:
        return x * sigmoid(1.702 * x)
    if kind is Activation.SIGMOID:
        return sigmoid(x)
    if kind is Activation.SOFTPLUS:
        return np.logaddexp(0.0, x)
    if kind is Activation.TANH:
        return np.tanh(x)
    if kind is Activation.RELU:
        return np.maximum(x, 0.0)
    assert kind is Activation.RELU_SQUARED, f"{kind} needs a gate"
    return np.maximum(x, 0.0) * np.maximum(x, 0.0)


def erf(x: Float64Array) -> Float64Array:
    return np.array([math.erf(value) for value in x.reshape(-1)]).reshape(x.shape)
