"""From a graph of ops to a program for CUDA: each op becomes a function that gives the kernels to launch for a batch.

`LOWER` has one function per op. Neighbours that a GPU computes better together are joined: gate and up and their
activation are one kernel, RoPE happens where queries and keys are read next, attention stores a single row in the
cache, and a norm, attention or a gated product also quantizes what it writes if a product reads it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ShapeError, UnsupportedFormatError
from localinfer.kernels import ops
from localinfer.kernels.cuda import experts, gemm
from localinfer.kernels.cuda.attention import AttentionLaunches, FreshRows, HeadRotation, store_steps
from localinfer.kernels.cuda.device import CudaDevice, Launch, Step
from localinfer.kernels.cuda.gemm import Quantized, Shape, Slot
from localinfer.kernels.cuda.memory import SMALL_ROWS, SharedMemory
from localinfer.kernels.cuda.page_sums import PageSums
from localinfer.kernels.cuda.program import CudaProgram
from localinfer.kernels.cuda.tape import CudaTape
from localinfer.kernels.cuda.weights import DeviceWeight
from localinfer.kernels.graph_builder import check, packed_weight
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.layouts import is_float
from localinfer.kernels.ops import Activation, Buffer, OpGraph, Pairing, Projection, RopeTable, Rows
from localinfer.kernels.program import BatchLimits
from localinfer.types import ProgressCallback

_RMS, _LAYER = 0, 1
_ACTIVATION, _GATE, _LIMITED_GATE, _ADD, _TIMES, _TIMES_ROW, _TIMES_SIGMOID, _SCALE, _CLAMP, _CLAMP_ABOVE, _SOFTCAP = (
    range(11)
)
_NORM_WARPS = 32
"""Warps of a norm at most: a block is all that computes a row, and waits for memory once."""
_NUMBERS = {kind: number for number, kind in enumerate(Activation)}


def lower_to_cuda(
    graph: OpGraph,
    device: CudaDevice,
    kv_layout: KVLayout,
    *,
    max_batch_rows: int = 1024,
    max_output_rows: int = 64,
    max_summed_tokens: int = 0,
    shared: SharedMemory | None = None,
    samples: bool = True,
    progress: ProgressCallback | None = None,
) -> CudaProgram:
    """Compile a graph for a device: `max_batch_rows` tokens per run, `max_output_rows` of them with logits.

    kv_layout: of the graph's own layers. max_summed_tokens: see `lower_to_cpu`. shared: memory that the device's
    programs share, of which one runs at a time; None for its own. samples: whether tokens are chosen of what it gives.
    Raises: ShapeError for what no kernel computes; UnsupportedFormatError for recurrent layers.
    """
    if graph.states:
        raise UnsupportedFormatError(
            f"this model has {len(graph.states)} recurrent ops, which device 'cuda' does not run; take device 'cpu' "
            "(--device cpu)"
        )
    check(graph.hidden is None, "draft layers run on the CPU only")
    assert tuple(kv_layout.layers) == graph.kv_layers, "a graph reads and writes the cache that it was written for"
    max_rows = {Rows.BATCH: max_batch_rows, Rows.OUTPUT: min(max_output_rows, max_batch_rows)}
    tape = CudaTape(graph, device, kv_layout, max_rows, shared)
    if max_summed_tokens:
        tape.page_sums = PageSums(tape.memory, max_batch_rows, -(-max_summed_tokens // kv_layout.page_tokens))
    for number, op in enumerate(graph.ops):
        if type(op) not in LOWER:
            raise UnsupportedFormatError(
                f"this model has {type(op).__name__}, which device 'cuda' does not run; take 'cpu' (--device cpu)"
            )
        first, quantized = len(tape.ops), dict(tape.quantized)
        LOWER[type(op)](tape, op)
        if number in graph.typed_ops:
            tape.leave_out(first, quantized)
    tape.read(graph.output)
    limits = BatchLimits(
        max_batch_rows,
        max_rows[Rows.OUTPUT],
        graph.num_tokens,
        graph.num_positions,
        kv_layout.page_tokens,
        num_token_types=graph.num_token_types,
        media_width=graph.media_width,
        takes_ranges=graph.takes_ranges,
    )
    builders = [op.build for op in tape.ops]
    ends = [*tape.stage_starts[1:], len(builders)]
    stages = [tuple(builders[start:end]) for start, end in zip(tape.stage_starts, ends, strict=True)]
    logits = (*tape.memory.address_of(graph.output), graph.output.width)
    return CudaProgram(
        device,
        limits,
        stages,
        logits,
        tape.memory.address_of,
        progress,
        samples=samples,
        page_sums=tape.page_sums,
        embeddings=tape.embeddings,
    )


_LOOKED_UP: dict[type, str] = {ops.Embed: "token_ids", ops.EmbedPositions: "positions", ops.EmbedTypes: "token_types"}


def _embed(tape: CudaTape, op: ops.Embed | ops.EmbedPositions | ops.EmbedTypes) -> None:
    out, table = op.out, op.table
    scale = op.scale if isinstance(op, ops.Embed) else 1.0
    adds = isinstance(op, ops.EmbedPositions) or (isinstance(op, ops.EmbedTypes) and op.adds)
    if adds:
        tape.read(out)
    weight: DeviceWeight = table.packed
    stored = (weight.num_rows, weight.num_columns)
    check(stored == (table.num_rows, table.width), f"{table.name} is stored as {stored}")
    place: tuple[float | str, ...] = (_LOOKED_UP[type(op)], *tape.addresses_of(out))
    values = (*weight.arrays, *weight.row_bytes, *place, weight.num_columns, weight.num_rows, int(adds), scale)
    tape.simple("rows.embed", (weight.layout,), Rows.BATCH, weight.num_columns, values, out)


def _embed_media(tape: CudaTape, op: ops.EmbedMedia) -> None:
    x = op.x
    tape.read(x)
    tape.reserve_embeddings()
    offset = 4 * op.part * x.width

    def build(shape: Shape) -> Iterator[Step]:
        count = shape.rows(x.rows)
        if count and shape.media is not None and shape.media.embeddings:
            rows = shape.output_row_numbers if x.is_output else 0
            values = (*tape.memory.address_of(x), x.width, shape.media.embeddings, offset, int(op.adds), rows)
            yield gemm.column_launch("rows.embed_media", (), x.width, count, values)

    tape.add(build, x)


def _stage_boundary(tape: CudaTape, op: ops.StageBoundary) -> None:
    tape.read(*op.downloads)
    # What follows is joined with nothing before it.
    tape.add(lambda shape: iter(()), *op.uploads)
    tape.stage_starts.append(len(tape.ops))


def _norm(tape: CudaTape, norm: ops.RmsNorm | ops.LayerNorm) -> None:
    out, x = norm.out, norm.x
    tape.read(x)
    size = norm.group_size or x.width
    groups = x.width // size
    kind, bias = (_LAYER, norm.bias) if isinstance(norm, ops.LayerNorm) else (_RMS, None)
    words: list[int] = []
    for values in (norm.weight, bias):
        is_per_group = values is not None and groups > 1 and values.size == x.width
        words += [tape.memory.constant(values), 4 * size if is_per_group else 0]
    places = tape.addresses_of(x, out)
    warps = min(_NORM_WARPS, max(2, size // 128))
    rounds = -(-size // (32 * warps))

    def build(shape: Shape) -> Iterator[Step]:
        count = shape.rows(x.rows)
        if count:
            quantized = op.quantized.parameters if op.quantized is not None else (0, 0, 0, 0)
            # Few rows leave most of a GPU idle, so that several blocks can each write a part of a row.
            is_shared = count <= SMALL_ROWS and rounds > 1 and out != x
            constants = (kind, warps, int(op.quantized is not None), rounds, int(is_shared))
            values = (*places, *words, size, *quantized, norm.epsilon)
            grid = (groups * rounds if is_shared else groups, count, 1)
            yield Launch("rows.norm", constants, grid, 32 * warps, values)

    op = tape.add(build, out)
    op.source, op.can_quantize = out, groups == 1 and size % 32 == 0


def _quantize(tape: CudaTape, x: Buffer) -> Quantized:
    """Address of the codes of x; the op that wrote x makes them if it can, else one of their own does."""
    if x.index in tape.quantized:
        return tape.quantized[x.index]
    check(x.width % 32 == 0, f"{x.name} is {x.width} wide; quantized weights need a multiple of 32")
    place = gemm.quantized_place(tape.memory, f"buffer {x.index}", x.width, SMALL_ROWS)
    last = tape.last
    if last is not None and last.source == x and last.can_quantize:
        if last.slots:
            place = replace(place, counters=tape.memory.counters(x.width // 32))
        else:
            # It has no count of rows to look at, so there is room for the codes of all of them.
            rows = max(tape.max_rows[x.rows], SMALL_ROWS)
            place = gemm.quantized_place(tape.memory, f"buffer {x.index}", x.width, rows)
        last.quantized = place
    else:
        source = tape.memory.address_of(x)

        def build(shape: Shape) -> Iterator[Step]:
            count = shape.rows(x.rows)
            if 0 < count <= SMALL_ROWS:
                yield gemm.quantize_launch(*source, place, x.width, count)

        tape.add(build)
    tape.quantized[x.index] = place
    return place


def _matmul(tape: CudaTape, op: ops.Matmul) -> None:
    """One op per layout and order of columns among the projections."""
    tape.read(op.x)
    by_layout: dict[tuple[int, bytes], list[Projection]] = {}
    for projection in op.projections:
        packed: DeviceWeight = packed_weight(projection.weight, may_gather=True)
        if projection.residual is not None:
            tape.read(projection.residual)
        order = b"" if packed.columns is None else packed.columns.tobytes()
        by_layout.setdefault((packed.layout, order), []).append(projection)
    for key in sorted(by_layout, key=lambda key: key[1]):
        _multiply(tape, op.x, by_layout[key])
    for projection in op.projections:
        tape.written(projection.out)


def _multiply(tape: CudaTape, x: Buffer, projections: Sequence[Projection]) -> None:
    """Products of one layout and one order of columns."""
    first: DeviceWeight = projections[0].weight.packed
    source = x if first.columns is None else _in_order(tape, x, first.columns)
    quantized = None if is_float(first.layout) else _quantize(tape, source)
    place = tape.memory.address_of(source)
    slots = [_slot(tape, projection) for projection in projections]

    def build(shape: Shape) -> Iterator[Step]:
        count = shape.rows(x.rows)
        if not count:
            return
        if count <= SMALL_ROWS:
            yield from gemm.small_gemm(place, quantized, slots, count, op.activation, tape.device, op.quantized)
            return
        yield from gemm.large_gemm(tape.memory, place, x.width, slots, count, tape.device.gemm_kind)
        if op.activation is not None:
            gate, up = slots
            words = (up.out, up.out_stride, gate.out, gate.out_stride, up.out, up.out_stride)
            width = up.weight.num_rows
            yield gemm.column_launch("rows.elementwise", (_GATE,), width, count, (*words, width, op.activation, 0.0))

    op = tape.add(build)
    op.projections, op.slots = projections, slots


def _slot(tape: CudaTape, projection: Projection) -> Slot:
    residual = (0, 0) if projection.residual is None else tape.memory.address_of(projection.residual)
    bias = tape.memory.constant(projection.bias)
    return Slot(projection.weight.packed, *tape.memory.address_of(projection.out), bias, *residual, projection.scale)


def _in_order(tape: CudaTape, x: Buffer, columns: NDArray[np.int32]) -> Buffer:
    """x with its columns as a weight wants them."""
    out = tape.memory.buffer(f"{x.name} in order", x.width, x.rows)
    order = tape.memory.array(columns.astype(np.int64))
    tape.simple("rows.gather_columns", (), x.rows, x.width, (*tape.addresses_of(out, x), x.width, order), out)
    return out


def _rope(tape: CudaTape, op: ops.Rope) -> None:
    tape.read(op.x)
    halves = int(op.table.pairing is Pairing.HALVES)
    pairs = op.table.inverse_frequencies.size
    tape.put_off(op.x, HeadRotation(_rope_angles(tape, op.table), pairs, halves, op.head_size, op.offset))


def _rope_angles(tape: CudaTape, table: RopeTable) -> int:
    """The table's cosines and sines for every row, computed once per run."""
    frequencies = np.ascontiguousarray(table.inverse_frequencies, np.float64)
    axes = None if table.axes is None else np.ascontiguousarray(table.axes, np.int64)
    key = (frequencies.tobytes(), table.magnitude, None if axes is None else axes.tobytes())
    if key not in tape.angles:
        pairs = frequencies.size
        angles = tape.device.allocate(max(tape.max_rows[Rows.BATCH], SMALL_ROWS) * 8 * pairs)
        values = (tape.memory.array(frequencies), pairs, angles, table.magnitude)
        of_pairs = 0 if axes is None else tape.memory.array(axes)

        def build(shape: Shape) -> Iterator[Step]:
            name, place = "rows.rope_angles", [shape.positions]
            if of_pairs and shape.media is not None and shape.media.axes:
                name, place = "rows.rope_angles_by_axis", [shape.media.axes, of_pairs]
            yield gemm.column_launch(name, (), pairs, shape.batch_rows, (*place, *values))

        tape.add(build)
        tape.angles[key] = angles
    return tape.angles[key]


def _store_kv(tape: CudaTape, op: ops.StoreKV) -> None:
    values_buffer = op.values
    if values_buffer is None:
        raise ShapeError("keys without values are cached on the CPU only; take device 'cpu'")
    tape.read(values_buffer)
    rope = tape.take_rope(op.keys, tape.kv_layout.layers[op.layer].key_size)
    keys, values = tape.memory.address_of(op.keys), tape.memory.address_of(values_buffer)
    store = store_steps(tape.kv_layout, op.layer, keys, values, rope)
    recorded = tape.add(lambda run: iter(()) if recorded.is_left and run.batch_rows == 1 else store(run))
    recorded.fresh = FreshRows(op.layer, keys, values, rope)


def _attention(tape: CudaTape, attention: ops.Attention) -> None:
    out, shape, memory = attention.out, attention.shape, tape.memory
    check(attention.chosen is None, "attention to chosen positions is computed on the CPU only; take device 'cpu'")
    check(attention.relative is None, "biases by distance are computed on the CPU only; take device 'cpu'")
    check(not shape.excludes_own, "attention without a row's own position is computed on the CPU only")
    check(not (shape.bidirectional and tape.page_sums), "attention to later positions is not summed by page")
    rope = tape.take_rope(attention.queries, shape.key_size)
    places = (memory.address_of(attention.queries), memory.address_of(out))
    constants = (memory.constant(shape.alibi_slopes), memory.constant(shape.sinks))
    launches = AttentionLaunches(
        memory, tape.kv_layout, attention.layer, shape, *places, *constants, rope, takes_ranges=attention.takes_ranges
    )
    sums = tape.page_sums
    last = tape.last
    if sums is not None:
        # Attention is summed before it is computed, from rows that are stored by then.
        tape.add(lambda run: sums.steps(run, launches))
    elif last is not None and last.fresh is not None and last.fresh.layer == launches.layer and launches.can_store:
        launches = replace(launches, fresh=last.fresh)
        last.is_left = True
    op = tape.add(lambda run: launches.steps(run, op.quantized), out)
    op.source, op.can_quantize = out, shape.value_size % 32 == 0


def _choose_blocks(tape: CudaTape, op: ops.ChooseBlocks) -> None:
    check(False, "positions are chosen on the CPU only; take device 'cpu'")


def _gated_activate(tape: CudaTape, op: ops.GatedActivate) -> None:
    last, gate, up = tape.last, op.gate, op.up
    if op.limit:
        _elementwise(tape, _LIMITED_GATE, op.out, gate, up, op.limit)
        return
    if last is not None and op.out == up and [projection.out for projection in last.projections] == [gate, up]:
        weights = [slot.weight for slot in last.slots]
        is_plain = all(not slot.residual and slot.scale == 1.0 for slot in last.slots)
        if is_plain and weights[0].num_rows == weights[1].num_rows and last.activation is None:
            last.activation = _NUMBERS[op.kind]
            last.projections = ()
            last.source, last.can_quantize = up, up.width % 32 == 0
            tape.leave_unwritten(gate)
            return
    _elementwise(tape, _GATE, op.out, gate, up, activation=_NUMBERS[op.kind])


def _elementwise(
    tape: CudaTape, operation: int, out: Buffer, a: Buffer, b: Buffer, scalar: float = 0.0, activation: int = 0
) -> None:
    tape.read(a, b)
    values = (*tape.addresses_of(out, a, b), out.width, activation, scalar)
    tape.simple("rows.elementwise", (operation,), out.rows, out.width, values, out)


def _xielu(tape: CudaTape, op: ops.Xielu) -> None:
    tape.read(op.x)
    values = (*tape.addresses_of(op.out, op.x), op.x.width, op.positive, op.negative, op.beta, op.epsilon)
    tape.simple("rows.xielu", (), op.x.rows, op.x.width, values, op.out)


def _multiply_sigmoid(tape: CudaTape, op: ops.MultiplySigmoid) -> None:
    if not op.is_by_part:
        _elementwise(tape, _TIMES_SIGMOID, op.out, op.x, op.gate)
        return
    _by_part(tape, op.out, op.x, op.gate, has_sigmoid=True)


def _by_part(tape: CudaTape, out: Buffer, x: Buffer, gate: Buffer, *, has_sigmoid: bool) -> None:
    tape.read(x, gate)
    values = (*tape.addresses_of(out, x, gate), x.width, x.width // gate.width)
    tape.simple("rows.gate_parts", (int(has_sigmoid),), x.rows, x.width, values, out)


def _times(tape: CudaTape, op: ops.Multiply) -> None:
    out, x, factor = op.out, op.x, op.factor
    if isinstance(factor, Buffer) and op.is_by_part:
        _by_part(tape, out, x, factor, has_sigmoid=False)
        return
    if isinstance(factor, Buffer):
        _elementwise(tape, _TIMES_ROW if op.is_by_row else _TIMES, out, x, factor)
        return
    tape.read(x)
    values = (*tape.addresses_of(out, x), tape.memory.constant(factor), 0, out.width, 0, 0.0)
    tape.simple("rows.elementwise", (_TIMES,), out.rows, out.width, values, out)


def _mix_slots(tape: CudaTape, op: ops.MixSlots) -> None:
    others = [buffer for buffer in (op.weights, op.residual) if buffer is not None]
    tape.read(op.x, *others)
    weights, residual = (
        (0, 0) if buffer is None else tape.addresses_of(buffer) for buffer in (op.weights, op.residual)
    )
    sizes = (op.num_slots, op.x.width // op.num_slots, op.out.width, op.first_slot)
    values = (*tape.addresses_of(op.out, op.x), *weights, *residual, *sizes)
    tape.simple("rows.mix_slots", (), op.out.rows, op.out.width, values, op.out)


def _row_statistic(tape: CudaTape, out: Buffer, x: Buffer, num_deviations: float | None = None) -> None:
    tape.read(x)
    values = (*tape.addresses_of(out, x), x.width, num_deviations or 0.0)

    def build(shape: Shape) -> Iterator[Step]:
        count = shape.rows(x.rows)
        if count:
            yield Launch("rows.row_statistic", (int(num_deviations is not None),), (1, count, 1), 32, values)

    tape.add(build, out)


def _scale_by_position(tape: CudaTape, op: ops.ScaleByPosition) -> None:
    x = op.x
    tape.read(x)
    values: tuple[float | str, ...]
    values = (*tape.addresses_of(x), x.width, "positions", op.period + (op.offset << 31), op.slope)
    tape.simple("rows.scale_by_position", (), Rows.BATCH, x.width, values, x)


def _select_output(tape: CudaTape, op: ops.SelectOutput) -> None:
    x = op.x
    tape.read(x)
    values: tuple[int | str, ...] = (*tape.addresses_of(op.out, x), x.width, "output_row_numbers")
    tape.simple("rows.select_rows", (), Rows.OUTPUT, x.width, values, op.out)


def _copy_heads(tape: CudaTape, op: ops.CopyHeads) -> None:
    tape.read(op.x)
    tape.write_part(op.out, op.num_heads * op.width)
    target, out_stride, source, stride = tape.addresses_of(op.out, op.x)
    places = (target + 4 * op.out_offset, out_stride, source + 4 * op.x_offset, stride)
    values = (*places, op.num_heads, op.width, op.out_head_size, op.x_head_size)
    tape.simple("rows.copy_heads", (), op.x.rows, op.num_heads * op.width, values)


def _head_matmul(tape: CudaTape, op: ops.HeadMatmul) -> None:
    x = op.x
    packed: DeviceWeight = packed_weight(op.weight)
    tape.read(x)
    tape.write_part(op.out, packed.num_experts * packed.num_rows)
    source = tape.memory.address_of(x)
    target, out_stride = tape.memory.address_of(op.out)
    slot = Slot(packed, target + 4 * op.out_offset, out_stride)
    whole = None
    if not is_float(packed.layout):
        is_whole = op.x_head_size % 32 == 0 and op.x_offset % 32 == 0
        check(is_whole, f"heads of {x.name} are not blocks of 32 columns")
        everything = max(tape.max_rows[x.rows], SMALL_ROWS)
        whole = gemm.quantized_place(tape.memory, f"heads of buffer {x.index}", x.width, everything)
    head = (op.x_head_size, op.x_offset)

    def build(shape: Shape) -> Iterator[Step]:
        count = shape.rows(x.rows)
        if count:
            yield from gemm.expert_gemm(source, x.width, whole, slot, count, head, op.out_head_size)

    tape.add(build)


def _add_vector(tape: CudaTape, op: ops.AddVector) -> None:
    tape.read(op.x)
    values = (*tape.addresses_of(op.x, op.x), tape.memory.constant(op.vector), 0, op.x.width, 0, 1.0)
    tape.simple("rows.elementwise", (_ADD,), op.x.rows, op.x.width, values, op.x)


def _mean_rows(tape: CudaTape, op: ops.MeanRows) -> None:
    tape.read(op.x)
    values: tuple[float | str, ...]
    values = (*tape.addresses_of(op.out, op.x), op.x.width, "output_row_numbers", "page_tables", "batch_rows")
    tape.simple("pooling.mean_rows", (), Rows.OUTPUT, op.x.width, values, op.out)


LOWER: dict[type, Callable[[CudaTape, Any], None]] = {
    ops.Embed: _embed,
    ops.EmbedPositions: _embed,
    ops.EmbedTypes: _embed,
    ops.EmbedMedia: _embed_media,
    ops.StageBoundary: _stage_boundary,
    ops.RmsNorm: _norm,
    ops.LayerNorm: _norm,
    ops.Matmul: _matmul,
    ops.Rope: _rope,
    ops.StoreKV: _store_kv,
    ops.Attention: _attention,
    ops.ChooseBlocks: _choose_blocks,
    ops.Activate: lambda tape, op: _elementwise(tape, _ACTIVATION, op.out, op.x, op.x, activation=_NUMBERS[op.kind]),
    ops.GatedActivate: _gated_activate,
    ops.Xielu: _xielu,
    ops.Add: lambda tape, op: _elementwise(tape, _ADD, op.out, op.a, op.b, op.scale),
    ops.Multiply: _times,
    ops.Magnitude: lambda tape, op: _row_statistic(tape, op.out, op.x),
    ops.MixSlots: _mix_slots,
    ops.GaussianTopK: lambda tape, op: _row_statistic(tape, op.out, op.x, op.num_deviations),
    ops.MultiplySigmoid: _multiply_sigmoid,
    ops.AddVector: _add_vector,
    ops.MeanRows: _mean_rows,
    ops.Scale: lambda tape, op: _elementwise(tape, _SCALE, op.x, op.x, op.x, op.factor),
    ops.Clamp: lambda tape, op: _elementwise(
        tape, _CLAMP_ABOVE if op.only_above else _CLAMP, op.x, op.x, op.x, op.limit
    ),
    ops.ScaleByPosition: _scale_by_position,
    ops.Softcap: lambda tape, op: _elementwise(tape, _SOFTCAP, op.x, op.x, op.x, op.cap),
    ops.CopyHeads: _copy_heads,
    ops.HeadMatmul: _head_matmul,
    ops.SelectOutput: _select_output,
    ops.Route: experts.lower_route,
    ops.ExpertMatmul: experts.lower_expert_matmul,
    ops.ExpertSum: experts.lower_expert_sum,
    ops.ExpertScale: experts.lower_expert_scale,
    ops.ExpertFactors: experts.lower_expert_factors,
}
