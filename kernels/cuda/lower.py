"""The CUDA tape: ops become functions that give the kernels to launch for a batch of some size.

`CudaTape` implements `ops.Tape` as `CpuTape` does: every shape is proven when an op is written, and nothing behind a
launch checks one again. Neighbours that a GPU computes better together are joined as they are written: a norm or the
merging of attention also quantizes what it writes if a product reads it, gate and up and their activation are one
kernel, and RoPE happens where queries and keys are read next.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import BackendUnavailableError
from localinfer.kernels.cpu.memory import check
from localinfer.kernels.cuda.attention import (
    KV_BYTES,
    Rope,
    angle_steps,
    attention_steps,
    store_steps,
)
from localinfer.kernels.cuda.device import CudaDevice, Launch, Step
from localinfer.kernels.cuda.experts import ExpertOps
from localinfer.kernels.cuda.gemm import (
    THREADS,
    Quantized,
    Shape,
    Slot,
    expert_gemm,
    large_gemm,
    quantize_launch,
    quantized_place,
    small_gemm,
)
from localinfer.kernels.cuda.memory import SMALL_ROWS, DeviceMemory
from localinfer.kernels.cuda.op_recorder import OpRecorder
from localinfer.kernels.cuda.program import CudaProgram, TapeRecord
from localinfer.kernels.cuda.weights import DeviceWeight
from localinfer.kernels.jit.compile_ahead import ProgressCallback
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import is_float
from localinfer.kernels.ops import (
    Activation,
    AttentionShape,
    Buffer,
    EmbeddingTable,
    FloatArray,
    LinearWeight,
    Pairing,
    Projection,
    RopeTable,
    Routing,
    Rows,
)

_RMS, _LAYER = 0, 1
_ACTIVATION, _GATE, _ADD, _TIMES_SIGMOID, _TIMES_ROW_SIGMOID, _SCALE, _SOFTCAP = range(7)
_NUMBERS = {kind: number for number, kind in enumerate(Activation)}


class CudaTape:
    """Records ops for a device. `max_batch_rows` tokens per run, `max_output_rows` of them with logits.

    Raises: BackendUnavailableError for a type of cache that it does not know.
    """

    def __init__(
        self,
        device: CudaDevice,
        kv_layout: KVLayout,
        *,
        max_batch_rows: int = 1024,
        max_output_rows: int = 64,
        progress: ProgressCallback | None = None,
    ) -> None:
        for kind in (kv_layout.key_type, kv_layout.value_type):
            if kind not in KV_BYTES:
                raise BackendUnavailableError(
                    f"device 'cuda' keeps keys and values in {' or '.join(KV_BYTES)}, not in {kind}; choose another "
                    "kv_type, or take device 'cpu'"
                )
        self._device = device
        self._progress = progress
        self._kv_layout = kv_layout
        self._max_rows = {Rows.BATCH: max_batch_rows, Rows.OUTPUT: min(max_output_rows, max_batch_rows)}
        self._memory = DeviceMemory(device, self._max_rows)
        self._recorder = OpRecorder(self._memory)
        self._experts = ExpertOps(self._memory, self._recorder)
        self._angles: dict[tuple[bytes, float], int] = {}
        self._token_limit: int | None = None
        self._position_limit: int | None = None
        self._received: tuple[int, int, int] | None = None

    def buffer(self, name: str, width: int, rows: Rows = Rows.BATCH) -> Buffer:
        return self._memory.buffer(name, width, rows)

    def embed(self, out: Buffer, table: EmbeddingTable, scale: float = 1.0) -> None:
        self._embed(out, table, scale, by_position=False)
        self._token_limit = min(table.num_rows, self._token_limit or table.num_rows)

    def receive(self, out: Buffer) -> None:
        """out[r] = what `CudaProgram.hand_over` was given for row r: what another device computed before this tape."""
        check(out.rows is Rows.BATCH, f"{out.name} holds output rows; batch rows are handed over")
        self._recorder.written(out)
        self._received = (*self._memory.place(out), out.width)

    def embed_positions(self, out: Buffer, table: EmbeddingTable) -> None:
        self._recorder.read(out)
        self._embed(out, table, 1.0, by_position=True)
        self._position_limit = min(table.num_rows, self._position_limit or table.num_rows)

    def _embed(self, out: Buffer, table: EmbeddingTable, scale: float, *, by_position: bool) -> None:
        weight: DeviceWeight = table.packed
        check(out.width == weight.num_columns, f"{out.name} is {out.width} wide, {table.name} {weight.num_columns}")
        check(out.rows is Rows.BATCH, f"{out.name} holds output rows; embeddings are of batch rows")
        place = self._memory.place(out)

        def build(shape: Shape) -> Iterator[Step]:
            indices = shape.positions if by_position else shape.token_ids
            words = (indices, *place, weight.num_columns, weight.num_rows, int(by_position), scale)
            grid = (-(-weight.num_columns // THREADS), shape.batch_rows, 1)
            yield Launch("rows.embed", (weight.layout,), grid, THREADS, (*weight.arrays, *weight.row_bytes, *words))

        self._recorder.add(build, out)

    def rms_norm(self, out: Buffer, x: Buffer, weight: FloatArray | None, epsilon: float, group_size: int = 0) -> None:
        self._norm(_RMS, out, x, weight, None, epsilon, group_size)

    def layer_norm(
        self,
        out: Buffer,
        x: Buffer,
        weight: FloatArray | None,
        bias: FloatArray | None,
        epsilon: float,
        group_size: int = 0,
    ) -> None:
        self._norm(_LAYER, out, x, weight, bias, epsilon, group_size)

    def _norm(
        self,
        kind: int,
        out: Buffer,
        x: Buffer,
        weight: FloatArray | None,
        bias: FloatArray | None,
        epsilon: float,
        group_size: int,
    ) -> None:
        self._recorder.same_shape(out, x)
        self._recorder.read(x)
        size = group_size or x.width
        check(x.width % size == 0, f"{x.name} is {x.width} wide, not a multiple of groups of {size}")
        groups = x.width // size
        words: list[int] = []
        for values in (weight, bias):
            per_group = values is not None and groups > 1 and values.size == x.width
            place = self._memory.constant(values, x.width if per_group else size, f"norm weight for {x.name}")
            words += [place, 4 * size if per_group else 0]
        places = (*self._memory.place(x), *self._memory.place(out))
        warps = 8 if size >= 1024 else 2

        def build(shape: Shape) -> Iterator[Step]:
            count = shape.rows(x.rows)
            if count:
                quantized = op.quantized.parameters if op.quantized is not None else (0, 0, 0, 0)
                constants = (kind, warps, int(op.quantized is not None))
                values = (*places, *words, size, *quantized, epsilon)
                yield Launch("rows.norm", constants, (groups, count, 1), 32 * warps, values)

        op = self._recorder.add(build, out)
        op.source, op.can_quantize = out, groups == 1 and size % 32 == 0

    def _quantize(self, x: Buffer) -> Quantized:
        """Where the codes of x are; the op that wrote x makes them if it can, else one of their own does."""
        if x.index in self._recorder.states.quantized:
            return self._recorder.states.quantized[x.index]
        check(x.width % 32 == 0, f"{x.name} is {x.width} wide; quantized weights need a multiple of 32")
        place = quantized_place(self._memory, f"buffer {x.index}", x.width, SMALL_ROWS)
        last = self._recorder.ops[-1] if self._recorder.ops else None
        if last is not None and last.source == x and last.can_quantize:
            # It has no count of rows to look at, so there is room for the codes of all of them.
            place = quantized_place(self._memory, f"buffer {x.index}", x.width, max(self._max_rows[x.rows], SMALL_ROWS))
            last.quantized = place
        else:
            source = self._memory.place(x)

            def build(shape: Shape) -> Iterator[Step]:
                count = shape.rows(x.rows)
                if 0 < count <= SMALL_ROWS:
                    yield quantize_launch(*source, place, x.width, count)

            self._recorder.add(build)
        self._recorder.states.quantized[x.index] = place
        return place

    def matmul(self, x: Buffer, projections: Sequence[Projection]) -> None:
        """One op per layout and order of columns among the projections."""
        self._recorder.read(x)
        by_layout: dict[tuple[int, bytes], list[Projection]] = {}
        for projection in projections:
            packed: DeviceWeight = projection.weight.packed
            weight, out = projection.weight, projection.out
            check(packed.num_experts == 1, f"{weight.name} is a stack of experts; use expert_matmul")
            check(packed.num_columns == x.width, f"{weight.name} has {packed.num_columns} columns, {x.name} {x.width}")
            check(packed.num_rows == out.width, f"{weight.name} has {packed.num_rows} rows, {out.name} {out.width}")
            check(x.rows is out.rows and x.index != out.index, f"{out.name} cannot take the product of {x.name}")
            if projection.residual is not None:
                self._recorder.same_shape(out, projection.residual)
                self._recorder.read(projection.residual)
            order = b"" if packed.columns is None else packed.columns.tobytes()
            by_layout.setdefault((packed.layout, order), []).append(projection)
        for key in sorted(by_layout, key=lambda key: key[1]):
            self._multiply(x, by_layout[key])
        for projection in projections:
            self._recorder.written(projection.out)

    def _multiply(self, x: Buffer, projections: Sequence[Projection]) -> None:
        """Products of one layout and one order of columns."""
        first: DeviceWeight = projections[0].weight.packed
        source = x if first.columns is None else self._in_order(x, first.columns)
        quantized = None if is_float(first.layout) else self._quantize(source)
        place = self._memory.place(source)
        slots = [self._slot(projection) for projection in projections]

        def build(shape: Shape) -> Iterator[Step]:
            count = shape.rows(x.rows)
            if not count:
                return
            if count <= SMALL_ROWS:
                yield from small_gemm(place, quantized, slots, count, op.activation, self._device)
                return
            yield from large_gemm(self._memory, place, x.width, slots, count, self._device.gemm_kind)
            if op.activation is not None:
                gate, up = slots
                words = (up.out, up.out_stride, gate.out, gate.out_stride, up.out, up.out_stride)
                width = up.weight.num_rows
                grid = (-(-width // THREADS), count, 1)
                yield Launch("rows.elementwise", (_GATE,), grid, THREADS, (*words, width, op.activation, 0.0))

        op = self._recorder.add(build)
        op.projections, op.slots = projections, slots

    def _slot(self, projection: Projection) -> Slot:
        packed: DeviceWeight = projection.weight.packed
        residual = (0, 0) if projection.residual is None else self._memory.place(projection.residual)
        bias = self._memory.constant(projection.bias, projection.out.width, f"bias of {projection.weight.name}")
        return Slot(packed, *self._memory.place(projection.out), bias, *residual, projection.scale)

    def _in_order(self, x: Buffer, columns: NDArray[np.int32]) -> Buffer:
        """x with its columns as a weight wants them."""
        out = self.buffer(f"{x.name} in order", x.width, x.rows)
        order = self._memory.array(columns.astype(np.int64))
        words = (*self._memory.place(out), *self._memory.place(x), x.width, order)
        self._recorder.simple("rows.gather_columns", (), x.rows, x.width, words, out)
        return out

    def rope(self, x: Buffer, table: RopeTable, head_size: int, offset: int = 0) -> None:
        pairs = table.inverse_frequencies.size
        check(x.rows is Rows.BATCH and x.width % head_size == 0, f"{x.name} does not hold heads of {head_size}")
        check(offset >= 0 and offset + 2 * pairs <= head_size, f"{2 * pairs} rotated columns exceed {head_size}")
        self._recorder.read(x)
        angles = self._rope_angles(table)
        self._recorder.written(x)
        self._recorder.states.ropes[x.index] = Rope(
            angles, pairs, int(table.pairing is Pairing.HALVES), head_size, offset
        )

    def _rope_angles(self, table: RopeTable) -> int:
        """The table's cosines and sines for every row, computed once per run."""
        frequencies = np.ascontiguousarray(table.inverse_frequencies, np.float64)
        key = (frequencies.tobytes(), table.magnitude)
        if key not in self._angles:
            pairs = frequencies.size
            angles = self._device.allocate(max(self._max_rows[Rows.BATCH], SMALL_ROWS) * 8 * pairs)
            place = self._memory.array(frequencies)

            self._recorder.add(angle_steps(place, pairs, angles, table.magnitude))
            self._angles[key] = angles
        return self._angles[key]

    def _take_rope(self, x: Buffer, head_size: int) -> Rope:
        """The rotation that waits for x, to be done by its reader, which leaves x without it."""
        rope = self._recorder.states.ropes.get(x.index)
        if rope is None or rope.head_size != head_size:
            self._recorder.read(x)
            return Rope(0, 0, 0, head_size, 0)
        del self._recorder.states.ropes[x.index]
        self._recorder.states.unwritten.add(x.index)
        return rope

    def store_kv(self, layer: int, keys: Buffer, values: Buffer) -> None:
        shape_of, layout = self._kv_layout.layers[layer], self._kv_layout
        heads = shape_of.num_kv_heads
        check(keys.width == heads * shape_of.key_size, f"{keys.name} does not hold layer {layer}'s keys")
        check(values.width == heads * shape_of.value_size, f"{values.name} does not hold layer {layer}'s values")
        check(keys.rows is Rows.BATCH and values.rows is Rows.BATCH, "only batch rows enter the cache")
        self._recorder.read(values)
        rope = self._take_rope(keys, shape_of.key_size)
        self._recorder.add(store_steps(layout, layer, self._memory.place(keys), self._memory.place(values), rope))

    def attention(self, out: Buffer, queries: Buffer, layer: int, shape: AttentionShape) -> None:
        layout = self._kv_layout
        kept = layout.layers[layer]
        check(
            (kept.num_kv_heads, kept.key_size, kept.value_size)
            == (shape.num_kv_heads, shape.key_size, shape.value_size)
            and shape.num_heads % shape.num_kv_heads == 0,
            f"attention of layer {layer} is not of the shape its cache has",
        )
        check(queries.width == shape.num_heads * shape.key_size, f"{queries.name} is {queries.width} wide")
        check(out.width == shape.num_heads * shape.value_size, f"{out.name} is {out.width} wide")
        check(queries.rows is Rows.BATCH and out.rows is Rows.BATCH, "attention is of batch rows")
        check(out.index != queries.index, f"{out.name} cannot take the attention of itself")
        rope = self._take_rope(queries, shape.key_size)
        sinks = self._memory.constant(shape.sinks, shape.num_heads, "attention sinks")
        slopes = self._memory.constant(shape.alibi_slopes, shape.num_heads, "ALiBi slopes")
        places = (self._memory.place(queries), self._memory.place(out))
        build = attention_steps(self._memory, layout, layer, shape, places, (slopes, sinks), rope, lambda: op.quantized)
        op = self._recorder.add(build, out)
        op.source, op.can_quantize = out, shape.value_size % 32 == 0

    def activation(self, out: Buffer, x: Buffer, kind: Activation) -> None:
        check(kind is not Activation.SWIGLU_CLAMPED, f"{kind.value} exists only gated")
        self._elementwise(_ACTIVATION, out, x, x, activation=kind)

    def gated_activation(self, out: Buffer, gate: Buffer, up: Buffer, kind: Activation) -> None:
        last = self._recorder.ops[-1] if self._recorder.ops else None
        if last is not None and out == up and [projection.out for projection in last.projections] == [gate, up]:
            weights = [slot.weight for slot in last.slots]
            plain = all(not slot.residual and slot.scale == 1.0 for slot in last.slots)
            if plain and weights[0].num_rows == weights[1].num_rows and last.activation is None:
                last.activation = _NUMBERS[kind]
                last.projections = ()
                self._recorder.states.unwritten.add(gate.index)
                return
        self._elementwise(_GATE, out, gate, up, activation=kind)

    def add(self, out: Buffer, a: Buffer, b: Buffer, scale: float = 1.0) -> None:
        self._elementwise(_ADD, out, a, b, scale)

    def multiply_sigmoid(self, out: Buffer, x: Buffer, gate: Buffer) -> None:
        if gate.width == 1 and x.width != 1:
            self._recorder.same_shape(out, x)
            check(gate.rows is x.rows, f"{gate.name} and {x.name} hold different rows")
            self._recorder.read(x, gate)
            places = (*self._memory.place(out), *self._memory.place(x), *self._memory.place(gate))
            words = (*places, x.width, 0, 0.0)
            self._recorder.simple("rows.elementwise", (_TIMES_ROW_SIGMOID,), x.rows, x.width, words, out)
        else:
            self._elementwise(_TIMES_SIGMOID, out, x, gate)

    def scale(self, x: Buffer, factor: float) -> None:
        self._elementwise(_SCALE, x, x, x, factor)

    def scale_by_position(self, x: Buffer, period: int, slope: float, offset: int = 0) -> None:
        check(x.rows is Rows.BATCH and 0 < period < 1 << 31, f"{x.name} cannot be scaled by position over {period}")
        self._recorder.read(x)
        place = self._memory.place(x)

        def build(shape: Shape) -> Iterator[Step]:
            words = (*place, x.width, shape.positions, period + (offset << 31), slope)
            grid = (-(-x.width // THREADS), shape.batch_rows, 1)
            yield Launch("rows.scale_by_position", (), grid, THREADS, words)

        self._recorder.add(build, x)

    def softcap(self, x: Buffer, cap: float) -> None:
        self._elementwise(_SOFTCAP, x, x, x, cap)

    def _elementwise(
        self,
        operation: int,
        out: Buffer,
        a: Buffer,
        b: Buffer,
        scalar: float = 0.0,
        activation: Activation | None = None,
    ) -> None:
        self._recorder.same_shape(out, a, b)
        self._recorder.read(a, b)
        number = 0 if activation is None else _NUMBERS[activation]
        places = (*self._memory.place(out), *self._memory.place(a), *self._memory.place(b))
        self._recorder.simple(
            "rows.elementwise", (operation,), out.rows, out.width, (*places, out.width, number, scalar), out
        )

    def select_output(self, out: Buffer, x: Buffer) -> None:
        check(out.width == x.width and out.rows is Rows.OUTPUT and x.rows is Rows.BATCH, f"{out.name} from {x.name}")
        self._recorder.read(x)
        places = (*self._memory.place(out), *self._memory.place(x), x.width)

        def build(shape: Shape) -> Iterator[Step]:
            if shape.output_rows:
                grid = (-(-x.width // THREADS), shape.output_rows, 1)
                yield Launch("rows.select_rows", (), grid, THREADS, (*places, shape.output_row_numbers))

        self._recorder.add(build, out)

    def copy_heads(
        self,
        out: Buffer,
        x: Buffer,
        num_heads: int,
        width: int,
        out_head_size: int,
        x_head_size: int,
        out_offset: int = 0,
        x_offset: int = 0,
    ) -> None:
        check(out.rows is x.rows, f"{out.name} and {x.name} do not hold the same rows")
        check(out.width == num_heads * out_head_size and out_offset + width <= out_head_size, f"heads of {out.name}")
        check(x.width == num_heads * x_head_size and x_offset + width <= x_head_size, f"heads of {x.name}")
        self._recorder.read(x, out)
        (target, out_stride), (source, stride) = self._memory.place(out), self._memory.place(x)
        places = (target + 4 * out_offset, out_stride, source + 4 * x_offset, stride)
        words = (*places, num_heads, width, out_head_size, x_head_size)
        self._recorder.simple("rows.copy_heads", (), x.rows, num_heads * width, words, out)

    def head_matmul(
        self,
        out: Buffer,
        x: Buffer,
        weight: LinearWeight,
        out_head_size: int,
        x_head_size: int,
        out_offset: int = 0,
        x_offset: int = 0,
    ) -> None:
        packed: DeviceWeight = weight.packed
        heads, columns, rows = packed.num_experts, packed.num_columns, packed.num_rows
        check(packed.columns is None, f"{weight.name} has its columns in another order; only matmul gathers")
        check(out.rows is x.rows, f"{out.name} and {x.name} do not hold the same rows")
        check(out.width == heads * out_head_size and out_offset + rows <= out_head_size, f"{out.name}: {weight.name}")
        check(x.width == heads * x_head_size and x_offset + columns <= x_head_size, f"{x.name}: {weight.name}")
        check(out.index != x.index, f"{out.name} cannot take the product of itself")
        self._recorder.read(x, out)
        source, stride = self._memory.place(x)
        target, out_stride = self._memory.place(out)
        slot = Slot(packed, target + 4 * out_offset, out_stride)
        whole = None
        if not is_float(packed.layout):
            check(x_head_size % 32 == 0 and x_offset % 32 == 0, f"heads of {x.name} are not blocks of 32 columns")
            everything = max(self._max_rows[x.rows], SMALL_ROWS)
            whole = quantized_place(self._memory, f"heads of buffer {x.index}", x.width, everything)

        def build(shape: Shape) -> Iterator[Step]:
            count = shape.rows(x.rows)
            if count:
                yield from expert_gemm(
                    (source, stride), x.width, whole, slot, count, (x_head_size, x_offset), out_head_size
                )

        self._recorder.add(build, out)

    def route(self, expert_ids: Buffer, expert_weights: Buffer, logits: Buffer, routing: Routing) -> None:
        self._experts.route(expert_ids, expert_weights, logits, routing)

    def expert_matmul(
        self,
        out: Buffer,
        x: Buffer,
        weight: LinearWeight,
        expert_ids: Buffer,
        bias: FloatArray | None = None,
        input_per_slot: bool = False,
    ) -> None:
        self._experts.matmul(out, x, weight, expert_ids, bias, input_per_slot)

    def expert_sum(self, out: Buffer, x: Buffer, expert_weights: Buffer, residual: Buffer | None = None) -> None:
        self._experts.sum(out, x, expert_weights, residual)

    def expert_scale(self, x: Buffer, expert_weights: Buffer) -> None:
        self._experts.scale(x, expert_weights)

    def finish(self, logits: Buffer) -> CudaProgram:
        check(logits.rows is Rows.OUTPUT, f"{logits.name} holds batch rows; logits are of output rows")
        self._recorder.read(logits)
        place, stride = self._memory.place(logits)
        builders = tuple(op.build for op in self._recorder.ops)
        record = TapeRecord(
            device=self._device,
            page_tokens=self._kv_layout.page_tokens,
            max_batch_rows=self._max_rows[Rows.BATCH],
            max_output_rows=self._max_rows[Rows.OUTPUT],
            build=lambda shape: [step for build in builders for step in build(shape)],
            logits=place,
            logits_stride=stride,
            vocab_size=logits.width,
            num_tokens=self._token_limit,
            num_positions=self._position_limit,
            received=self._received,
            progress=self._progress,
        )
        return CudaProgram(record)
