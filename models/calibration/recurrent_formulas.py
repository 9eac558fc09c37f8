"""Formulas of recurrent ops over whole texts, in float32: what a calibration pass computes with NumPy.

Kernels take one row after another. Here rows come in chunks, within which the delta rule is a triangular system of
equations (DeltaNet in parallel, arXiv 2406.06484, and with decays Kimi Linear, arXiv 2510.26692): the same numbers but
for rounding, many times faster in NumPy.
"""

import numpy as np

from localinfer.kernels.ops import Activation
from localinfer.kernels.recurrent_ops import GatedDeltaRule, ShortConvolution
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
