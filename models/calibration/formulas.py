"""Formulas of the op set over many rows at once, in float32: what a calibration pass computes with NumPy.

Kernels compute the same one batch at a time (`kernels/ops/` says what); these are for texts of thousands of tokens.
"""

import math

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import Activation, AttentionShape, Gating, Pairing, RopeTable, Routing, SparseSelection
from localinfer.models.calibration.choices import choice_mask
from localinfer.types import FloatArray

_QUERIES_AT_ONCE = 128

# Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26: |error| below 1.5e-7.
_ERF_P = 0.3275911
_ERF_FACTORS = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def sigmoid(x: FloatArray) -> FloatArray:
    """1 / (1 + exp(-x))."""
    result: FloatArray = np.negative(x)
    # Beyond this the result is 0 in float32, and the exponential would overflow.
    np.minimum(result, np.float32(88), out=result)
    np.exp(result, out=result)
    result += np.float32(1)
    np.reciprocal(result, out=result)
    return result


def activate(x: FloatArray, kind: Activation) -> FloatArray:
    """An activation that has no gate."""
    if kind is Activation.SILU:
        silu = sigmoid(x)
        silu *= x
        return silu
    if kind is Activation.GELU_TANH:
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        gelu: FloatArray = x * (np.float32(0.5) + np.float32(0.5) * np.tanh(inner))
        return gelu
    if kind is Activation.GELU_ERF:
        return np.float32(0.5) * x * (np.float32(1) + _erf(x * np.float32(math.sqrt(0.5))))
    if kind is Activation.GELU_QUICK:
        return x * sigmoid(np.float32(1.702) * x)
    if kind is Activation.SIGMOID:
        return sigmoid(x)
    if kind is Activation.SOFTPLUS:
        return np.logaddexp(np.float32(0), x)
    if kind is Activation.TANH:
        return np.tanh(x)
    positive: FloatArray = np.maximum(x, np.float32(0))
    if kind is Activation.RELU:
        return positive
    assert kind is Activation.RELU_SQUARED, f"{kind} needs a gate"
    return positive * positive


def activate_gated(gate: FloatArray, up: FloatArray, kind: Activation, limit: float = 0.0) -> FloatArray:
    """activation(gate) * up, or gpt-oss's clamped form; with a limit, both factors limited."""
    if kind is Activation.SWIGLU_CLAMPED:
        clamped = np.minimum(gate, np.float32(7))
        return clamped * sigmoid(np.float32(1.702) * clamped) * (np.clip(up, -7, 7) + np.float32(1))
    result = activate(gate, kind)
    if limit:
        np.minimum(result, np.float32(limit), out=result)
        up = np.clip(up, np.float32(-limit), np.float32(limit))
    result *= up
    return result


def xielu(x: FloatArray, positive: float, negative: float, beta: float, epsilon: float) -> FloatArray:
    """xIELU, arXiv 2411.13010, with the learned parameters already in the factors."""
    below = (np.expm1(np.minimum(x, np.float32(epsilon))) - x) * np.float32(negative)
    result: FloatArray = np.where(x > 0, np.float32(positive) * x * x, below) + np.float32(beta) * x
    return result


def normed(
    x: FloatArray, weight: FloatArray | None, bias: FloatArray | None, epsilon: float, group_size: int, *, centre: bool
) -> FloatArray:
    """RMS norm, or with `centre` layer norm, of rows or of groups of them. Shapes: x float32[rows, width]."""
    grouped = x.reshape(len(x), -1, group_size or x.shape[1])
    if centre:
        grouped = grouped - grouped.mean(axis=-1, keepdims=True)
    squares = np.einsum("rgi,rgi->rg", grouped, grouped)[:, :, None] / np.float32(grouped.shape[-1])
    result = grouped / np.sqrt(squares + np.float32(epsilon))
    if weight is not None:
        result *= weight.reshape(-1, grouped.shape[-1])
    if bias is not None:
        result += bias.reshape(-1, grouped.shape[-1])
    rows: FloatArray = result.reshape(x.shape)
    return rows


def rotated(x: FloatArray, table: RopeTable, head_size: int, offset: int) -> FloatArray:
    """RoPE over one whole sequence from position 0. Shapes: x float32[positions, heads * head_size]."""
    num_pairs = len(table.inverse_frequencies)
    angles = np.arange(len(x))[:, None, None] * table.inverse_frequencies
    cosine = (table.magnitude * np.cos(angles)).astype(np.float32)
    sine = (table.magnitude * np.sin(angles)).astype(np.float32)
    heads = x.reshape(len(x), -1, head_size).copy()
    part = heads[:, :, offset : offset + 2 * num_pairs]
    halves = (slice(0, None, 2), slice(1, None, 2))
    if table.pairing is Pairing.HALVES:
        halves = (slice(0, num_pairs), slice(num_pairs, None))
    first, second = part[:, :, halves[0]].copy(), part[:, :, halves[1]].copy()
    part[:, :, halves[0]] = first * cosine - second * sine
    part[:, :, halves[1]] = first * sine + second * cosine
    return heads.reshape(x.shape)


def attended(
    queries: FloatArray,
    keys: FloatArray,
    values: FloatArray,
    shape: AttentionShape,
    chosen: SparseSelection | None = None,
    lists: FloatArray | None = None,
) -> FloatArray:
    """Attention within one whole sequence from position 0.

    Shapes: float32[positions, heads * size] each; result float32[positions, num_heads * value_size]. lists: of the
    chosen positions of every row, where they are chosen.
    """
    length, kv_heads = len(queries), shape.num_kv_heads
    group = shape.num_heads // kv_heads
    # One matrix per key head: the queries that share it lie below one another.
    q = queries.reshape(length, kv_heads, group, shape.key_size).transpose(1, 2, 0, 3) * np.float32(shape.scale)
    k = keys.reshape(length, kv_heads, shape.key_size).transpose(1, 2, 0)
    v = values.reshape(length, kv_heads, shape.value_size).transpose(1, 0, 2)
    k, v = np.ascontiguousarray(k), np.ascontiguousarray(v)
    result = np.empty((length, kv_heads, group, shape.value_size), np.float32)
    for start in range(0, length, _QUERIES_AT_ONCE):
        end = min(length, start + _QUERIES_AT_ONCE)
        first = max(0, start - shape.window + 1) if shape.window else 0
        rows = q[:, :, start:end].reshape(kv_heads, -1, shape.key_size)
        scores = np.matmul(rows, k[:, :, first:end]).reshape(kv_heads, group, end - start, end - first)
        if shape.softcap:
            scores = np.float32(shape.softcap) * np.tanh(scores / np.float32(shape.softcap))
        if shape.alibi_slopes is not None:
            distance = (np.arange(first, end)[None, :] - np.arange(start, end)[:, None]).astype(np.float32)
            scores += shape.alibi_slopes.reshape(kv_heads, group, 1, 1) * distance
        scores += _mask(start, end, first, shape)
        if chosen is not None and lists is not None:
            scores += choice_mask(lists[start:end], chosen, end)[:, None]
        highest = scores.max(axis=-1, keepdims=True)
        sinks = None if shape.sinks is None else shape.sinks.reshape(kv_heads, group, 1, 1)
        if sinks is not None:
            highest = np.maximum(highest, sinks)
        scores -= highest
        np.exp(scores, out=scores)
        total = scores.sum(axis=-1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks - highest)
        mixed = np.matmul(scores.reshape(kv_heads, -1, end - first), v[:, first:end]).reshape(
            kv_heads, group, end - start, shape.value_size
        )
        mixed /= total
        result[start:end] = mixed.transpose(2, 0, 1, 3)
    return result.reshape(length, -1)


def magnitude(x: FloatArray) -> FloatArray:
    """The root mean square of every row, [rows, 1]."""
    squares = np.einsum("ri,ri->r", x, x)[:, None] / np.float32(x.shape[1])
    result: FloatArray = np.sqrt(squares)
    return result


def gaussian_top_k(x: FloatArray, num_deviations: float) -> FloatArray:
    """What exceeds a row's mean by so many standard deviations of a sample, and 0 elsewhere."""
    least = x.mean(axis=1, keepdims=True) + np.float32(num_deviations) * x.std(axis=1, ddof=1, keepdims=True)
    result: FloatArray = np.maximum(x - least, np.float32(0))
    return result


def routed(logits: FloatArray, routing: Routing) -> tuple[NDArray[np.int64], FloatArray]:
    """Choose experts: ids and weights, both [rows, num_selected]."""
    values = logits
    if routing.gating is Gating.SIGMOID:
        values = sigmoid(logits)
    elif routing.gating is Gating.SOFTMAX:
        values = _softmax(logits)
    merit = values if routing.selection_bias is None else values + routing.selection_bias
    if routing.num_groups > 1:
        groups = merit.reshape(len(merit), routing.num_groups, -1)
        group_merit = np.sort(groups, axis=-1)[:, :, -routing.num_group_values :].sum(axis=-1)
        kept = np.argsort(-group_merit, axis=-1, kind="stable")[:, : routing.num_selected_groups]
        is_kept = np.zeros(group_merit.shape, np.bool_)
        np.put_along_axis(is_kept, kept, True, axis=-1)
        merit = np.where(is_kept[:, :, None], groups, -np.inf).reshape(merit.shape)
    ids = np.argsort(-merit, axis=-1, kind="stable")[:, : routing.num_selected]
    weights = np.take_along_axis(values, ids, axis=-1)
    if routing.gating is Gating.SPARSE_MIXER:
        weights = _shares_within(merit, ids, routing.margin)
    if routing.gating is Gating.SOFTMAX_SELECTED:
        weights = _softmax(weights)
    if routing.normalise:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    if routing.output_scales is not None:
        weights = weights * routing.output_scales[ids]
    return ids, weights * np.float32(routing.scale)


def _shares_within(merit: FloatArray, ids: NDArray[np.int64], margin: float) -> FloatArray:
    """The share of each chosen expert in a softmax over those left that are within a margin of it."""
    shares, left = np.empty(ids.shape, np.float32), merit.copy()
    for slot in range(ids.shape[1]):
        chosen = ids[:, slot : slot + 1]
        best = np.take_along_axis(merit, chosen, axis=-1)
        is_near = best - merit <= margin * np.maximum(np.abs(merit), best)
        shares[:, slot] = 1.0 / np.where(is_near, np.exp(left - best), 0.0).sum(axis=-1)
        np.put_along_axis(left, chosen, -np.inf, axis=-1)
    return shares


def _softmax(x: FloatArray) -> FloatArray:
    shares = np.exp(x - x.max(axis=-1, keepdims=True))
    result: FloatArray = shares / shares.sum(axis=-1, keepdims=True)
    return result


def _mask(start: int, end: int, first: int, shape: AttentionShape) -> FloatArray:
    """0 where a query at start .. end - 1 may look at first .. end - 1, and minus infinity elsewhere."""
    queries, keys = np.arange(start, end)[:, None], np.arange(first, end)[None, :]
    is_seen = keys < queries if shape.excludes_own else keys <= queries
    if shape.window:
        is_seen &= keys > queries - shape.window
    if shape.chunk:
        is_seen &= keys // shape.chunk == queries // shape.chunk
    return np.where(is_seen, np.float32(0), np.float32(-np.inf))


def _erf(x: FloatArray) -> FloatArray:
    t = np.float32(1) / (np.float32(1) + np.float32(_ERF_P) * np.abs(x))
    polynomial = np.zeros_like(t)
    for factor in _ERF_FACTORS:
        polynomial = (polynomial + np.float32(factor)) * t
    result: FloatArray = np.sign(x) * (np.float32(1) - polynomial * np.exp(-x * x))
    return result
