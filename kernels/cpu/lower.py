"""The CPU's tape: ops become a function address and a parameter block each, checked here once and run without checks.

`CpuTape` implements `ops.Tape`; what it records is run by `program.py`. Every address a kernel will follow is proven
here: shapes, strides and types are those the op reads, and what it points to is kept alive by the program.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu import attention, experts, kernel_abi
from localinfer.kernels.cpu.arrays import address, aligned
from localinfer.kernels.cpu.attention import float_word
from localinfer.kernels.cpu.costs import attention_cost, embedding_cost, expert_cost, head_cost, matmul_cost
from localinfer.kernels.cpu.memory import TapeMemory, check
from localinfer.kernels.cpu.ordered_inputs import OrderedInputs
from localinfer.kernels.cpu.pool import ThreadPool
from localinfer.kernels.cpu.program import CpuProgram, TapeRecord
from localinfer.kernels.cpu.weights import PackedWeight, RowTable
from localinfer.kernels.jit.compile_ahead import ProgressCallback, compile_ahead
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout, is_quantized
from localinfer.kernels.layouts import GGUF_LAYOUTS, SIZES, is_float, num_tiles
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
from localinfer.kernels.program import Operation

ACTIVATION_BYTES_PER_BLOCK = 384 * 1024
"""Rows of a matmul are taken in blocks of about this many bytes of activations: they and a tile share a 1 MiB cache."""

MAX_BATCH_ROWS = 512
"""Rows of a batch, where nobody says."""


class CpuTape:
    """Records ops for a thread pool. `max_batch_rows` tokens per run, `max_output_rows` of them with logits.

    max_weighed_tokens: where it is not 0, every page's share of attention is measured, and no sequence may hold more
    positions than that.
    """

    def __init__(
        self,
        pool: ThreadPool,
        kv_layout: KVLayout,
        *,
        max_batch_rows: int = MAX_BATCH_ROWS,
        max_output_rows: int = 64,
        max_weighed_tokens: int = 0,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._pool = pool
        self._progress = progress
        self._kv_layout = kv_layout
        self._max_rows = {Rows.BATCH: max_batch_rows, Rows.OUTPUT: min(max_output_rows, max_batch_rows)}
        self._memory = TapeMemory(self._max_rows)
        self._ops: list[tuple[Kernel, NDArray[np.int64]]] = []
        self._operations: list[Operation] = []
        self._calls: list[tuple[NDArray[np.int64], int, Kernel]] = []
        self._partial_bytes = 0
        self._attention_sums: FloatArray | None = None
        if max_weighed_tokens:
            self._attention_sums = attention.attention_sum_arrays(kv_layout, max_batch_rows, max_weighed_tokens)
        self._angles: dict[tuple[bytes, float], NDArray[np.uint8]] = {}
        self._quantized_place = 0
        self._quantized_source: tuple[Rows, int, int] | None = None
        self._ordered = OrderedInputs(self._memory)
        self._expert_groups: dict[int, NDArray[np.int64]] = {}
        self._token_limit: int | None = None
        self._position_limit: int | None = None

    def buffer(self, name: str, width: int, rows: Rows = Rows.BATCH) -> Buffer:
        return self._memory.buffer(name, width, rows)

    def _place(self, buffer: Buffer) -> tuple[int, int]:
        return self._memory.place(buffer)

    def _add(
        self,
        kernel: str,
        *words: int,
        writes: Buffer | None,
        cost: Operation | None = None,
        calls: dict[int, Kernel] | None = None,
    ) -> None:
        """Record an op. calls: kernels that it calls itself, by the offset of the word that takes their address."""
        block = np.array(words, np.int64)
        self._ops.append((Kernel(kernel), block))
        self._calls.extend((block, offset, called) for offset, called in (calls or {}).items())
        self._operations.append(cost or Operation(kernel))
        if writes is not None:
            self._forget_copies(writes)

    def _forget_copies(self, written: Buffer) -> None:
        """Quantize and gather a buffer again after it changed."""
        if self._quantized_source is not None and self._quantized_source[1] == written.index:
            self._quantized_source = None
        self._ordered.forget(written)

    def embed(self, out: Buffer, table: EmbeddingTable, scale: float = 1.0) -> None:
        self._embed(out, table, scale, by_position=False)
        self._token_limit = min(table.num_rows, self._token_limit or table.num_rows)

    def embed_positions(self, out: Buffer, table: EmbeddingTable) -> None:
        self._embed(out, table, 1.0, by_position=True)
        self._position_limit = min(table.num_rows, self._position_limit or table.num_rows)

    def _embed(self, out: Buffer, table: EmbeddingTable, scale: float, *, by_position: bool) -> None:
        rows: RowTable = table.packed
        check(out.width == rows.num_columns, f"{out.name} is {out.width} wide, {table.name} {rows.num_columns}")
        check(out.rows is Rows.BATCH, f"{out.name} holds output rows; embeddings are of batch rows")
        check(rows.layout in GGUF_LAYOUTS, f"{table.name} is in {rows.layout.name}, which embeddings are not")
        sizes = SIZES[rows.layout]
        row_bytes = rows.num_columns // sizes.unit * sizes.file_bytes
        check(
            rows.data.size == table.num_rows * row_bytes and rows.num_columns % sizes.unit == 0,
            f"{table.name} holds {rows.data.size} bytes; {table.num_rows} rows need {table.num_rows * row_bytes}",
        )
        self._memory.keep_table(rows, by_position=by_position)
        words = (rows.data.ctypes.data, row_bytes, int(rows.layout), rows.num_columns, sizes.unit, sizes.file_bytes)
        cost = embedding_cost("embedding.embed", table)
        self._add(
            "embedding.embed", *self._place(out), *words, float_word(scale), int(by_position), writes=out, cost=cost
        )

    def rms_norm(self, out: Buffer, x: Buffer, weight: FloatArray | None, epsilon: float, group_size: int = 0) -> None:
        self._norm("elementwise.rms_norm", out, x, weight, None, epsilon, group_size)

    def layer_norm(
        self,
        out: Buffer,
        x: Buffer,
        weight: FloatArray | None,
        bias: FloatArray | None,
        epsilon: float,
        group_size: int = 0,
    ) -> None:
        self._norm("elementwise.layer_norm", out, x, weight, bias, epsilon, group_size)

    def _norm(
        self,
        kernel: str,
        out: Buffer,
        x: Buffer,
        weight: FloatArray | None,
        bias: FloatArray | None,
        epsilon: float,
        group_size: int,
    ) -> None:
        self._same_shape(out, x)
        size = group_size or x.width
        check(x.width % size == 0, f"{x.name} is {x.width} wide, not a multiple of groups of {size}")
        groups = x.width // size
        per_group = weight is not None and groups > 1 and weight.size == x.width
        addresses = [
            self._memory.constant(values, x.width if per_group else size, f"norm weight for {x.name}")
            for values in (weight, bias)
        ]
        stride = 4 * size if per_group else 0
        places = (*self._place(out), *self._place(x))
        words = (stride, groups, size, float_word(epsilon), int(x.rows is Rows.OUTPUT))
        self._add(kernel, *places, *addresses, *words, writes=out)

    def _same_shape(self, *buffers: Buffer) -> None:
        first = buffers[0]
        for other in buffers[1:]:
            check(
                (first.width, first.rows) == (other.width, other.rows),
                f"{other.name} is {other.rows.value} x {other.width}, {first.name} {first.rows.value} x {first.width}",
            )

    def _same_rows(self, *buffers: Buffer) -> None:
        names = ", ".join(buffer.name for buffer in buffers)
        check(len({buffer.rows for buffer in buffers}) == 1, f"{names} do not hold the same rows")

    def _activations(self, x: Buffer, packed: PackedWeight, slots: int) -> tuple[int, int, int]:
        """Where a product finds its activations: address, stride per row and per slot; quantizes them if needed."""
        columns = packed.num_columns
        if is_float(packed.layout):
            place, stride = self._place(x)
            return place, stride, 4 * columns if slots > 1 else 0
        stride = kernel_abi.activation_row_bytes(columns)
        needed = self._max_rows[x.rows] * slots * stride
        if self._quantized_source != (x.rows, x.index, columns):
            self._quantized_place = self._memory.shared(f"activations of {x.rows.value} rows", needed)
            words = (self._quantized_place, stride, columns, int(x.rows is Rows.OUTPUT), slots, 4 * columns)
            self._add("quantize.quantize_rows", *self._place(x), *words, writes=None)
            self._quantized_source = (x.rows, x.index, columns)
        return self._quantized_place, stride * slots, stride if slots > 1 else 0

    def matmul(self, x: Buffer, projections: Sequence[Projection]) -> None:
        """One op per layout and order of columns among the projections, all on the same quantized input."""
        by_layout: dict[tuple[Any, bytes], list[Projection]] = {}
        for projection in projections:
            packed: PackedWeight = projection.weight.packed
            weight, out = projection.weight, projection.out
            check(packed.num_experts == 1, f"{weight.name} is a stack of experts; use expert_matmul")
            check(packed.num_columns == x.width, f"{weight.name} has {packed.num_columns} columns, {x.name} {x.width}")
            check(packed.num_rows == out.width, f"{weight.name} has {packed.num_rows} rows, {out.name} {out.width}")
            check(x.rows is out.rows and x.index != out.index, f"{out.name} cannot take the product of {x.name}")
            if projection.residual is not None:
                self._same_shape(out, projection.residual)
            order = b"" if packed.columns is None else packed.columns.tobytes()
            by_layout.setdefault((packed.layout, order), []).append(projection)
        # Weights of one order follow each other, so that their input is gathered once.
        for layout, order in sorted(by_layout, key=lambda key: key[1]):
            group = by_layout[layout, order]
            first: PackedWeight = group[0].weight.packed
            place, stride, _ = self._activations(self._in_order(x, first.columns), first, 1)
            bytes_per_row = kernel_abi.activation_row_bytes(x.width) if not is_float(layout) else 4 * x.width
            rows_per_block = max(8, ACTIVATION_BYTES_PER_BLOCK // bytes_per_row // 8 * 8)
            words = [place, stride, x.width, int(x.rows is Rows.OUTPUT), len(group), rows_per_block]
            for projection in group:
                words += self._projection_words(projection)
            kernel = f"matmul.matmul_{layout.name.lower()}"
            cost = matmul_cost(kernel, [projection.weight for projection in group], x.rows)
            self._add(kernel, *words, writes=None, cost=cost)
        for projection in projections:
            self._forget_copies(projection.out)

    def _in_order(self, x: Buffer, columns: NDArray[np.int32] | None) -> Buffer:
        """x with its columns as a weight wants them."""
        if columns is None:
            return x
        out, words = self._ordered.find(x, columns)
        if words is not None:
            self._add("gather.gather_columns", *words, writes=out)
        return out

    def _projection_words(self, projection: Projection) -> list[int]:
        packed: PackedWeight = projection.weight.packed
        self._memory.keep(packed)
        out = projection.out
        zeros = self._memory.zeros(out.width)
        residual = self._place(projection.residual) if projection.residual is not None else (zeros, 0)
        bias = self._memory.constant(projection.bias, out.width, f"bias of {projection.weight.name}")
        weights = (address(packed.data), packed.tile_bytes, num_tiles(packed.num_rows), packed.num_rows)
        biases = (bias, 64) if bias else (zeros, 0)
        return [*weights, *self._place(out), *residual, *biases, float_word(projection.scale), 0]

    def rope(self, x: Buffer, table: RopeTable, head_size: int, offset: int = 0) -> None:
        pairs = table.inverse_frequencies.size
        check(x.rows is Rows.BATCH and x.width % head_size == 0, f"{x.name} does not hold heads of {head_size}")
        check(offset >= 0 and offset + 2 * pairs <= head_size, f"{2 * pairs} rotated columns exceed {head_size}")
        angles = self._rope_angles(table)
        place, stride = self._place(x)
        words = (address(angles), 8 * pairs, x.width // head_size, head_size, pairs)
        halves = int(table.pairing is Pairing.HALVES)
        self._add("elementwise.rope", place + 4 * offset, stride, *words, halves, writes=x)

    def _rope_angles(self, table: RopeTable) -> NDArray[np.uint8]:
        """The table's cosines and sines for every row, computed once per run."""
        frequencies = np.ascontiguousarray(table.inverse_frequencies, np.float64)
        key = (frequencies.tobytes(), table.magnitude)
        if key not in self._angles:
            angles = aligned(self._max_rows[Rows.BATCH] * 8 * frequencies.size)
            self._angles[key] = angles
            self._memory.keep(angles, frequencies)
            words = (address(angles), 8 * frequencies.size, address(frequencies), frequencies.size)
            self._add("elementwise.rope_angles", *words, float_word(table.magnitude), writes=None)
        return self._angles[key]

    def store_kv(self, layer: int, keys: Buffer, values: Buffer) -> None:
        attention.check_stored(self._kv_layout, layer, keys, values)
        kernel, words = attention.store_words(self._kv_layout, layer, self._place(keys), self._place(values))
        self._add(kernel.name, *words.tolist(), writes=None)

    def attention(self, out: Buffer, queries: Buffer, layer: int, shape: AttentionShape) -> None:
        layout = self._kv_layout
        attention.check_shape(layout, layer, shape)
        check(queries.width == shape.num_heads * shape.key_size, f"{queries.name} is {queries.width} wide")
        check(out.width == shape.num_heads * shape.value_size, f"{out.name} is {out.width} wide")
        check(queries.rows is Rows.BATCH and out.rows is Rows.BATCH, "attention is of batch rows")
        check(out.index != queries.index, f"{out.name} cannot take the attention of itself")
        places = {
            attention.QUERIES: self._queries(queries, layer, shape),
            attention.OUT: self._place(out),
            attention.SINKS: (self._memory.constant(shape.sinks, shape.num_heads, "attention sinks"),),
            attention.SLOPES: (self._memory.constant(shape.alibi_slopes, shape.num_heads, "ALiBi slopes"),),
        }
        words = attention.attention_words(layout, layer, shape, places)
        self._partial_bytes = max(self._partial_bytes, attention.partial_bytes(layout, layer, shape))
        cost = attention_cost("attention.attention", layout, layer, shape)
        calls = attention.pieces(layout)
        self._add("attention.attention", *words.tolist(), writes=out, cost=cost, calls=calls)
        if self._attention_sums is not None:
            work = self._memory.shared("page mass", self._pool.num_threads * 64 * self._attention_sums.shape[2])
            more = (address(self._attention_sums), *self._attention_sums.shape[1:], work)
            self._add("attention_sums.attention_sums", *words.tolist(), *more, writes=None, calls=calls)

    def _queries(self, queries: Buffer, layer: int, shape: AttentionShape) -> tuple[int, int, int]:
        """Where attention finds its queries: address, stride per row and per head; quantizes them for such keys."""
        if not is_quantized(self._kv_layout.key_type):
            return *self._place(queries), 4 * shape.key_size
        head_bytes = attention.query_head_bytes(self._kv_layout.head(layer).key_columns)
        stride = shape.num_heads * head_bytes
        target = (self._memory.shared("queries", self._max_rows[Rows.BATCH] * stride), stride, head_bytes)
        words = attention.query_words(self._kv_layout, layer, shape, self._place(queries), target)
        self._add("kv_store.quantize_queries", *words.tolist(), writes=None)
        return target

    def activation(self, out: Buffer, x: Buffer, kind: Activation) -> None:
        check(kind is not Activation.SWIGLU_CLAMPED, f"{kind.value} exists only gated")
        self._elementwise(f"elementwise.{kind.value}", out, x, x)

    def gated_activation(self, out: Buffer, gate: Buffer, up: Buffer, kind: Activation) -> None:
        self._elementwise(f"elementwise.gated_{kind.value}", out, gate, up)

    def add(self, out: Buffer, a: Buffer, b: Buffer, scale: float = 1.0) -> None:
        self._elementwise("elementwise.add", out, a, b, scale)

    def multiply_sigmoid(self, out: Buffer, x: Buffer, gate: Buffer) -> None:
        if gate.width == 1 and x.width != 1:
            self._same_shape(out, x)
            check(gate.rows is x.rows, f"{gate.name} and {x.name} hold different rows")
            words = (*self._place(out), *self._place(x), *self._place(gate), 0, x.width, int(x.rows is Rows.OUTPUT))
            self._add("elementwise.multiply_sigmoid_by_row", *words, writes=out)
        else:
            self._elementwise("elementwise.multiply_sigmoid", out, x, gate)

    def scale(self, x: Buffer, factor: float) -> None:
        self._elementwise("elementwise.scale", x, x, x, factor)

    def scale_by_position(self, x: Buffer, period: int, slope: float, offset: int = 0) -> None:
        check(x.rows is Rows.BATCH and period > 0, f"{x.name} cannot be scaled by position over {period}")
        words = (x.width, period, float_word(slope), offset)
        self._add("elementwise.scale_by_position", *self._place(x), *words, writes=x)

    def softcap(self, x: Buffer, cap: float) -> None:
        self._elementwise("elementwise.softcap", x, x, x, cap)

    def _elementwise(self, kernel: str, out: Buffer, a: Buffer, b: Buffer, scalar: float = 0.0) -> None:
        self._same_shape(out, a, b)
        places = (*self._place(out), *self._place(a), *self._place(b))
        self._add(kernel, *places, float_word(scalar), out.width, int(out.rows is Rows.OUTPUT), writes=out)

    def select_output(self, out: Buffer, x: Buffer) -> None:
        check(out.width == x.width and out.rows is Rows.OUTPUT and x.rows is Rows.BATCH, f"{out.name} from {x.name}")
        self._add("elementwise.select_output", *self._place(out), *self._place(x), x.width, writes=out)

    def route(self, expert_ids: Buffer, expert_weights: Buffer, logits: Buffer, routing: Routing) -> None:
        experts.check_routing(routing)
        count, selected = routing.num_experts, routing.num_selected
        check(logits.width == count and expert_ids.width == expert_weights.width == selected, "router buffers differ")
        self._same_rows(expert_ids, expert_weights, logits)
        bias = self._memory.constant(routing.selection_bias, count, "expert selection bias")
        places = (*self._place(expert_ids), *self._place(expert_weights), *self._place(logits))
        gating = experts.gating_words(routing, bias)
        groups = (routing.num_groups, routing.num_selected_groups, int(logits.rows is Rows.OUTPUT))
        self._add("experts.route", *places, count, selected, *gating, *groups, writes=expert_ids)
        table = np.zeros(count + 2 + self._max_rows[logits.rows] * selected, np.int64)
        self._expert_groups[expert_ids.index] = table
        self._memory.keep(table)
        words = (count, selected, address(table), int(logits.rows is Rows.OUTPUT))
        self._add("experts.group_by_expert", *self._place(expert_ids), *words, writes=expert_weights)

    def expert_matmul(
        self,
        out: Buffer,
        x: Buffer,
        weight: LinearWeight,
        expert_ids: Buffer,
        bias: FloatArray | None = None,
        input_per_slot: bool = False,
    ) -> None:
        packed: PackedWeight = weight.packed
        selected = expert_ids.width
        slots = selected if input_per_slot else 1
        check(packed.columns is None, f"{weight.name} has its columns in another order; only matmul gathers")
        check(expert_ids.index in self._expert_groups, f"{expert_ids.name} was not routed")
        check(x.width == slots * packed.num_columns, f"{x.name} is {x.width} wide for {slots} x {packed.num_columns}")
        check(out.width == selected * packed.num_rows, f"{out.name} is {out.width} wide for {weight.name}")
        self._same_rows(out, x, expert_ids)
        check(out.index != x.index, f"{out.name} cannot take the product of itself")
        place, stride, slot_stride = self._activations(x, packed, slots)
        self._memory.keep(packed)
        bias_place = 0
        if bias is not None:
            rows = experts.padded_biases(bias, packed, weight.name)
            bias_place = self._memory.constant(rows, rows.size, f"bias of {weight.name}")
        words = (
            *(place, stride, slot_stride, packed.num_columns, packed.num_experts, selected),
            *(address(self._expert_groups[expert_ids.index]), address(packed.data), packed.expert_bytes),
            *(packed.tile_bytes, num_tiles(packed.num_rows), packed.num_rows, *self._place(out)),
            *(bias_place, experts.bias_stride(packed), self._memory.zeros(packed.num_rows)),
        )
        kernel = f"matmul.expert_matmul_{packed.layout.name.lower()}"
        self._add(kernel, *words, writes=out, cost=expert_cost(kernel, weight, selected, x.rows))

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
        packed: PackedWeight = weight.packed
        check(packed.columns is None, f"{weight.name} has its columns in another order; only matmul gathers")
        heads, columns, rows = packed.num_experts, packed.num_columns, packed.num_rows
        self._same_rows(out, x)
        check(out.width == heads * out_head_size and out_offset + rows <= out_head_size, f"{out.name}: {weight.name}")
        check(x.width == heads * x_head_size and x_offset + columns <= x_head_size, f"{x.name}: {weight.name}")
        check(out.index != x.index, f"{out.name} cannot take the product of itself")
        self._memory.keep(packed)
        is_output = int(x.rows is Rows.OUTPUT)
        source, stride = self._place(x)
        source, slot_stride = source + 4 * x_offset, 4 * x_head_size
        if not is_float(packed.layout):
            row = kernel_abi.activation_row_bytes(columns)
            memory = aligned(self._max_rows[x.rows] * heads * row)
            self._memory.keep(memory)
            words = (source, stride, address(memory), row, columns, is_output, heads, slot_stride)
            self._add("quantize.quantize_rows", *words, writes=None)
            source, stride, slot_stride = address(memory), heads * row, row
        target, out_stride = self._place(out)
        zeros = self._memory.zeros(rows)
        for head in range(heads):
            inputs = (source + head * slot_stride, stride, columns, is_output, 1, self._max_rows[x.rows])
            weights = (address(packed.data) + head * packed.expert_bytes, packed.tile_bytes, num_tiles(rows), rows)
            place = (target + 4 * (head * out_head_size + out_offset), out_stride)
            kernel = f"matmul.matmul_{packed.layout.name.lower()}"
            residual = (zeros, 0, zeros, 0, float_word(1.0), 0)
            cost = head_cost(kernel, weight, x.rows)
            self._add(kernel, *inputs, *weights, *place, *residual, writes=out, cost=cost)

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
        self._same_rows(out, x)
        check(out.width == num_heads * out_head_size and out_offset + width <= out_head_size, f"heads of {out.name}")
        check(x.width == num_heads * x_head_size and x_offset + width <= x_head_size, f"heads of {x.name}")
        (target, out_stride), (source, stride) = self._place(out), self._place(x)
        places = (target + 4 * out_offset, out_stride, source + 4 * x_offset, stride)
        words = (num_heads, width, 4 * out_head_size, 4 * x_head_size, int(x.rows is Rows.OUTPUT))
        self._add("elementwise.copy_heads", *places, *words, writes=out)

    def expert_sum(self, out: Buffer, x: Buffer, expert_weights: Buffer, residual: Buffer | None = None) -> None:
        selected = expert_weights.width
        check(x.width == selected * out.width, f"{x.name} is {x.width} wide for {selected} slots of {out.width}")
        self._same_rows(out, x, expert_weights)
        if residual is not None:
            self._same_shape(out, residual)
        place = self._place(residual) if residual is not None else (0, 0)
        places = (*self._place(out), *self._place(x), *self._place(expert_weights), *place)
        self._add("experts.expert_sum", *places, selected, out.width, int(out.rows is Rows.OUTPUT), writes=out)

    def expert_scale(self, x: Buffer, expert_weights: Buffer) -> None:
        selected = expert_weights.width
        columns = x.width // selected
        check(x.width % (16 * selected) == 0, f"{x.name} holds slots of {columns}; whole vectors of 16 are needed")
        self._same_rows(x, expert_weights)
        words = (*self._place(x), *self._place(expert_weights), selected, columns, int(x.rows is Rows.OUTPUT))
        self._add("experts.expert_scale", *words, writes=x)

    def finish(self, logits: Buffer) -> CpuProgram:
        check(logits.rows is Rows.OUTPUT, f"{logits.name} holds batch rows; logits are of output rows")
        kernels = tuple(kernel for kernel, _ in self._ops)
        compile_ahead((*kernels, *(called for _, _, called in self._calls)), self._progress)
        for block, offset, called in self._calls:
            block[offset // 8] = called.address
        record = TapeRecord(
            pool=self._pool,
            kv_layout=self._kv_layout,
            max_batch_rows=self._max_rows[Rows.BATCH],
            max_output_rows=self._max_rows[Rows.OUTPUT],
            kernels=kernels,
            parameters=tuple(words for _, words in self._ops),
            operations=tuple(self._operations),
            memory=self._memory,
            logits=self._memory.rows(logits),
            partial_bytes=self._partial_bytes,
            num_tokens=self._token_limit,
            num_positions=self._position_limit,
            attention_sums=self._attention_sums,
        )
        return CpuProgram(record)
