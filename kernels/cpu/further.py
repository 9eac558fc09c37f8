"""Lowering of further ops: parameter blocks of kernels that single families of models need."""

from collections.abc import Callable
from typing import Any

from localinfer.kernels import further_ops
from localinfer.kernels.cpu import parameters
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.graph_builder import check
from localinfer.kernels.ops import Buffer, FurtherOp


def _xielu(tape: CpuTape, op: further_ops.Xielu) -> None:
    words = parameters.XIELU.pack(
        **tape.places(out=op.out, x=op.x), columns=op.x.width, is_output=op.x.is_output, positive=op.positive,
        negative=op.negative, beta=op.beta, epsilon=op.epsilon,
    )  # fmt: skip
    tape.add("elementwise.xielu", words, writes=op.out)


def _multiply_sigmoid(tape: CpuTape, op: further_ops.MultiplySigmoid) -> None:
    if not op.is_by_part:
        tape.elementwise("multiply_sigmoid", op.out, op.x, op.gate)
        return
    _by_part(tape, "multiply_sigmoid_by_part", op.out, op.x, op.gate)


def _by_part(tape: CpuTape, kernel: str, out: Buffer, x: Buffer, gate: Buffer) -> None:
    """Record a product with a value for each of equal parts of x."""
    parts = gate.width
    words = parameters.GATE_PARTS.pack(
        **tape.places(out=out, x=x, gate=gate), parts=parts, size=x.width // parts, is_output=x.is_output
    )
    tape.add(f"elementwise.{kernel}", words, writes=out)


def _multiply(tape: CpuTape, op: further_ops.Multiply) -> None:
    if isinstance(op.factor, Buffer) and op.is_by_part:
        _by_part(tape, "multiply_by_part", op.out, op.x, op.factor)
        return
    if isinstance(op.factor, Buffer):
        tape.elementwise("multiply_by_row" if op.is_by_row else "multiply", op.out, op.x, op.factor)
        return
    words = parameters.ELEMENTWISE.pack(
        **tape.places(out=op.out, a=op.x), b=tape.memory.constant(op.factor), b_stride=0, scalar=0.0,
        columns=op.out.width, is_output=op.out.is_output,
    )  # fmt: skip
    tape.add("elementwise.multiply", words, writes=op.out)


def _magnitude(tape: CpuTape, op: further_ops.Magnitude) -> None:
    words = parameters.MAGNITUDE.pack(**tape.places(out=op.out, x=op.x), columns=op.x.width, is_output=op.x.is_output)
    tape.add("elementwise.magnitude", words, writes=op.out)


def _mix_slots(tape: CpuTape, op: further_ops.MixSlots) -> None:
    columns = op.x.width // op.num_slots
    num_out = op.out.width // columns
    is_whole = columns % 16 == 0 or max(num_out, op.num_slots) == 1
    check(is_whole, f"{op.x.name} holds slots of {columns}; whole vectors of 16 are needed")
    (weights, weights_stride), (residual, residual_stride) = (
        (0, 0) if buffer is None else tape.place(buffer) for buffer in (op.weights, op.residual)
    )
    words = parameters.MIX_SLOTS.pack(
        **tape.places(out=op.out, x=op.x), weights=weights, weights_stride=weights_stride, residual=residual,
        residual_stride=residual_stride, slots=op.num_slots, columns=columns, num_out=num_out, first=op.first_slot,
        is_output=op.out.is_output,
    )  # fmt: skip
    tape.add("elementwise.mix_slots", words, writes=op.out)


def _scale_by_position(tape: CpuTape, op: further_ops.ScaleByPosition) -> None:
    words = parameters.SCALE_BY_POSITION.pack(
        **tape.places(x=op.x), columns=op.x.width, period=op.period, slope=op.slope, first_position=op.offset
    )
    tape.add("elementwise.scale_by_position", words, writes=op.x)


def _copy_heads(tape: CpuTape, op: further_ops.CopyHeads) -> None:
    (out, out_stride), (x, x_stride) = tape.place(op.out), tape.place(op.x)
    words = parameters.COPY_HEADS.pack(
        out=out + 4 * op.out_offset, out_stride=out_stride, x=x + 4 * op.x_offset, x_stride=x_stride,
        heads=op.num_heads, width=op.width, out_head_bytes=4 * op.out_head_size, x_head_bytes=4 * op.x_head_size,
        is_output=op.x.is_output,
    )  # fmt: skip
    tape.add("elementwise.copy_heads", words, writes=op.out)


def _expert_scale(tape: CpuTape, op: further_ops.ExpertScale) -> None:
    x, selected = op.x, op.expert_weights.width
    columns = x.width // selected
    check(columns % 16 == 0, f"{x.name} holds slots of {columns}; whole vectors of 16 are needed")
    words = parameters.EXPERT_SCALE.pack(
        **tape.places(x=x, weights=op.expert_weights), selected=selected, columns=columns, is_output=x.is_output
    )
    tape.add("experts.expert_scale", words, writes=x)


def _previous_row(tape: CpuTape, op: further_ops.PreviousRow) -> None:
    x, x_stride = (0, 0) if op.x is None else tape.place(op.x)
    words = parameters.PREVIOUS_ROW.pack(**tape.places(out=op.out), x=x, x_stride=x_stride, columns=op.out.width)
    tape.add("previous_row.previous_row", words, writes=op.out)


def _expert_factors(tape: CpuTape, op: further_ops.ExpertFactors) -> None:
    x, ids, selected = op.x, op.expert_ids, op.expert_ids.width
    columns = x.width // selected
    check(columns % 16 == 0, f"{x.name} holds slots of {columns}; whole vectors of 16 are needed")
    table = tape.expert_groups.get(ids.index)
    check(table is not None, f"{ids.name} was not routed")
    num_experts = 0 if table is None else table.size - 2 - selected * tape.max_rows[ids.rows]
    check(num_experts == op.factors.size, f"{x.name} has {op.factors.size} factors for {num_experts} experts")
    words = parameters.EXPERT_FACTORS.pack(
        **tape.places(x=x, ids=ids), factors=tape.memory.constant(op.factors), selected=selected, columns=columns,
        is_output=x.is_output,
    )  # fmt: skip
    tape.add("experts.expert_factors", words, writes=x)


def _add_vector(tape: CpuTape, op: further_ops.AddVector) -> None:
    words = parameters.ELEMENTWISE.pack(
        **tape.places(out=op.x, a=op.x), b=tape.memory.constant(op.vector), b_stride=0, scalar=1.0, columns=op.x.width,
        is_output=op.x.is_output,
    )  # fmt: skip
    tape.add("elementwise.add", words, writes=op.x)


def _mean_rows(tape: CpuTape, op: further_ops.MeanRows) -> None:
    words = parameters.SELECT_OUTPUT.pack(**tape.places(out=op.out, x=op.x), columns=op.x.width)
    tape.add("elementwise.mean_rows", words, writes=op.out)


LOWER: dict[type[FurtherOp], Callable[[CpuTape, Any], None]] = {
    further_ops.PreviousRow: _previous_row,
    further_ops.Xielu: _xielu,
    further_ops.Multiply: _multiply,
    further_ops.Magnitude: _magnitude,
    further_ops.MixSlots: _mix_slots,
    further_ops.GaussianTopK: lambda tape, op: tape.elementwise(
        "gaussian_top_k", op.out, op.x, op.x, op.num_deviations
    ),
    further_ops.MultiplySigmoid: _multiply_sigmoid,
    further_ops.Clamp: lambda tape, op: tape.elementwise(
        "clamp_above" if op.only_above else "clamp", op.x, op.x, op.x, op.limit
    ),
    further_ops.ScaleByPosition: _scale_by_position,
    further_ops.Softcap: lambda tape, op: tape.elementwise("softcap", op.x, op.x, op.x, op.cap),
    further_ops.CopyHeads: _copy_heads,
    further_ops.ExpertScale: _expert_scale,
    further_ops.ExpertFactors: _expert_factors,
    further_ops.AddVector: _add_vector,
    further_ops.MeanRows: _mean_rows,
}
