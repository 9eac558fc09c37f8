"""Formulas of the op set that are longer than a line, for one row or any shape, in float64."""

import math

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import Activation, AttentionShape, Gating, Routing
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
) -> Float64Array:
    """Attention of one row, at `position` or else the last of `positions`, over keys and values of these."""
    position = positions[-1] if position is None else position
    keys = keys.reshape(len(positions), shape.num_kv_heads, shape.key_size)
    values = values.reshape(len(positions), shape.num_kv_heads, shape.value_size)
    result = np.empty((shape.num_heads, shape.value_size))
    for head, head_query in enumerate(query.reshape(shape.num_heads, shape.key_size)):
        kv_head = head // (shape.num_heads // shape.num_kv_heads)
        scores = shape.scale * (keys[:, kv_head] @ head_query)
        if shape.softcap:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        if shape.alibi_slopes is not None:
            scores = scores - float(shape.alibi_slopes[head]) * np.abs(np.asarray(positions) - position)
        sink = -np.inf if shape.sinks is None else float(shape.sinks[head])
        highest = max(float(scores.max()), sink)
        weights = np.exp(scores - highest)
        result[head] = weights @ values[:, kv_head] / (weights.sum() + np.exp(sink - highest))
    return result.reshape(-1)


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
        group_merit = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        kept = np.argsort(-group_merit, kind="stable")[: routing.num_selected_groups]
        is_kept = np.isin(np.arange(routing.num_groups), kept)
        merit = np.where(is_kept[:, None], groups, -np.inf).reshape(-1)
    ids = np.argsort(-merit, kind="stable")[: routing.num_selected]
    weights = values[ids]
    if routing.gating is Gating.SOFTMAX_SELECTED:
        weights = np.exp(weights - weights.max())
        weights = weights / weights.sum()
    if routing.normalise:
        weights = weights / weights.sum()
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
    if kind is Activation.RELU:
        return np.maximum(x, 0.0)
    assert kind is Activation.RELU_SQUARED, f"{kind} needs a gate"
    return np.maximum(x, 0.0) * np.maximum(x, 0.0)


def erf(x: Float64Array) -> Float64Array:
    return np.array([math.erf(value) for value in x.reshape(-1)]).reshape(x.shape)
