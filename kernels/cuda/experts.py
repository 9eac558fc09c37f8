"""Launches of mixture of experts: routing, GEMMs and sums."""

from collections.abc import Iterator

from localinfer.kernels import ops
from localinfer.kernels.cuda.device import Launch, Step
from localinfer.kernels.cuda.gemm import Shape, Slot, expert_gemm, quantized_place
from localinfer.kernels.cuda.memory import SMALL_ROWS
from localinfer.kernels.cuda.tape import CudaTape
from localinfer.kernels.cuda.weights import DeviceWeight
from localinfer.kernels.graph_builder import check, packed_weight
from localinfer.kernels.layouts import is_float
from localinfer.kernels.ops import Gating

GATINGS = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SOFTMAX_SELECTED: 2, Gating.SPARSE_MIXER: 3}
_MAX_BLOCKS = 65535
"""Maximum of a grid's second axis."""


def lower_route(tape: CudaTape, op: ops.Route) -> None:
    """See `ops.Route`."""
    routing, logits = op.routing, op.logits
    count, selected = routing.num_experts, routing.num_selected
    tape.read(logits)
    bias = tape.memory.constant(routing.selection_bias)
    rows = max(tape.max_rows[logits.rows], SMALL_ROWS)
    scratch = tape.memory.shared("routing", 4 * rows * (2 * count + routing.num_groups))
    groups = (routing.num_groups, routing.num_selected_groups, routing.num_group_values, int(routing.normalise))
    places = tape.addresses_of(logits, op.expert_ids, op.expert_weights)
    output_scales = tape.memory.constant(routing.output_scales)
    values = (*places, count, selected, bias, scratch, *groups, output_scales, routing.scale, routing.margin)

    def build(shape: Shape) -> Iterator[Step]:
        if shape.rows(logits.rows):
            grid = (1, shape.rows(logits.rows), 1)
            yield Launch("experts.route", (GATINGS[routing.gating],), grid, 32, values)

    tape.add(build, op.expert_ids, op.expert_weights)


def lower_expert_matmul(tape: CudaTape, op: ops.ExpertMatmul) -> None:
    """See `ops.ExpertMatmul`."""
    x, ids = op.x, op.expert_ids
    packed: DeviceWeight = packed_weight(op.weight)
    selected, columns, memory = ids.width, packed.num_columns, tape.memory
    rows = max(tape.max_rows[x.rows], SMALL_ROWS)
    check(rows * selected <= _MAX_BLOCKS, f"{rows} rows of {selected} experts exceed one launch")
    tape.read(x, ids)
    bias = memory.constant(op.bias)
    codes = None if is_float(packed.layout) else quantized_place(memory, f"experts' {x.width}", x.width, rows)
    slot = Slot(packed, *memory.address_of(op.out), bias)
    source, chosen = memory.address_of(x), memory.address_of(ids)
    head = (columns if op.input_per_slot else 0, 0)

    def build(shape: Shape) -> Iterator[Step]:
        count = shape.rows(x.rows)
        if count:
            yield from expert_gemm(source, x.width, codes, slot, count, head, packed.num_rows, selected, chosen)

    tape.add(build, op.out)


def lower_expert_sum(tape: CudaTape, op: ops.ExpertSum) -> None:
    """See `ops.ExpertSum`."""
    out = op.out
    tape.read(op.x, op.expert_weights)
    residual: tuple[int, ...] = (0, 0)
    if op.residual is not None:
        tape.read(op.residual)
        residual = tape.addresses_of(op.residual)
    values = (*tape.addresses_of(out, op.x, op.expert_weights), *residual, op.expert_weights.width, out.width)
    tape.simple("experts.expert_sum", (), out.rows, out.width, values, out)


def lower_expert_scale(tape: CudaTape, op: ops.ExpertScale) -> None:
    """See `ops.ExpertScale`."""
    x, selected = op.x, op.expert_weights.width
    tape.read(x, op.expert_weights)
    values = (*tape.addresses_of(x, op.expert_weights), selected, x.width // selected)
    tape.simple("experts.expert_scale", (), x.rows, x.width, values, x)


def lower_expert_factors(tape: CudaTape, op: ops.ExpertFactors) -> None:
    """See `ops.ExpertFactors`."""
    x, selected = op.x, op.expert_ids.width
    tape.read(x, op.expert_ids)
    factors = tape.memory.constant(op.factors)
    values = (*tape.addresses_of(x, op.expert_ids), factors, selected, x.width // selected)
    tape.simple("experts.expert_factors", (), x.rows, x.width, values, x)
