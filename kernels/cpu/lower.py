"""From a graph of ops to a tape for the CPU: each op becomes a kernel's address and a parameter block.

`LOWER` has one function per op. `GraphBuilder` proved the shapes; proven here is what else a kernel will believe: that
packed weights are what their handles say, and what only these kernels cannot do. The program keeps all that the blocks
point to alive.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels import ops
from localinfer.kernels.cpu import attention, kernel_abi
from localinfer.kernels.cpu.arrays import address, aligned
from localinfer.kernels.cpu.attention import float_word
from localinfer.kernels.cpu.costs import attention_cost, embedding_cost, expert_cost, head_cost, matmul_cost
from localinfer.kernels.cpu.memory import padded
from localinfer.kernels.cpu.pool import ThreadPool
from localinfer.kernels.cpu.program import CpuProgram
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.cpu.weights import PackedWeight, RowTable
from localinfer.kernels.graph_builder import check, packed_weight
from localinfer.kernels.jit.compile_ahead import ProgressCallback, compile_ahead
from localinfer.kernels.kv_layout import KVLayout, is_quantized
from localinfer.kernels.layouts import GGUF_LAYOUTS, SIZES, is_float, num_tiles
from localinfer.kernels.ops import Buffer, Gating, LinearWeight, OpGraph, Projection, RopeTable, Rows

ACTIVATION_BYTES_PER_BLOCK = 384 * 1024
"""Rows of a matmul are taken in blocks of about this many bytes of activations: they and a tile share a 1 MiB cache."""

MAX_BATCH_ROWS = 512
"""Rows of a batch by default."""

_GATING_CODES = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SOFTMAX_SELECTED: 2}


def lower_to_cpu(
    graph: OpGraph,
    pool: ThreadPool,
    kv_layout: KVLayout,
    *,
    max_batch_rows: int = MAX_BATCH_ROWS,
    max_output_rows: int = 64,
    max_weighed_tokens: int = 0,
    progress: ProgressCallback | None = None,
) -> CpuProgram:
    """Compile a graph for a thread pool: `max_batch_rows` tokens per run, `max_output_rows` of them with logits.

    kv_layout: of the graph's own layers.
    max_weighed_tokens: where it is not 0, every page's share of attention is measured, and no sequence may hold more
    positions than that.
    Raises: ShapeError for what no kernel computes.
    """
    assert tuple(kv_layout.layers) == graph.kv_layers, "a graph reads and writes the cache that it was written for"
    tape = CpuTape(graph, pool, kv_layout, max_batch_rows, min(max_output_rows, max_batch_rows), max_weighed_tokens)
    for op in graph.ops:
        LOWER[type(op)](tape, op)
    compile_ahead([*tape.kernels, *(called for _, _, called in tape.calls)], progress)
    for block, offset, called in tape.calls:
        block[offset // 8] = called.address
    return CpuProgram(tape)


def _embed(tape: CpuTape, op: ops.Embed | ops.EmbedPositions) -> None:
    out, table = op.out, op.table
    by_position = isinstance(op, ops.EmbedPositions)
    scale = 1.0 if isinstance(op, ops.EmbedPositions) else op.scale
    rows: RowTable = table.packed
    check(rows.num_columns == table.width, f"{table.name} is {table.width} wide, and stored {rows.num_columns} wide")
    check(rows.layout in GGUF_LAYOUTS, f"{table.name} is in {rows.layout.name}, which embeddings are not")
    sizes = SIZES[rows.layout]
    row_bytes = rows.num_columns // sizes.unit * sizes.file_bytes
    check(
        rows.data.size == table.num_rows * row_bytes and rows.num_columns % sizes.unit == 0,
        f"{table.name} holds {rows.data.size} bytes; {table.num_rows} rows need {table.num_rows * row_bytes}",
    )
    tape.memory.keep_table(rows, by_position=by_position)
    words = (rows.data.ctypes.data, row_bytes, int(rows.layout), rows.num_columns, sizes.unit, sizes.file_bytes)
    more = (float_word(scale), int(by_position))
    tape.add(
        "embedding.embed", *tape.place(out), *words, *more, writes=out, cost=embedding_cost("embedding.embed", table)
    )


def _norm(tape: CpuTape, op: ops.RmsNorm | ops.LayerNorm) -> None:
    size = op.group_size or op.x.width
    groups = op.x.width // size
    per_group = op.weight is not None and groups > 1 and op.weight.size == op.x.width
    bias, kernel = (op.bias, "layer_norm") if isinstance(op, ops.LayerNorm) else (None, "rms_norm")
    addresses = [tape.memory.constant(values) for values in (op.weight, bias)]
    words = (4 * size if per_group else 0, groups, size, float_word(op.epsilon), _is_output(op.x))
    tape.add(f"elementwise.{kernel}", *tape.place(op.out), *tape.place(op.x), *addresses, *words, writes=op.out)


def _matmul(tape: CpuTape, op: ops.Matmul) -> None:
    """One kernel per layout and order of columns among the projections, all on the same quantized input."""
    x = op.x
    by_layout: dict[tuple[Any, bytes], list[Projection]] = {}
    for projection in op.projections:
        packed = _packed(tape, projection.weight, may_gather=True)
        order = b"" if packed.columns is None else packed.columns.tobytes()
        by_layout.setdefault((packed.layout, order), []).append(projection)
    # Weights of one order follow each other, so that their input is gathered once.
    for layout, order in sorted(by_layout, key=lambda key: key[1]):
        group = by_layout[layout, order]
        first: PackedWeight = group[0].weight.packed
        place, stride, _ = _activations(tape, tape.in_order(x, first.columns), first, 1)
        bytes_per_row = kernel_abi.activation_row_bytes(x.width) if not is_float(layout) else 4 * x.width
        rows_per_block = max(8, ACTIVATION_BYTES_PER_BLOCK // bytes_per_row // 8 * 8)
        words = [place, stride, x.width, _is_output(x), len(group), rows_per_block]
        for projection in group:
            words += _projection_words(tape, projection)
        kernel = f"matmul.matmul_{layout.name.lower()}"
        cost = matmul_cost(kernel, [projection.weight for projection in group], x.rows)
        tape.add(kernel, *words, writes=None, cost=cost)
    for projection in op.projections:
        tape.forget_copies(projection.out)


def _projection_words(tape: CpuTape, projection: Projection) -> list[int]:
    packed, out, memory = projection.weight.packed, projection.out, tape.memory
    zeros = memory.zeros(out.width)
    residual = tape.place(projection.residual) if projection.residual is not None else (zeros, 0)
    bias = memory.constant(projection.bias)
    biases = (bias, 64) if bias else (zeros, 0)
    return [*_weight_words(packed), *tape.place(out), *residual, *biases, float_word(projection.scale), 0]


def _weight_words(packed: PackedWeight, expert: int = 0) -> tuple[int, int, int, int]:
    """One matrix of a stack: its address, the bytes of a tile, how many tiles, and rows."""
    place = address(packed.data) + expert * packed.expert_bytes
    return place, packed.tile_bytes, num_tiles(packed.num_rows), packed.num_rows


def _packed(tape: CpuTape, weight: LinearWeight, *, may_gather: bool = False) -> PackedWeight:
    packed: PackedWeight = packed_weight(weight, may_gather=may_gather)
    tape.memory.keep(packed)
    return packed


def _activations(tape: CpuTape, x: Buffer, packed: PackedWeight, slots: int) -> tuple[int, int, int]:
    """Where a product finds its activations: address, stride per row and per slot; quantizes them if needed."""
    columns = packed.num_columns
    if is_float(packed.layout):
        place, stride = tape.place(x)
        return place, stride, 4 * columns if slots > 1 else 0
    stride = kernel_abi.activation_row_bytes(columns)
    if tape.quantized_source != (x.rows, x.index, columns):
        needed = tape.max_rows[x.rows] * slots * stride
        tape.quantized_place = tape.memory.shared(f"activations of {x.rows.value} rows", needed)
        words = (tape.quantized_place, stride, columns, _is_output(x), slots, 4 * columns)
        tape.add("quantize.quantize_rows", *tape.place(x), *words, writes=None)
        tape.quantized_source = (x.rows, x.index, columns)
    return tape.quantized_place, stride * slots, stride if slots > 1 else 0


def _rope(tape: CpuTape, op: ops.Rope) -> None:
    x, pairs = op.x, op.table.inverse_frequencies.size
    angles = _rope_angles(tape, op.table)
    place, stride = tape.place(x)
    words = (address(angles), 8 * pairs, x.width // op.head_size, op.head_size, pairs)
    halves = int(op.table.pairing is ops.Pairing.HALVES)
    tape.add("elementwise.rope", place + 4 * op.offset, stride, *words, halves, writes=x)


def _rope_angles(tape: CpuTape, table: RopeTable) -> NDArray[np.uint8]:
    """The table's cosines and sines for every row, computed once per run."""
    frequencies = np.ascontiguousarray(table.inverse_frequencies, np.float64)
    key = (frequencies.tobytes(), table.magnitude)
    if key not in tape.angles:
        angles = aligned(tape.max_rows[Rows.BATCH] * 8 * frequencies.size)
        tape.angles[key] = angles
        tape.memory.keep(angles, frequencies)
        words = (address(angles), 8 * frequencies.size, address(frequencies), frequencies.size)
        tape.add("elementwise.rope_angles", *words, float_word(table.magnitude), writes=None)
    return tape.angles[key]


def _store_kv(tape: CpuTape, op: ops.StoreKV) -> None:
    kernel, words = attention.store_words(tape.kv_layout, op.layer, tape.place(op.keys), tape.place(op.values))
    tape.add(kernel.name, *words.tolist(), writes=None)


def _attention(tape: CpuTape, op: ops.Attention) -> None:
    layout, layer, shape = tape.kv_layout, op.layer, op.shape
    attention.check_limits(shape)
    places = {
        attention.QUERIES: _queries(tape, op),
        attention.OUT: tape.place(op.out),
        attention.SINKS: (tape.memory.constant(shape.sinks),),
        attention.SLOPES: (tape.memory.constant(shape.alibi_slopes),),
    }
    words = attention.attention_words(layout, layer, shape, places)
    tape.partial_bytes = max(tape.partial_bytes, attention.partial_bytes(layout, layer, shape))
    cost = attention_cost("attention.attention", layout, layer, shape)
    calls = attention.pieces(layout)
    tape.add("attention.attention", *words.tolist(), writes=op.out, cost=cost, calls=calls)
    if tape.attention_sums is not None:
        work = tape.memory.shared("page mass", tape.pool.num_threads * 64 * tape.attention_sums.shape[2])
        more = (address(tape.attention_sums), *tape.attention_sums.shape[1:], work)
        tape.add("attention_sums.attention_sums", *words.tolist(), *more, writes=None, calls=calls)


def _queries(tape: CpuTape, op: ops.Attention) -> tuple[int, int, int]:
    """Where attention finds its queries: address, stride per row and per head; quantizes them for such keys."""
    layout, shape = tape.kv_layout, op.shape
    if not is_quantized(layout.key_type):
        return *tape.place(op.queries), 4 * shape.key_size
    head_bytes = attention.query_head_bytes(layout.head(op.layer).key_columns)
    stride = shape.num_heads * head_bytes
    target = (tape.memory.shared("queries", tape.max_rows[Rows.BATCH] * stride), stride, head_bytes)
    words = attention.query_words(layout, op.layer, shape, tape.place(op.queries), target)
    tape.add("kv_store.quantize_queries", *words.tolist(), writes=None)
    return target


def _elementwise(tape: CpuTape, kernel: str, out: Buffer, a: Buffer, b: Buffer, scalar: float = 0.0) -> None:
    words = (*tape.place(out), *tape.place(a), *tape.place(b), float_word(scalar), out.width, _is_output(out))
    tape.add(f"elementwise.{kernel}", *words, writes=out)


def _multiply_sigmoid(tape: CpuTape, op: ops.MultiplySigmoid) -> None:
    out, x, gate = op.out, op.x, op.gate
    if op.is_by_row:
        words = (*tape.place(out), *tape.place(x), *tape.place(gate), 0, x.width, _is_output(x))
        tape.add("elementwise.multiply_sigmoid_by_row", *words, writes=out)
    else:
        _elementwise(tape, "multiply_sigmoid", out, x, gate)


def _scale_by_position(tape: CpuTape, op: ops.ScaleByPosition) -> None:
    words = (op.x.width, op.period, float_word(op.slope), op.offset)
    tape.add("elementwise.scale_by_position", *tape.place(op.x), *words, writes=op.x)


def _select_output(tape: CpuTape, op: ops.SelectOutput) -> None:
    tape.add("elementwise.select_output", *tape.place(op.out), *tape.place(op.x), op.x.width, writes=op.out)


def _copy_heads(tape: CpuTape, op: ops.CopyHeads) -> None:
    (target, out_stride), (source, stride) = tape.place(op.out), tape.place(op.x)
    places = (target + 4 * op.out_offset, out_stride, source + 4 * op.x_offset, stride)
    words = (op.num_heads, op.width, 4 * op.out_head_size, 4 * op.x_head_size, _is_output(op.x))
    tape.add("elementwise.copy_heads", *places, *words, writes=op.out)


def _head_matmul(tape: CpuTape, op: ops.HeadMatmul) -> None:
    out, x, weight, packed = op.out, op.x, op.weight, _packed(tape, op.weight)
    heads, columns, rows = packed.num_experts, packed.num_columns, packed.num_rows
    source, stride = tape.place(x)
    source, slot_stride = source + 4 * op.x_offset, 4 * op.x_head_size
    if not is_float(packed.layout):
        row = kernel_abi.activation_row_bytes(columns)
        memory = aligned(tape.max_rows[x.rows] * heads * row)
        tape.memory.keep(memory)
        words = (source, stride, address(memory), row, columns, _is_output(x), heads, slot_stride)
        tape.add("quantize.quantize_rows", *words, writes=None)
        source, stride, slot_stride = address(memory), heads * row, row
    target, out_stride = tape.place(out)
    zeros = tape.memory.zeros(rows)
    kernel = f"matmul.matmul_{packed.layout.name.lower()}"
    for head in range(heads):
        inputs = (source + head * slot_stride, stride, columns, _is_output(x), 1, tape.max_rows[x.rows])
        place = (target + 4 * (head * op.out_head_size + op.out_offset), out_stride)
        product = (*inputs, *_weight_words(packed, head), *place, zeros, 0, zeros, 0, float_word(1.0), 0)
        tape.add(kernel, *product, writes=out, cost=head_cost(kernel, weight, x.rows))


def _route(tape: CpuTape, op: ops.Route) -> None:
    routing, ids, logits = op.routing, op.expert_ids, op.logits
    count, selected = routing.num_experts, routing.num_selected
    gating = (_GATING_CODES[routing.gating], int(routing.normalise), float_word(routing.scale))
    bias = tape.memory.constant(routing.selection_bias)
    places = (*tape.place(ids), *tape.place(op.expert_weights), *tape.place(logits))
    groups = (routing.num_groups, routing.num_selected_groups, _is_output(logits))
    tape.add("experts.route", *places, count, selected, *gating, bias, *groups, writes=ids)
    table = np.zeros(count + 2 + tape.max_rows[logits.rows] * selected, np.int64)
    tape.expert_groups[ids.index] = table
    tape.memory.keep(table)
    words = (count, selected, address(table), _is_output(logits))
    tape.add("experts.group_by_expert", *tape.place(ids), *words, writes=op.expert_weights)


def _expert_matmul(tape: CpuTape, op: ops.ExpertMatmul) -> None:
    out, x, weight, ids, packed = op.out, op.x, op.weight, op.expert_ids, _packed(tape, op.weight)
    selected = ids.width
    check(ids.index in tape.expert_groups, f"{ids.name} was not routed")
    activations = _activations(tape, x, packed, selected if op.input_per_slot else 1)
    bias, bias_stride = 0, 4 * padded(packed.num_rows)
    if op.bias is not None:
        bias = tape.memory.constant(np.pad(op.bias, ((0, 0), (0, padded(packed.num_rows) - packed.num_rows))))
    place, *sizes = _weight_words(packed)
    words = (
        *(*activations, packed.num_columns, packed.num_experts, selected),
        *(address(tape.expert_groups[ids.index]), place, packed.expert_bytes, *sizes, *tape.place(out)),
        *(bias, bias_stride, tape.memory.zeros(packed.num_rows)),
    )
    kernel = f"matmul.expert_matmul_{packed.layout.name.lower()}"
    tape.add(kernel, *words, writes=out, cost=expert_cost(kernel, weight, selected, x.rows))


def _expert_sum(tape: CpuTape, op: ops.ExpertSum) -> None:
    residual = tape.place(op.residual) if op.residual is not None else (0, 0)
    places = (*tape.place(op.out), *tape.place(op.x), *tape.place(op.expert_weights), *residual)
    words = (op.expert_weights.width, op.out.width, _is_output(op.out))
    tape.add("experts.expert_sum", *places, *words, writes=op.out)


def _expert_scale(tape: CpuTape, op: ops.ExpertScale) -> None:
    x, selected = op.x, op.expert_weights.width
    columns = x.width // selected
    check(columns % 16 == 0, f"{x.name} holds slots of {columns}; whole vectors of 16 are needed")
    words = (*tape.place(x), *tape.place(op.expert_weights), selected, columns, _is_output(x))
    tape.add("experts.expert_scale", *words, writes=x)


def _receive(tape: CpuTape, op: ops.Receive) -> None:
    check(False, f"{op.out.name} cannot be received: the CPU computes a model from its first layer on")


def _is_output(buffer: Buffer) -> int:
    return int(buffer.rows is Rows.OUTPUT)


LOWER: dict[type, Callable[[CpuTape, Any], None]] = {
    ops.Embed: _embed,
    ops.EmbedPositions: _embed,
    ops.Receive: _receive,
    ops.RmsNorm: _norm,
    ops.LayerNorm: _norm,
    ops.Matmul: _matmul,
    ops.Rope: _rope,
    ops.StoreKV: _store_kv,
    ops.Attention: _attention,
    ops.Activate: lambda tape, op: _elementwise(tape, op.kind.value, op.out, op.x, op.x),
    ops.GatedActivate: lambda tape, op: _elementwise(tape, f"gated_{op.kind.value}", op.out, op.gate, op.up),
    ops.Add: lambda tape, op: _elementwise(tape, "add", op.out, op.a, op.b, op.scale),
    ops.MultiplySigmoid: _multiply_sigmoid,
    ops.Scale: lambda tape, op: _elementwise(tape, "scale", op.x, op.x, op.x, op.factor),
    ops.ScaleByPosition: _scale_by_position,
    ops.Softcap: lambda tape, op: _elementwise(tape, "softcap", op.x, op.x, op.x, op.cap),
    ops.CopyHeads: _copy_heads,
    ops.HeadMatmul: _head_matmul,
    ops.SelectOutput: _select_output,
    ops.Route: _route,
    ops.ExpertMatmul: _expert_matmul,
    ops.ExpertSum: _expert_sum,
    ops.ExpertScale: _expert_scale,
}
