"""Lowering of ops on the elements of rows: looking them up, norms, formulas, copies."""

from collections.abc import Callable
from typing import Any

import numpy as np

from localinfer.kernels import ops
from localinfer.kernels.cpu import parameters
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.graph_builder import check
from localinfer.kernels.layouts import GGUF_LAYOUTS, SIZES
from localinfer.kernels.ops import Buffer, Rows
from localinfer.kernels.program import OpCost

_LOOKED_UP: dict[type, str] = {ops.Embed: "token_ids", ops.EmbedPositions: "positions", ops.EmbedTypes: "token_types"}


def _embed(tape: CpuTape, op: ops.Embed | ops.EmbedPositions | ops.EmbedTypes) -> None:
    out, table = op.out, op.table
    scale = op.scale if isinstance(op, ops.Embed) else 1.0
    adds = isinstance(op, ops.EmbedPositions) or (isinstance(op, ops.EmbedTypes) and op.adds)
    rows = tape.memory.placed_table(table.packed)
    check(rows.num_columns == table.width, f"{table.name} is {table.width} wide, and stored {rows.num_columns} wide")
    check(rows.layout in GGUF_LAYOUTS, f"{table.name} is in {rows.layout.name}, which embeddings are not")
    sizes = SIZES[rows.layout]
    row_bytes = rows.num_columns // sizes.unit * sizes.file_bytes
    check(
        rows.data.size == table.num_rows * row_bytes and rows.num_columns % sizes.unit == 0,
        f"{table.name} holds {rows.data.size} bytes; {table.num_rows} rows need {table.num_rows * row_bytes}",
    )
    tape.memory.keep_table(rows, is_small=not isinstance(op, ops.Embed))
    words = parameters.EMBED.pack(
        **tape.addresses_of(out=out), table=rows.data.ctypes.data, row_bytes=row_bytes,
        columns=rows.num_columns, scale=scale, indices=parameters.BATCH.offset(_LOOKED_UP[type(op)]), adds=adds,
    )  # fmt: skip
    kernel = f"embedding.embed_{rows.layout.name.lower()}"
    cost = OpCost(kernel, Rows.BATCH, (table.name,), rows.data.size, rows.data.size // table.num_rows)
    about = f"{table.name} ({table.num_rows} rows x {table.width} columns, {rows.layout.name})"
    tape.add(kernel, words, writes=out, cost=cost, about=about)


def _embed_media(tape: CpuTape, op: ops.EmbedMedia) -> None:
    x = op.x
    words = parameters.EMBED_MEDIA.pack(
        **tape.addresses_of(x=x), offset=4 * op.part * x.width, columns=x.width, adds=op.adds, is_output=x.is_output
    )
    tape.add("elementwise.embed_media", words, writes=x, about=f"part {op.part}")


def _norm(tape: CpuTape, op: ops.RmsNorm | ops.LayerNorm) -> None:
    size = op.group_size or op.x.width
    groups = op.x.width // size
    per_group = op.weight is not None and groups > 1 and op.weight.size == op.x.width
    bias, kernel = (op.bias, "layer_norm") if isinstance(op, ops.LayerNorm) else (None, "rms_norm")
    words = parameters.NORM.pack(
        **tape.addresses_of(out=op.out, x=op.x), weight=tape.memory.constant(op.weight),
        bias=tape.memory.constant(bias), weight_stride=4 * size if per_group else 0, groups=groups, size=size,
        epsilon=op.epsilon, is_output=op.x.is_output,
    )  # fmt: skip
    tape.add(f"elementwise.{kernel}", words, writes=op.out, about=op.x.name)


def _xielu(tape: CpuTape, op: ops.Xielu) -> None:
    words = parameters.XIELU.pack(
        **tape.addresses_of(out=op.out, x=op.x), columns=op.x.width, is_output=op.x.is_output, positive=op.positive,
        negative=op.negative, beta=op.beta, epsilon=op.epsilon,
    )  # fmt: skip
    tape.add("elementwise.xielu", words, writes=op.out)


def _multiply_sigmoid(tape: CpuTape, op: ops.MultiplySigmoid) -> None:
    if not op.is_by_part:
        tape.elementwise("multiply_sigmoid", op.out, op.x, op.gate)
        return
    _by_part(tape, "multiply_sigmoid_by_part", op.out, op.x, op.gate)


def _by_part(tape: CpuTape, kernel: str, out: Buffer, x: Buffer, gate: Buffer) -> None:
    """Record a product with a value for each of equal parts of x."""
    parts = gate.width
    words = parameters.GATE_PARTS.pack(
        **tape.addresses_of(out=out, x=x, gate=gate), parts=parts, size=x.width // parts, is_output=x.is_output
    )
    tape.add(f"elementwise.{kernel}", words, writes=out)


def _multiply(tape: CpuTape, op: ops.Multiply) -> None:
    if isinstance(op.factor, Buffer) and op.is_by_part:
        _by_part(tape, "multiply_by_part", op.out, op.x, op.factor)
        return
    if isinstance(op.factor, Buffer):
        tape.elementwise("multiply_by_row" if op.is_by_row else "multiply", op.out, op.x, op.factor)
        return
    words = parameters.ELEMENTWISE.pack(
        **tape.addresses_of(out=op.out, a=op.x), b=tape.memory.constant(op.factor), b_stride=0, scalar=0.0,
        columns=op.out.width, is_output=op.out.is_output,
    )  # fmt: skip
    tape.add("elementwise.multiply", words, writes=op.out)


def _magnitude(tape: CpuTape, op: ops.Magnitude) -> None:
    words = parameters.MAGNITUDE.pack(
        **tape.addresses_of(out=op.out, x=op.x), columns=op.x.width, is_output=op.x.is_output
    )
    tape.add("elementwise.magnitude", words, writes=op.out)


def _mix_slots(tape: CpuTape, op: ops.MixSlots) -> None:
    columns = op.x.width // op.num_slots
    num_out = op.out.width // columns
    is_whole = columns % 16 == 0 or max(num_out, op.num_slots) == 1
    check(is_whole, f"{op.x.name} holds slots of {columns}; whole vectors of 16 are needed")
    (weights, weights_stride), (residual, residual_stride) = (
        (0, 0) if buffer is None else tape.address_of(buffer) for buffer in (op.weights, op.residual)
    )
    words = parameters.MIX_SLOTS.pack(
        **tape.addresses_of(out=op.out, x=op.x), weights=weights, weights_stride=weights_stride, residual=residual,
        residual_stride=residual_stride, slots=op.num_slots, columns=columns, num_out=num_out, first=op.first_slot,
        is_output=op.out.is_output,
    )  # fmt: skip
    tape.add("elementwise.mix_slots", words, writes=op.out)


def _scale_by_position(tape: CpuTape, op: ops.ScaleByPosition) -> None:
    words = parameters.SCALE_BY_POSITION.pack(
        **tape.addresses_of(x=op.x), columns=op.x.width, period=op.period, slope=op.slope, first_position=op.offset
    )
    tape.add("elementwise.scale_by_position", words, writes=op.x)


def _copy_heads(tape: CpuTape, op: ops.CopyHeads) -> None:
    (out, out_stride), (x, x_stride) = tape.address_of(op.out), tape.address_of(op.x)
    words = parameters.COPY_HEADS.pack(
        out=out + 4 * op.out_offset, out_stride=out_stride, x=x + 4 * op.x_offset, x_stride=x_stride,
        heads=op.num_heads, width=op.width, out_head_bytes=4 * op.out_head_size, x_head_bytes=4 * op.x_head_size,
        is_output=op.x.is_output,
    )  # fmt: skip
    tape.add("elementwise.copy_heads", words, writes=op.out)


def _bound(tape: CpuTape, op: ops.Bound) -> None:
    highest = np.full(op.x.width, op.highest, np.float32)
    words = parameters.ELEMENTWISE.pack(
        **tape.addresses_of(out=op.out, a=op.x), b=tape.memory.constant(highest), b_stride=0, scalar=op.lowest,
        columns=op.x.width, is_output=op.x.is_output,
    )  # fmt: skip
    tape.add("elementwise.bound", words, writes=op.out)


def _add_vector(tape: CpuTape, op: ops.AddVector) -> None:
    words = parameters.ELEMENTWISE.pack(
        **tape.addresses_of(out=op.x, a=op.x), b=tape.memory.constant(op.vector), b_stride=0, scalar=1.0,
        columns=op.x.width, is_output=op.x.is_output,
    )  # fmt: skip
    tape.add("elementwise.add", words, writes=op.x)


def _mean_rows(tape: CpuTape, op: ops.MeanRows) -> None:
    words = parameters.SELECT_OUTPUT.pack(**tape.addresses_of(out=op.out, x=op.x), columns=op.x.width)
    tape.add("elementwise.mean_rows", words, writes=op.out)


def _gated_activate(tape: CpuTape, op: ops.GatedActivate) -> None:
    kernel = f"gated_{op.kind.value}_limited" if op.limit else f"gated_{op.kind.value}"
    tape.elementwise(kernel, op.out, op.gate, op.up, op.limit)


def _select_output(tape: CpuTape, op: ops.SelectOutput) -> None:
    words = parameters.SELECT_OUTPUT.pack(**tape.addresses_of(out=op.out, x=op.x), columns=op.x.width)
    tape.add("elementwise.select_output", words, writes=op.out)


LOWER: dict[type, Callable[[CpuTape, Any], None]] = {
    ops.Embed: _embed,
    ops.EmbedPositions: _embed,
    ops.EmbedTypes: _embed,
    ops.EmbedMedia: _embed_media,
    ops.RmsNorm: _norm,
    ops.LayerNorm: _norm,
    ops.Activate: lambda tape, op: tape.elementwise(op.kind.value, op.out, op.x, op.x),
    ops.GatedActivate: _gated_activate,
    ops.Add: lambda tape, op: tape.elementwise("add", op.out, op.a, op.b, op.scale),
    ops.Scale: lambda tape, op: tape.elementwise("scale", op.x, op.x, op.x, op.factor),
    ops.SelectOutput: _select_output,
    ops.Xielu: _xielu,
    ops.Multiply: _multiply,
    ops.Magnitude: _magnitude,
    ops.MixSlots: _mix_slots,
    ops.GaussianTopK: lambda tape, op: tape.elementwise("gaussian_top_k", op.out, op.x, op.x, op.num_deviations),
    ops.Softmax: lambda tape, op: tape.elementwise("softmax", op.out, op.x, op.x),
    ops.MultiplySigmoid: _multiply_sigmoid,
    ops.Clamp: lambda tape, op: tape.elementwise(
        "clamp_above" if op.only_above else "clamp", op.x, op.x, op.x, op.limit
    ),
    ops.Bound: _bound,
    ops.ScaleByPosition: _scale_by_position,
    ops.Softcap: lambda tape, op: tape.elementwise("softcap", op.x, op.x, op.x, op.cap),
    ops.CopyHeads: _copy_heads,
    ops.AddVector: _add_vector,
    ops.MeanRows: _mean_rows,
}
