"""Lowering of recurrent layers: kernels that carry states from row to row."""

from collections.abc import Callable
from typing import Any

import numpy as np

from localinfer.kernels import ops
from localinfer.kernels.cpu import kernel_abi, parameters
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.graph_builder import check
from localinfer.kernels.ops import Buffer, RecurrentOp, Rows, whole_vectors
from localinfer.kernels.program import OpCost
from localinfer.types import FloatArray


def add_recurrent(tape: CpuTape, kernel: str, op: RecurrentOp, words: parameters.Words, writes: Buffer) -> None:
    """Record a kernel that carries the state of an op: it is also run to compute states without rows."""
    tape.recurrent_kernels.append(len(tape.kernels))
    # A step reads a state and writes the next one.
    num_bytes = 8 * op.state_shape.num_values
    cost = OpCost(kernel, state_bytes=num_bytes)
    tape.add(kernel, words, writes=writes, cost=cost, about=f"state {op.state}")


def state_places(tape: CpuTape, op: RecurrentOp) -> dict[str, int]:
    """The words `state` and `log`: where an op's part begins in a block of states, and in a log."""
    layout = tape.kv_layout
    return {"state": layout.state_offsets[op.state], "log": layout.log_offsets[op.state]}


def _short_convolution(tape: CpuTape, op: ops.ShortConvolution) -> None:
    words = _convolution_words(tape, op, op.bias, **state_places(tape, op))
    add_recurrent(tape, f"recurrent.short_convolution{'_silu' if op.has_silu else ''}", op, words, op.out)


def _centred_convolution(tape: CpuTape, op: ops.CentredConvolution) -> None:
    words = _convolution_words(tape, op, None, state=0, log=0)
    tape.add("recurrent.centred_convolution", words, writes=op.out)


def _convolution_words(
    tape: CpuTape, op: ops.ShortConvolution | ops.CentredConvolution, bias: FloatArray | None, *, state: int, log: int
) -> parameters.Words:
    channels, taps = op.weight.shape
    check(taps <= kernel_abi.MAX_TAPS, f"a convolution over {taps} rows; the CPU computes {kernel_abi.MAX_TAPS}")
    width = whole_vectors(channels)
    weight = np.zeros((taps, width), np.float32)
    weight[:, :channels] = op.weight.T
    return parameters.SHORT_CONVOLUTION.pack(
        **tape.addresses_of(out=op.out, x=op.x), weight=tape.memory.constant(weight),
        bias=tape.memory.constant(bias) or tape.memory.zeros(channels), channels=channels, taps=taps,
        row_bytes=4 * width, state=state, log=log,
    )  # fmt: skip


def _delta_rule(tape: CpuTape, op: ops.GatedDeltaRule) -> None:
    key_size, value_size, limit = op.key_size, op.value_size, kernel_abi.MAX_KEY_SIZE
    is_right = key_size % 16 == 0 and value_size % 16 == 0 and key_size <= limit
    check(is_right, f"heads of {key_size} and {value_size} columns; the CPU computes multiples of 16 up to {limit}")
    memory, rows = tape.memory, op.out.rows
    decays = _shared_buffer(tape, f"decays {op.decay.width}", op.decay.width, rows)
    betas = _shared_buffer(tape, f"betas {op.beta.width}", op.beta.width, rows)
    factor = np.repeat(op.factor, op.decay.width // op.factor.size)
    words = parameters.DELTA_RULE_GATES.pack(
        **tape.addresses_of(decays=decays, betas=betas, x=op.decay, y=op.beta), factor=memory.constant(factor),
        bias=memory.constant(op.bias) or memory.zeros(op.decay.width), lower_bound=op.lower_bound,
        columns=op.decay.width, heads=op.num_heads,
    )  # fmt: skip
    tape.add(f"delta_rule.{'bounded_gates' if op.lower_bound else 'gates'}", words)
    keys, values = 4 * whole_vectors(op.keys.width), 4 * whole_vectors(op.values.width)
    words = parameters.DELTA_RULE.pack(
        **tape.addresses_of(out=op.out, queries=op.queries, keys=op.keys, values=op.values, decays=decays, betas=betas),
        heads=op.num_heads, key_heads=op.num_key_heads, key_size=key_size, value_size=value_size,
        is_tiled=op.is_tiled, scale=op.scale, log_values=keys, log_decays=keys + values,
        row_bytes=4 * op.state_shape.log_values, **state_places(tape, op),
    )  # fmt: skip
    add_recurrent(tape, f"delta_rule.{'by_channel' if op.is_by_channel else 'by_head'}", op, words, op.out)


def _wkv(tape: CpuTape, op: ops.Wkv) -> None:
    size, limit = op.head_size, kernel_abi.MAX_KEY_SIZE
    check(size % 16 == 0 and size <= limit, f"heads of {size} columns; the CPU computes multiples of 16 up to {limit}")
    constant = tape.memory.constant
    words = parameters.WKV.pack(
        **tape.addresses_of(
            out=op.out, bonus=op.bonus, receptance=op.receptance, decay=op.decay, keys=op.keys, values=op.values,
            rate=op.rate,
        ),
        key_scale=constant(op.key_scale), rate_scale=constant(op.rate_scale), bonus_scale=constant(op.bonus_scale),
        heads=op.out.width // size, head_size=size, width_bytes=4 * whole_vectors(op.out.width),
        **state_places(tape, op),
    )  # fmt: skip
    add_recurrent(tape, "delta_rule.wkv", op, words, op.out)
    tape.forget_copies(op.bonus)


def _shared_buffer(tape: CpuTape, name: str, width: int, rows: Rows) -> Buffer:
    """A buffer that all layers use in turn."""
    if name not in tape.inner_buffers:
        tape.inner_buffers[name] = tape.memory.buffer(name, width, rows)
    return tape.inner_buffers[name]


def _selective_scan(tape: CpuTape, op: ops.SelectiveScan) -> None:
    states, limit = op.num_states, kernel_abi.SCRATCH_BYTES // 64
    check(states <= limit, f"a channel with {states} states; the CPU computes {limit}")
    rates = op.a
    if op.is_by_channel:
        # As the kernel reads them: sixteen channels side by side, all their states below.
        rates = np.zeros((whole_vectors(op.head_size), states), np.float32)
        rates[: op.head_size] = op.a
        rates = np.ascontiguousarray(rates.reshape(-1, 16, states).transpose(0, 2, 1))
    places = tape.addresses_of(out=op.out, x=op.x, b=op.b, c=op.c)
    if op.dt is None:
        # One row of steps, which every row reads.
        places |= {"dt": tape.memory.constant(np.ones(op.d.size, np.float32)), "dt_stride": 0}
    else:
        places |= tape.addresses_of(dt=op.dt)
    for name, offset in (("x", op.x_offset), ("b", op.b_offset), ("c", op.c_offset)):
        places[name] += 4 * offset
    words = parameters.SELECTIVE_SCAN.pack(
        **places, rates=tape.memory.constant(rates), skip=tape.memory.constant(op.d), heads=op.num_heads,
        head_size=op.head_size, groups=op.num_groups, states=states, **state_places(tape, op),
    )  # fmt: skip
    add_recurrent(tape, f"selective_scan.scan_{'channels' if op.is_by_channel else 'heads'}", op, words, op.out)


def _previous_row(tape: CpuTape, op: ops.PreviousRow) -> None:
    x, x_stride = (0, 0) if op.x is None else tape.address_of(op.x)
    words = parameters.PREVIOUS_ROW.pack(**tape.addresses_of(out=op.out), x=x, x_stride=x_stride, columns=op.out.width)
    tape.add("recurrent.previous_row", words, writes=op.out)


LOWER: dict[type, Callable[[CpuTape, Any], None]] = {
    ops.ShortConvolution: _short_convolution,
    ops.CentredConvolution: _centred_convolution,
    ops.GatedDeltaRule: _delta_rule,
    ops.SelectiveScan: _selective_scan,
    ops.Wkv: _wkv,
    ops.PreviousRow: _previous_row,
}
