"""Formulas of recurrent ops over whole texts, in float32: what a calibration pass computes with NumPy.

Kernels take one row after another. Here rows come in chunks, within which the delta rule is a triangular system of
equations (DeltaNet in parallel, arXiv 2406.06484, and with decays Kimi Linear, arXiv 2510.26692), and Mamba 2 a product
of matrices (arXiv 2405.21060): the same numbers but for rounding, many times faster in NumPy.
"""

import math

import numpy as np

from localinfer.kernels.ops import Activation, GatedDeltaRule, SelectiveScan, ShortConvolution, Wkv
from localinfer.models.calibration.formulas import activate, sigmoid
from localinfer.types import FloatArray

_CHUNK = 16
"""Rows. With a decay per channel a chunk's products of two rows have as many terms as rows, rows and channels."""


def convolved(x: FloatArray, op: ShortConvolution) -> FloatArray:
    """A causal convolution over the rows of one sequence."""
    taps = op.weight.shape[1]
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1]), np.float32), x])
    out = np.zeros_like(x) if op.bias is None else np.broadcast_to(op.bias, x.shape).copy()
    for tap in range(taps):
        out += op.weight[:, tap] * padded[tap : tap + len(x)]
    return activate(out, Activation.SILU) if op.has_silu else out


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
