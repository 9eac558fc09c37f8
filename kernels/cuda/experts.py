"""The launches of experts: their choice, their products, and what joins them."""

from collections.abc import Iterator

from localinfer.kernels.cpu.kernel_abi import MAX_EXPERTS
from localinfer.kernels.cpu.memory import check
from localinfer.kernels.cuda.device import Launch, Step
from localinfer.kernels.cuda.gemm import Shape, Slot, expert_gemm, quantized_place
from localinfer.kernels.cuda.memory import SMALL_ROWS, DeviceMemory
from localinfer.kernels.cuda.op_recorder import OpRecorder
from localinfer.kernels.cuda.weights import DeviceWeight
from localinfer.kernels.layouts import is_float
from localinfer.kernels.ops import Buffer, FloatArray, Gating, LinearWeight, Routing

_GATINGS = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SOFTMAX_SELECTED: 2}
_MOST_BLOCKS = 65535
"""Of a grid's second axis."""


class ExpertOps:
    """Writes the ops of experts for a tape."""

    def __init__(self, memory: DeviceMemory, recorder: OpRecorder) -> None:
        self._memory = memory
        self._recorder = recorder

    def route(self, expert_ids: Buffer, expert_weights: Buffer, logits: Buffer, routing: Routing) -> None:
        """See `ops.Tape.route`."""
        count, selected = routing.num_experts, routing.num_selected
        check(0 < selected <= count <= MAX_EXPERTS, f"{selected} of {count} experts cannot be chosen")
        check(logits.width == count and expert_ids.width == expert_weights.width == selected, "router buffers differ")
        check(expert_ids.rows is expert_weights.rows is logits.rows, "router buffers do not hold the same rows")
        check(count % routing.num_groups == 0, f"{count} experts do not split into {routing.num_groups} groups")
        kept = count // routing.num_groups * routing.num_selected_groups
        check(
            routing.num_groups == 1 or selected <= kept, f"{selected} experts do not fit the {kept} of the kept groups"
        )
        self._recorder.read(logits)
        memory = self._memory
        bias = memory.constant(routing.selection_bias, count, "expert selection bias")
        rows = max(memory.max_rows[logits.rows], SMALL_ROWS)
        scratch = memory.shared("routing", 4 * rows * (2 * count + routing.num_groups))
        places = (*memory.place(logits), *memory.place(expert_ids), *memory.place(expert_weights))
        groups = (routing.num_groups, routing.num_selected_groups, int(routing.normalise))
        values = (*places, count, selected, bias, scratch, *groups, routing.scale)

        def build(shape: Shape) -> Iterator[Step]:
            if shape.rows(logits.rows):
                grid = (1, shape.rows(logits.rows), 1)
                yield Launch("experts.route", (_GATINGS[routing.gating],), grid, 32, values)

        self._recorder.add(build, expert_ids, expert_weights)

    def matmul(
        self, out: Buffer, x: Buffer, weight: LinearWeight, ids: Buffer, bias: FloatArray | None, per_slot: bool
    ) -> None:
        """See `ops.Tape.expert_matmul`."""
        packed: DeviceWeight = weight.packed
        selected, columns = ids.width, packed.num_columns
        memory = self._memory
        rows = max(memory.max_rows[x.rows], SMALL_ROWS)
        check(packed.columns is None, f"{weight.name} has its columns in another order; only matmul gathers")
        check(x.width == (selected if per_slot else 1) * columns, f"{x.name} is {x.width} wide for {weight.name}")
        check(out.width == selected * packed.num_rows, f"{out.name} is {out.width} wide for {weight.name}")
        check(out.rows is x.rows is ids.rows, f"{out.name}, {x.name} and {ids.name} do not hold the same rows")
        check(out.index != x.index, f"{out.name} cannot take the product of itself")
        check(rows * selected <= _MOST_BLOCKS, f"{rows} rows of {selected} experts are more than one launch holds")
        self._recorder.read(x, ids)
        bias_place = 0
        if bias is not None:
            check(bias.shape == (packed.num_experts, packed.num_rows), f"bias of {weight.name} is {bias.shape}")
            bias_place = memory.constant(bias, bias.size, f"bias of {weight.name}")
        codes = None if is_float(packed.layout) else quantized_place(memory, f"experts' {x.width}", x.width, rows)
        slot = Slot(packed, *memory.place(out), bias_place)
        source, chosen = memory.place(x), memory.place(ids)

        def build(shape: Shape) -> Iterator[Step]:
            count = shape.rows(x.rows)
            if count:
                head = (columns if per_slot else 0, 0)
                yield from expert_gemm(source, x.width, codes, slot, count, head, packed.num_rows, selected, chosen)

        self._recorder.add(build, out)

    def sum(self, out: Buffer, x: Buffer, expert_weights: Buffer, residual: Buffer | None) -> None:
        """See `ops.Tape.expert_sum`."""
        selected = expert_weights.width
        check(x.width == selected * out.width, f"{x.name} is {x.width} wide for {selected} slots of {out.width}")
        check(out.rows is x.rows is expert_weights.rows, f"{out.name} and {x.name} do not hold the same rows")
        self._recorder.read(x, expert_weights)
        place = (0, 0)
        if residual is not None:
            self._recorder.same_shape(out, residual)
            self._recorder.read(residual)
            place = self._memory.place(residual)
        places = (*self._memory.place(out), *self._memory.place(x), *self._memory.place(expert_weights), *place)
        self._recorder.simple("experts.expert_sum", (), out.rows, out.width, (*places, selected, out.width), out)

    def scale(self, x: Buffer, expert_weights: Buffer) -> None:
        """See `ops.Tape.expert_scale`."""
        selected = expert_weights.width
        check(x.width % selected == 0, f"{x.name} is {x.width} wide for {selected} slots")
        check(x.rows is expert_weights.rows, f"{x.name} and {expert_weights.name} do not hold the same rows")
        self._recorder.read(x, expert_weights)
        places = (*self._memory.place(x), *self._memory.place(expert_weights))
        values = (*places, selected, x.width // selected)
        self._recorder.simple("experts.expert_scale", (), x.rows, x.width, values, x)
