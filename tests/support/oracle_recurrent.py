"""Recurrent ops in NumPy, one row after another in float64, with states and logs known by their address."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels import ops
from localinfer.kernels.ops import Buffer, RecurrentOp
from localinfer.kernels.program import StateStep
from tests.support.oracle_formulas import Float64Array, sigmoid

Inputs = dict[str, Float64Array]
"""What one row has in each of an op's buffers but `out`."""

State = Float64Array

_OUTPUTS = ("out", "bonus")


@dataclass(frozen=True)
class Recurrence:
    """start: the state before the first row. step: from op, state and a row's inputs to the next state and the row."""

    start: Callable[[Any], State]
    step: Callable[[Any, State, Inputs], tuple[State, Float64Array]]


@dataclass
class States:
    """Blocks of states and logs by address, with a part for each op: a log is the inputs of its rows."""

    blocks: dict[int, dict[int, State]] = field(default_factory=dict)
    logs: dict[int, dict[int, list[Inputs]]] = field(default_factory=dict)

    def advance(self, op: RecurrentOp, step: StateStep, rows: Iterable[Inputs]) -> list[Float64Array]:
        """Take one op's state of a sequence over rows; returns what it writes for each."""
        recurrence = RECURRENCES[type(op)]
        state = self.blocks[step.source][op.state] if step.source else recurrence.start(op)
        if step.num_logged:
            for inputs in self.logs[step.log][op.state][: step.num_logged]:
                state, _ = recurrence.step(op, state, inputs)
        targets = dict(step.targets)
        if 0 in targets:
            self.blocks.setdefault(targets[0], {})[op.state] = state
        outs, log = [], []
        for count, inputs in enumerate(rows, 1):
            state, out = recurrence.step(op, state, inputs)
            outs.append(out)
            log.append(inputs)
            if count in targets:
                self.blocks.setdefault(targets[count], {})[op.state] = state
        if step.new_log:
            self.logs.setdefault(step.new_log, {})[op.state] = log
        return outs


def input_buffers(op: RecurrentOp) -> dict[str, Buffer]:
    """The buffers that an op reads, by the name of its field."""
    values = {one.name: getattr(op, one.name) for one in fields(op) if one.name not in _OUTPUTS}
    return {name: value for name, value in values.items() if isinstance(value, Buffer)}


def output_buffers(op: RecurrentOp) -> list[Buffer]:
    """The buffers that an op writes; its rows have them side by side."""
    return [getattr(op, name) for name in _OUTPUTS if hasattr(op, name)]


def _convolve(op: ops.ShortConvolution, state: State, inputs: Inputs) -> tuple[State, Float64Array]:
    window = np.vstack([state, inputs["x"]])
    out = np.einsum("ic,ci->c", window, op.weight.astype(np.float64))
    if op.bias is not None:
        out = out + op.bias
    return window[1:], out * sigmoid(out) if op.has_silu else out


def _delta_rule(op: ops.GatedDeltaRule, state: State, inputs: Inputs) -> tuple[State, Float64Array]:
    heads = np.arange(op.num_heads)
    of_keys = heads % op.num_key_heads if op.is_tiled else heads // (op.num_heads // op.num_key_heads)
    queries, keys = (inputs[name].reshape(op.num_key_heads, -1)[of_keys] for name in ("queries", "keys"))
    values = inputs["values"].reshape(op.num_heads, -1)
    gate = inputs["decay"] + (0.0 if op.bias is None else op.bias)
    factor = np.repeat(op.factor, len(gate) // op.factor.size)
    bounded, unbounded = op.lower_bound * sigmoid(factor * gate), factor * np.logaddexp(0.0, gate)
    logarithm = bounded if op.lower_bound else unbounded
    state = np.exp(logarithm).reshape(op.num_heads, -1, 1) * state
    update = sigmoid(inputs["beta"])[:, None] * (values - np.einsum("hkv,hk->hv", state, keys))
    state = state + keys[:, :, None] * update[:, None, :]
    return state, op.scale * np.einsum("hkv,hk->hv", state, queries).reshape(-1)


def _scan(op: ops.SelectiveScan, state: State, inputs: Inputs) -> tuple[State, Float64Array]:
    heads, size, states, groups = op.num_heads, op.head_size, op.num_states, op.num_groups
    x = inputs["x"][op.x_offset :][: heads * size].reshape(heads, size)
    b, c = (
        inputs[name][offset:][: groups * states].reshape(groups, 1, states).repeat(heads // groups, 0)
        for name, offset in (("b", op.b_offset), ("c", op.c_offset))
    )
    # Per head, or per channel of one head.
    steps = inputs.get("dt", np.ones(op.d.size))
    dt, d = (values.reshape((1, size) if op.is_by_channel else (heads, 1)) for values in (steps, op.d))
    rates = op.a.astype(np.float64).reshape((1, size, states) if op.is_by_channel else (heads, 1, 1))
    state = np.exp(dt[:, :, None] * rates) * state + (dt * x)[:, :, None] * b
    return state, ((state * c).sum(axis=-1) + d * x).reshape(-1)


def _wkv(op: ops.Wkv, state: State, inputs: Inputs) -> tuple[State, Float64Array]:
    def heads(values: NDArray[Any]) -> Float64Array:
        return values.astype(np.float64).reshape(-1, op.head_size)

    r, keys, values = (heads(inputs[name]) for name in ("receptance", "keys", "values"))
    decay = np.exp(-np.exp(-0.5) * sigmoid(heads(inputs["decay"])))
    rate = sigmoid(heads(inputs["rate"]))
    unit = keys * heads(op.key_scale)
    unit = unit / np.maximum(np.linalg.norm(unit, axis=1, keepdims=True), 1e-12)
    keys = keys * (1.0 + (rate - 1.0) * heads(op.rate_scale))
    known = np.einsum("hkv,hk->hv", state, unit)
    state = decay[:, :, None] * state + keys[:, :, None] * values[:, None] - (unit * rate)[:, :, None] * known[:, None]
    bonus = (r * keys * heads(op.bonus_scale)).sum(axis=1, keepdims=True) * values
    return state, np.concatenate([np.einsum("hkv,hk->hv", state, r).reshape(-1), bonus.reshape(-1)])


RECURRENCES: dict[type, Recurrence] = {
    ops.ShortConvolution: Recurrence(lambda op: np.zeros((op.weight.shape[1] - 1, op.x.width)), _convolve),
    ops.GatedDeltaRule: Recurrence(lambda op: np.zeros((op.num_heads, op.key_size, op.value_size)), _delta_rule),
    ops.SelectiveScan: Recurrence(lambda op: np.zeros((op.num_heads, op.head_size, op.num_states)), _scan),
    ops.Wkv: Recurrence(lambda op: np.zeros((op.out.width // op.head_size, op.head_size, op.head_size)), _wkv),
}
