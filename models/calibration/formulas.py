"""Formulas of the op set over many rows at once, in float32: what a calibration pass computes with NumPy.

Kernels compute the same one batch at a time (`kernels/ops/` says what); these are for texts of thousands of tokens.

Formulas of recurrent ops over whole texts, in float32: what a calibration pass computes with NumPy.

Kernels take one row after another. Here rows come in chunks, within which the delta rule is a triangular system of
equations (DeltaNet in parallel, arXiv 2406.06484, and with decays Kimi Linear, arXiv 2510.26692), and Mamba 2 a product
of matrices (arXiv 2405.21060): the same numbers but for rounding, many times faster in NumPy.
"""

import math

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.ops import (
    Activation,
    AttentionShape,
    CentredConvolution,
    ChooseBlocks,
    GatedDeltaRule,
    Gating,
    Pairing,
    RopeTable,
    Routing,
    SelectiveScan,
    ShortConvolution,
    SparseSelection,
    Wkv,
)
from localinfer.types import FloatArray


def chosen_blocks(op: ChooseBlocks, queries: FloatArray, keys: FloatArray, *weights: FloatArray) -> FloatArray:
    """The lists of every row of a sequence from position 0, float32[positions, lists * count].

    Shapes: queries float32[positions, heads * key_size], keys float32[positions, key_size], weights [positions, heads].
    """
    length = len(queries)
    scores = np.float32(op.scale) * (queries.reshape(length, op.num_heads, -1) @ keys.T)
    if weights:
        np.maximum(scores, 0, out=scores)
        scores = np.einsum("rh,rhk->rk", weights[0], scores)[:, None]
    count, size = op.chosen.count, op.chosen.block_size
    scores = np.where(np.arange(length) <= np.arange(length)[:, None, None], scores, np.float32(-np.inf))
    padded = np.pad(scores, ((0, 0), (0, 0), (0, -length % size)), constant_values=-np.inf)
    best: FloatArray = padded.reshape(length, scores.shape[1], -1, size).max(axis=-1)
    own, blocks = np.arange(length)[:, None, None] // size, np.arange(best.shape[2])
    is_local = (blocks <= own) & (blocks > own - min(op.num_local, count))
    best = np.where(is_local, np.float32(np.inf), best)
    order = np.argsort(-best, axis=-1, kind="stable")[:, :, :count]
    is_there = order <= own
    rising = np.sort(np.where(is_there, order, length), axis=-1)
    lists = np.full((length, scores.shape[1], count), -1, np.float32)
    lists[:, :, : rising.shape[2]] = np.where(rising < length, rising, -1)
    return lists.reshape(length, -1)


def choice_mask(lists: FloatArray, chosen: SparseSelection, num_positions: int) -> FloatArray:
    """0 where a row's lists hold a position and minus infinity elsewhere, float32[lists, rows, positions]."""
    rows = lists.reshape(len(lists), chosen.num_lists, -1).astype(np.int64)
    num_blocks = -(-num_positions // chosen.block_size)
    # One more for what is not there.
    is_chosen: NDArray[np.bool_] = np.zeros((*rows.shape[:2], max(num_blocks, int(rows.max()) + 1) + 1), np.bool_)
    np.put_along_axis(is_chosen, rows, True, axis=-1)
    seen = np.repeat(is_chosen[:, :, :num_blocks], chosen.block_size, axis=-1)[:, :, :num_positions]
    return np.where(seen, np.float32(0), np.float32(-np.inf)).transpose(1, 0, 2)


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
    """Keep what exceeds a row's mean by so many standard deviations of a sample, and 0 elsewhere."""
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


_CHUNK = 16
"""Rows. With a decay per channel a chunk's products of two rows have as many terms as rows, rows and channels."""


def convolved(x: FloatArray, op: ShortConvolution | CentredConvolution) -> FloatArray:
    """A convolution over the rows of one sequence, causal or around each."""
    taps = op.weight.shape[1]
    before = taps - 1 if isinstance(op, ShortConvolution) else taps // 2
    padded = np.pad(x, ((before, taps - 1 - before), (0, 0)))
    bias = op.bias if isinstance(op, ShortConvolution) else None
    out = np.zeros_like(x) if bias is None else np.broadcast_to(bias, x.shape).copy()
    for tap in range(taps):
        out += op.weight[:, tap] * padded[tap : tap + len(x)]
    return activate(out, Activation.SILU) if isinstance(op, ShortConvolution) and op.has_silu else out


def delta_rule(
    queries: FloatArray, keys: FloatArray, values: FloatArray, decay: FloatArray, beta: FloatArray, op: GatedDeltaRule
) -> FloatArray:
    """The gated delta rule over the rows of one sequence, from a state of zeros."""
    num_rows, heads = len(keys), np.arange(op.num_heads)
    of_keys = heads % op.num_key_heads if op.is_tiled else heads // (op.num_heads // op.num_key_heads)

    def by_head(rows: FloatArray, count: int) -> FloatArray:
        return rows.reshape(num_rows, count, -1).transpose(1, 0, 2)

    q, k = (by_head(rows, op.num_key_heads)[of_keys] for rows in (queries, keys))
    q = q * np.float32(op.scale)
    v, logarithms = by_head(values, op.num_heads), by_head(_log_decays(decay, op), op.num_heads)
    b = by_head(sigmoid(beta), op.num_heads)
    state = np.zeros((op.num_heads, op.key_size, op.value_size), np.float32)
    out = np.empty_like(v)
    for first in range(0, num_rows, _CHUNK):
        rows = slice(first, first + _CHUNK)
        out[:, rows], state = _chunk(q[:, rows], k[:, rows], v[:, rows], logarithms[:, rows], b[:, rows], state)
    return np.ascontiguousarray(out.transpose(1, 0, 2)).reshape(num_rows, -1)


def _log_decays(x: FloatArray, op: GatedDeltaRule) -> FloatArray:
    gate = x if op.bias is None else x + op.bias
    factor = np.repeat(op.factor, op.decay.width // op.factor.size)
    if op.lower_bound:
        return np.float32(op.lower_bound) * sigmoid(factor * gate)
    return factor * activate(gate, Activation.SOFTPLUS)


def _chunk(
    q: FloatArray, k: FloatArray, v: FloatArray, logarithms: FloatArray, b: FloatArray, state: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Results and the next state of some rows: all float32[heads, rows, size], the state [heads, keys, values]."""
    count = k.shape[1]
    summed = np.cumsum(logarithms, axis=1)
    # Differences, as e^-sum alone would overflow; those of later rows are not used.
    between = np.exp(np.minimum(summed[:, :, None] - summed[:, None, :], np.float32(0)))
    decayed_keys = between * k[:, None]
    along_keys = np.tril((decayed_keys @ k[..., None])[..., 0], -1)
    along_queries = np.tril((decayed_keys @ q[..., None])[..., 0])
    since_start = np.exp(summed)
    known = (k * since_start) @ state
    updates = np.linalg.solve(np.eye(count, dtype=np.float32) + b * along_keys, b * (v - known))
    out = (q * since_start) @ state + along_queries @ updates
    until_end = np.exp(summed[:, -1:] - summed)
    decayed = since_start[:, -1, :, None] * state
    return out, decayed + (k * until_end).transpose(0, 2, 1) @ updates


def scanned(x: FloatArray, dt: FloatArray, b: FloatArray, c: FloatArray, op: SelectiveScan) -> FloatArray:
    """The selective scan over the rows of one sequence, from a state of zeros."""
    num_rows, heads, groups, states = len(x), op.num_heads, op.num_groups, op.num_states
    channels = x[:, op.x_offset :][:, : heads * op.head_size]
    inputs, outputs = (
        rows[:, offset:][:, : groups * states].reshape(num_rows, groups, states).transpose(1, 0, 2)
        for rows, offset in ((b, op.b_offset), (c, op.c_offset))
    )
    if op.is_by_channel:
        return _scanned_by_channel(channels, dt, inputs[0], outputs[0], op)
    values = channels.reshape(num_rows, heads, -1).transpose(1, 0, 2)
    steps, of_heads = dt.T[:, :, None], np.arange(heads) // (heads // groups)
    state = np.zeros((heads, states, op.head_size), np.float32)
    out = np.empty_like(values)
    for first in range(0, num_rows, _CHUNK):
        rows = slice(first, first + _CHUNK)
        scaled, b_rows, c_rows = steps[:, rows] * values[:, rows], inputs[of_heads, rows], outputs[of_heads, rows]
        summed = np.cumsum(steps[:, rows] * op.a[:, None, None], axis=1)
        between = np.exp(np.minimum(summed - summed.transpose(0, 2, 1), np.float32(0)))
        along = np.tril(between * (c_rows @ b_rows.transpose(0, 2, 1)))
        out[:, rows] = along @ scaled + np.exp(summed) * (c_rows @ state)
        until_end = np.exp(summed[:, -1:] - summed)
        state = np.exp(summed[:, -1:]) * state + (b_rows * until_end).transpose(0, 2, 1) @ scaled
    out += op.d[:, None, None] * values
    return np.ascontiguousarray(out.transpose(1, 0, 2)).reshape(num_rows, -1)


def _scanned_by_channel(x: FloatArray, dt: FloatArray, b: FloatArray, c: FloatArray, op: SelectiveScan) -> FloatArray:
    """Mamba 1, whose decay differs for every channel and state: one row after another."""
    state = np.zeros((op.head_size, op.num_states), np.float32)
    out = np.empty_like(x)
    for row, (values, steps) in enumerate(zip(x, dt, strict=True)):
        state = np.exp(steps[:, None] * op.a) * state + (steps * values)[:, None] * b[row]
        out[row] = state @ c[row] + op.d * values
    return out


def wkv(
    receptance: FloatArray, decay: FloatArray, keys: FloatArray, values: FloatArray, rate: FloatArray, op: Wkv
) -> FloatArray:
    """RWKV-7's recurrence over the rows of one sequence, from a state of zeros: results, and beside them bonuses."""
    shape = (len(keys), -1, op.head_size)
    r, v, k, scaled = (rows.reshape(shape) for rows in (receptance, values, keys, keys * op.key_scale))
    rates = sigmoid(rate).reshape(shape)
    decays = np.exp(np.float32(-math.exp(-0.5)) * sigmoid(decay)).reshape(shape)
    unit = scaled / np.maximum(np.linalg.norm(scaled, axis=2, keepdims=True), np.float32(1e-12))
    k = k * (np.float32(1) + (rates - np.float32(1)) * op.rate_scale.reshape(shape[1:]))
    replaced, results = unit * rates, np.empty_like(v)
    state = np.zeros((v.shape[1], op.head_size, op.head_size), np.float32)
    for row in range(len(keys)):
        known = unit[row][:, None] @ state
        state = decays[row][..., None] * state + k[row][..., None] * v[row][:, None] - replaced[row][..., None] * known
        results[row] = (r[row][:, None] @ state)[:, 0]
    bonus = (r * k * op.bonus_scale.reshape(shape[1:])).sum(axis=2, keepdims=True) * v
    return np.concatenate([results.reshape(len(keys), -1), bonus.reshape(len(keys), -1)], axis=1)
