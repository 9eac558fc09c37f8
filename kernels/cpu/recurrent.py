"""Lowering of recurrent ops: parameter blocks of kernels that carry states."""

from collections.abc import Callable
from typing import Any

import numpy as np

from localinfer.kernels import recurrent_ops
from localinfer.kernels.cpu import kernel_abi, parameters
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.graph_builder import check
from localinfer.kernels.ops import Buffer, RecurrentOp
from localinfer.kernels.program import Operation
from localinfer.kernels.recurrent_ops import whole_vectors


def add_recurrent(tape: CpuTape, kernel: str, op: RecurrentOp, words: parameters.Words, writes: Buffer) -> None:
    """Record a kernel that carries the state of an op: it is also run to compute states without rows."""
    tape.recurrent_kernels.append(len(tape.kernels))
    # A step reads a state and writes the next one.
    num_bytes = 8 * op.state_shape.num_values
    tape.add(kernel, words, writes=writes, cost=Operation(kernel, state_bytes=num_bytes))


def state_places(tape: CpuTape, op: RecurrentOp) -> dict[str, int]:
    """The words `state` and `log`: where an op's part begins in a block of states, and in a log."""
    layout = tape.kv_layout
    return {"state": layout.state_offsets[op.state], "log": layout.log_offsets[op.state]}


def _short_convolution(tape: CpuTape, op: recurrent_ops.ShortConvolution) -> None:
    channels, taps = op.weight.shape
    check(taps <= kernel_abi.MAX_TAPS, f"a convolution over {taps} rows; the CPU computes {kernel_abi.MAX_TAPS}")
    width = whole_vectors(channels)
    weight = np.zeros((taps, width), np.float32)
    weight[:, :channels] = op.weight.T
    words = parameters.SHORT_CONVOLUTION.pack(
        **tape.places(out=op.out, x=op.x), weight=tape.memory.constant(weight),
        bias=tape.memory.constant(op.bias) or tape.memory.zeros(channels), channels=channels, taps=taps,
        row_bytes=4 * width, **state_places(tape, op),
    )  # fmt: skip
    add_recurrent(tape, f"convolution.short_convolution{'_silu' if op.has_silu else ''}", op, words, op.out)


LOWER: dict[type, Callable[[CpuTape, Any], None]] = {recurrent_ops.ShortConvolution: _short_convolution}
