"""The CPU's tape: ops become a function address and a parameter block each, checked here once and run without checks.

`CpuTape` implements `ops.Tape`; `CpuProgram` implements `ops.Program`. Every address a kernel will follow is proven
here: shapes, strides and types are those the op reads, and what it points to is kept alive by the program.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.errors import ContextLengthError, RequestError, ShapeError
from localinfer.kernels.cpu import protocol
from localinfer.kernels.cpu.arrays import address, aligned, aligned_zeros
from localinfer.kernels.cpu.costs import attention_cost, embedding_cost, expert_cost, head_cost, matmul_cost
from localinfer.kernels.cpu.layouts import SIZES, is_float, num_tiles
from localinfer.kernels.cpu.packing import PackedWeight, RowTable
from localinfer.kernels.cpu.pool import ThreadPool
from localinfer.kernels.kv_layout import KVLayout
from localinfer.kernels.object_cache import Kernel
from localinfer.kernels.ops import (
    Activation,
    AttentionShape,
    Batch,
    Buffer,
    EmbeddingTable,
    FloatArray,
    Gating,
    LinearWeight,
    Operation,
    Pairing,
    Projection,
    RopeTable,
    Routing,
    Rows,
)

ACTIVATION_BYTES_PER_BLOCK = 384 * 1024
"""Rows of a matmul are taken in blocks of about this many bytes of activations: they and a tile share a 1 MiB cache."""

ProgressCallback = Callable[[str, int, int], None]
"""Called with a stage's name, the units done and the units in all."""

_GATING_CODES = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SOFTMAX_SELECTED: 2}


def _bits(value: float) -> int:
    """A float32 as the integer a parameter word holds."""
    return int(np.float32(value).view(np.uint32))


def _padded(width: int) -> int:
    return (width + 15) // 16 * 16


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise ShapeError(message)


class CpuTape:
    """Records ops for a thread pool. `max_batch_rows` tokens per run, `max_output_rows` of them with logits."""

    def __init__(
        self,
        pool: ThreadPool,
        kv_layout: KVLayout,
        *,
        max_batch_rows: int = 512,
        max_output_rows: int = 64,
        progress: ProgressCallback | None = None,
    ) -> None:
        self._pool = pool
        self._progress = progress
        self._kv_layout = kv_layout
        self._max_rows = {Rows.BATCH: max_batch_rows, Rows.OUTPUT: min(max_output_rows, max_batch_rows)}
        self._memory: list[NDArray[np.uint8]] = []
        self._keep: list[Any] = []
        self._ops: list[tuple[Kernel, NDArray[np.int64]]] = []
        self._operations: list[Operation] = []
        self._zeros: NDArray[np.float32] = np.zeros(16, np.float32)
        self._angles: dict[tuple[bytes, float], NDArray[np.uint8]] = {}
        self._quantized: dict[Rows, NDArray[np.uint8]] = {}
        self._quantized_source: tuple[Rows, int, int] | None = None
        self._expert_groups: dict[int, NDArray[np.int64]] = {}
        self._token_limit: int | None = None
        self._position_limit: int | None = None

    # Memory

    def buffer(self, name: str, width: int, rows: Rows = Rows.BATCH) -> Buffer:
        """Reserve rows x width float32, each row padded to whole vectors."""
        _check(width > 0, f"buffer {name} is {width} wide; a buffer has at least one column")
        self._memory.append(aligned_zeros(self._max_rows[rows] * _padded(width) * 4))
        return Buffer(len(self._memory) - 1, name, width, rows)

    def _place(self, buffer: Buffer) -> tuple[int, int]:
        """Address and row stride of a buffer."""
        return address(self._memory[buffer.index]), 4 * _padded(buffer.width)

    def _constant(self, values: FloatArray | None, width: int, name: str) -> int:
        """Address of a padded copy of float32 values; 0 for None."""
        if values is None:
            return 0
        _check(values.size == width, f"{name} has {values.size} values; {width} are needed")
        padded = aligned_zeros(4 * _padded(width)).view(np.float32)
        padded[:width] = values.reshape(-1)
        self._keep.append(padded)
        return address(padded)

    def _zero_row(self, width: int) -> int:
        """Address of at least `width` zeros."""
        if self._zeros.size < _padded(width):
            self._zeros = aligned_zeros(4 * _padded(width)).view(np.float32)
            self._keep.append(self._zeros)
        self._keep.append(self._zeros)
        return address(self._zeros)

    def _add(self, kernel: str, *words: int, writes: Buffer | None, cost: Operation | None = None) -> None:
        self._ops.append((Kernel(kernel), np.array(words, np.int64)))
        self._operations.append(cost or Operation(kernel))
        if writes is not None and self._quantized_source is not None and self._quantized_source[1] == writes.index:
            self._quantized_source = None

    # Ops

    def embed(self, out: Buffer, table: EmbeddingTable, scale: float = 1.0) -> None:
        self._embed(out, table, scale, by_position=False)
        self._token_limit = min(table.num_rows, self._token_limit or table.num_rows)

    def embed_positions(self, out: Buffer, table: EmbeddingTable) -> None:
        self._embed(out, table, 1.0, by_position=True)
        self._position_limit = min(table.num_rows, self._position_limit or table.num_rows)

    def _embed(self, out: Buffer, table: EmbeddingTable, scale: float, *, by_position: bool) -> None:
        rows: RowTable = table.packed
        _check(out.width == rows.num_columns, f"{out.name} is {out.width} wide, {table.name} {rows.num_columns}")
        _check(out.rows is Rows.BATCH, f"{out.name} holds output rows; embeddings are of batch rows")
        sizes = SIZES[rows.layout]
        row_bytes = rows.num_columns // sizes.unit * sizes.file_bytes
        _check(
            rows.data.size == table.num_rows * row_bytes and rows.num_columns % sizes.unit == 0,
            f"{table.name} holds {rows.data.size} bytes; {table.num_rows} rows need {table.num_rows * row_bytes}",
        )
        self._keep.append(rows)
        words = (rows.data.ctypes.data, row_bytes, int(rows.layout), rows.num_columns, sizes.unit, sizes.file_bytes)
        cost = embedding_cost("embedding.embed", table)
        self._add("embedding.embed", *self._place(out), *words, _bits(scale), int(by_position), writes=out, cost=cost)

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
        _check(x.width % size == 0, f"{x.name} is {x.width} wide, not a multiple of groups of {size}")
        groups = x.width // size
        per_group = weight is not None and groups > 1 and weight.size == x.width
        addresses = [
            self._constant(values, x.width if per_group else size, f"norm weight for {x.name}")
            for values in (weight, bias)
        ]
        stride = 4 * size if per_group else 0
        places = (*self._place(out), *self._place(x))
        words = (stride, groups, size, _bits(epsilon), int(x.rows is Rows.OUTPUT))
        self._add(kernel, *places, *addresses, *words, writes=out)

    def _same_shape(self, *buffers: Buffer) -> None:
        first = buffers[0]
        for other in buffers[1:]:
            _check(
                (first.width, first.rows) == (other.width, other.rows),
                f"{other.name} is {other.rows.value} x {other.width}, {first.name} {first.rows.value} x {first.width}",
            )

    def _same_rows(self, *buffers: Buffer) -> None:
        names = ", ".join(buffer.name for buffer in buffers)
        _check(len({buffer.rows for buffer in buffers}) == 1, f"{names} do not hold the same rows")

    def _activations(self, x: Buffer, packed: PackedWeight, slots: int) -> tuple[int, int, int]:
        """Where a product finds its activations: address, stride per row and per slot; quantizes them if needed."""
        columns = packed.num_columns
        if is_float(packed.layout):
            place, stride = self._place(x)
            return place, stride, 4 * columns if slots > 1 else 0
        stride = protocol.activation_row_bytes(columns)
        needed = self._max_rows[x.rows] * slots * stride
        if self._quantized_source != (x.rows, x.index, columns):
            memory = self._quantized.get(x.rows)
            if memory is None or memory.size < needed:
                memory = aligned(needed)
                self._quantized[x.rows] = memory
                self._keep.append(memory)
            words = (address(memory), stride, columns, int(x.rows is Rows.OUTPUT), slots, 4 * columns)
            self._add("quantize.quantize_rows", *self._place(x), *words, writes=None)
            self._quantized_source = (x.rows, x.index, columns)
        place = address(self._quantized[x.rows])
        return place, stride * slots, stride if slots > 1 else 0

    def matmul(self, x: Buffer, projections: Sequence[Projection]) -> None:
        """One op per layout among the projections, all on the same quantized input."""
        by_layout: dict[Any, list[Projection]] = {}
        for projection in projections:
            packed: PackedWeight = projection.weight.packed
            weight, out = projection.weight, projection.out
            _check(packed.num_experts == 1, f"{weight.name} is a stack of experts; use expert_matmul")
            _check(packed.num_columns == x.width, f"{weight.name} has {packed.num_columns} columns, {x.name} {x.width}")
            _check(packed.num_rows == out.width, f"{weight.name} has {packed.num_rows} rows, {out.name} {out.width}")
            _check(x.rows is out.rows and x.index != out.index, f"{out.name} cannot take the product of {x.name}")
            if projection.residual is not None:
                self._same_shape(out, projection.residual)
            by_layout.setdefault(packed.layout, []).append(projection)
        for layout, group in by_layout.items():
            place, stride, _ = self._activations(x, group[0].weight.packed, 1)
            bytes_per_row = protocol.activation_row_bytes(x.width) if not is_float(layout) else 4 * x.width
            rows_per_block = max(8, ACTIVATION_BYTES_PER_BLOCK // bytes_per_row // 8 * 8)
            words = [place, stride, x.width, int(x.rows is Rows.OUTPUT), len(group), rows_per_block]
            for projection in group:
                words += self._projection_words(projection)
            kernel = f"matmul.matmul_{layout.name.lower()}"
            cost = matmul_cost(kernel, [projection.weight for projection in group], x.rows)
            self._add(kernel, *words, writes=None, cost=cost)
        for projection in projections:
            if self._quantized_source is not None and self._quantized_source[1] == projection.out.index:
                self._quantized_source = None

    def _projection_words(self, projection: Projection) -> list[int]:
        packed: PackedWeight = projection.weight.packed
        self._keep.append(packed)
        out = projection.out
        zeros = self._zero_row(out.width)
        residual = self._place(projection.residual) if projection.residual is not None else (zeros, 0)
        bias = self._constant(projection.bias, out.width, f"bias of {projection.weight.name}")
        weights = (address(packed.data), packed.tile_bytes, num_tiles(packed.num_rows), packed.num_rows)
        biases = (bias, 64) if bias else (zeros, 0)
        return [*weights, *self._place(out), *residual, *biases, _bits(projection.scale), 0]

    def rope(self, x: Buffer, table: RopeTable, head_size: int, offset: int = 0) -> None:
        pairs = table.inverse_frequencies.size
        _check(x.rows is Rows.BATCH and x.width % head_size == 0, f"{x.name} does not hold heads of {head_size}")
        _check(offset >= 0 and offset + 2 * pairs <= head_size, f"{2 * pairs} rotated columns exceed {head_size}")
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
            self._keep += [angles, frequencies]
            words = (address(angles), 8 * frequencies.size, address(frequencies), frequencies.size)
            self._add("elementwise.rope_angles", *words, _bits(table.magnitude), writes=None)
        return self._angles[key]

    def store_kv(self, layer: int, keys: Buffer, values: Buffer) -> None:
        shape, layout = self._kv_layout.layers[layer], self._kv_layout
        _check(keys.width == shape.num_kv_heads * shape.key_size, f"{keys.name} does not hold layer {layer}'s keys")
        _check(
            values.width == shape.num_kv_heads * shape.value_size, f"{values.name} does not hold layer {layer}'s values"
        )
        _check(keys.rows is Rows.BATCH and values.rows is Rows.BATCH, "only batch rows enter the cache")
        sizes = (shape.num_kv_heads, shape.key_size, shape.value_size, layout.value_stride(layer))
        offsets = (layout.layer_offset(layer), layout.head_bytes(layer), layout.element_bytes)
        self._add("attention.store_kv", *self._place(keys), *self._place(values), *sizes, *offsets, writes=None)

    def attention(self, out: Buffer, queries: Buffer, layer: int, shape: AttentionShape) -> None:
        cached, layout = self._kv_layout.layers[layer], self._kv_layout
        _check(
            (cached.num_kv_heads, cached.key_size, cached.value_size)
            == (shape.num_kv_heads, shape.key_size, shape.value_size),
            f"layer {layer} caches {cached}, attention wants {shape}",
        )
        _check(shape.num_heads % shape.num_kv_heads == 0, f"{shape.num_heads} heads over {shape.num_kv_heads}")
        _check(queries.width == shape.num_heads * shape.key_size, f"{queries.name} is {queries.width} wide")
        _check(out.width == shape.num_heads * shape.value_size, f"{out.name} is {out.width} wide")
        _check(queries.rows is Rows.BATCH and out.rows is Rows.BATCH, "attention is of batch rows")
        _check(shape.value_size <= protocol.MAX_VALUE_SIZE, f"values of {shape.value_size} exceed the scratch memory")
        group = shape.num_heads // shape.num_kv_heads
        _check(group <= protocol.MAX_QUERIES_PER_UNIT, f"{group} heads share one KV head")
        rows_per_unit = max(1, min(protocol.ROWS_PER_UNIT, protocol.MAX_QUERIES_PER_UNIT // group))
        sinks = self._constant(shape.sinks, shape.num_heads, "attention sinks")
        slopes = self._constant(shape.alibi_slopes, shape.num_heads, "ALiBi slopes")
        words = (
            *(group, shape.num_kv_heads, shape.key_size, shape.value_size, layout.value_stride(layer)),
            *(layout.layer_offset(layer), layout.head_bytes(layer), _bits(shape.scale), _bits(shape.softcap)),
            *(shape.window, shape.chunk, sinks, slopes, layout.element_bytes, rows_per_unit),
        )
        kernel = f"attention.attention_{layout.kv_type}"
        cost = attention_cost(kernel, layout, layer, shape)
        self._add(kernel, *self._place(queries), *self._place(out), *words, writes=out, cost=cost)

    def activation(self, out: Buffer, x: Buffer, kind: Activation) -> None:
        _check(kind is not Activation.SWIGLU_CLAMPED, f"{kind.value} exists only gated")
        self._elementwise(f"elementwise.{kind.value}", out, x, x)

    def gated_activation(self, out: Buffer, gate: Buffer, up: Buffer, kind: Activation) -> None:
        self._elementwise(f"elementwise.gated_{kind.value}", out, gate, up)

    def add(self, out: Buffer, a: Buffer, b: Buffer, scale: float = 1.0) -> None:
        self._elementwise("elementwise.add", out, a, b, scale)

    def multiply_sigmoid(self, out: Buffer, x: Buffer, gate: Buffer) -> None:
        if gate.width == 1 and x.width != 1:
            self._same_shape(out, x)
            _check(gate.rows is x.rows, f"{gate.name} and {x.name} hold different rows")
            words = (*self._place(out), *self._place(x), *self._place(gate), 0, x.width, int(x.rows is Rows.OUTPUT))
            self._add("elementwise.multiply_sigmoid_by_row", *words, writes=out)
        else:
            self._elementwise("elementwise.multiply_sigmoid", out, x, gate)

    def scale(self, x: Buffer, factor: float) -> None:
        self._elementwise("elementwise.scale", x, x, x, factor)

    def scale_by_position(self, x: Buffer, period: int, slope: float, offset: int = 0) -> None:
        _check(x.rows is Rows.BATCH and period > 0, f"{x.name} cannot be scaled by position over {period}")
        words = (x.width, period, _bits(slope), offset)
        self._add("elementwise.scale_by_position", *self._place(x), *words, writes=x)

    def softcap(self, x: Buffer, cap: float) -> None:
        self._elementwise("elementwise.softcap", x, x, x, cap)

    def _elementwise(self, kernel: str, out: Buffer, a: Buffer, b: Buffer, scalar: float = 0.0) -> None:
        self._same_shape(out, a, b)
        places = (*self._place(out), *self._place(a), *self._place(b))
        self._add(kernel, *places, _bits(scalar), out.width, int(out.rows is Rows.OUTPUT), writes=out)

    def select_output(self, out: Buffer, x: Buffer) -> None:
        _check(out.width == x.width and out.rows is Rows.OUTPUT and x.rows is Rows.BATCH, f"{out.name} from {x.name}")
        self._add("elementwise.select_output", *self._place(out), *self._place(x), x.width, writes=out)

    def route(self, expert_ids: Buffer, expert_weights: Buffer, logits: Buffer, routing: Routing) -> None:
        count, selected = routing.num_experts, routing.num_selected
        _check(0 < selected <= count <= protocol.MAX_EXPERTS, f"{selected} of {count} experts cannot be chosen")
        _check(logits.width == count and expert_ids.width == expert_weights.width == selected, "router buffers differ")
        self._same_rows(expert_ids, expert_weights, logits)
        _check(count % routing.num_groups == 0, f"{count} experts do not split into {routing.num_groups} groups")
        bias = self._constant(routing.selection_bias, count, "expert selection bias")
        places = (*self._place(expert_ids), *self._place(expert_weights), *self._place(logits))
        gating = (_GATING_CODES[routing.gating], int(routing.normalise), _bits(routing.scale), bias)
        groups = (routing.num_groups, routing.num_selected_groups, int(logits.rows is Rows.OUTPUT))
        self._add("experts.route", *places, count, selected, *gating, *groups, writes=expert_ids)
        table = np.zeros(count + 2 + self._max_rows[logits.rows] * selected, np.int64)
        self._expert_groups[expert_ids.index] = table
        self._keep.append(table)
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
        _check(expert_ids.index in self._expert_groups, f"{expert_ids.name} was not routed")
        _check(x.width == slots * packed.num_columns, f"{x.name} is {x.width} wide for {slots} x {packed.num_columns}")
        _check(out.width == selected * packed.num_rows, f"{out.name} is {out.width} wide for {weight.name}")
        self._same_rows(out, x, expert_ids)
        place, stride, slot_stride = self._activations(x, packed, slots)
        self._keep.append(packed)
        bias_place, bias_stride = 0, 4 * _padded(packed.num_rows)
        if bias is not None:
            _check(bias.shape == (packed.num_experts, packed.num_rows), f"bias of {weight.name} is {bias.shape}")
            padded = np.zeros((packed.num_experts, _padded(packed.num_rows)), np.float32)
            padded[:, : packed.num_rows] = bias
            bias_place = self._constant(padded, padded.size, f"bias of {weight.name}")
        words = (
            *(place, stride, slot_stride, packed.num_columns, packed.num_experts, selected),
            *(address(self._expert_groups[expert_ids.index]), address(packed.data), packed.expert_bytes),
            *(packed.tile_bytes, num_tiles(packed.num_rows), packed.num_rows, *self._place(out)),
            *(bias_place, bias_stride, self._zero_row(packed.num_rows)),
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
        heads, columns, rows = packed.num_experts, packed.num_columns, packed.num_rows
        self._same_rows(out, x)
        _check(out.width == heads * out_head_size and out_offset + rows <= out_head_size, f"{out.name}: {weight.name}")
        _check(x.width == heads * x_head_size and x_offset + columns <= x_head_size, f"{x.name}: {weight.name}")
        _check(out.index != x.index, f"{out.name} cannot take the product of itself")
        self._keep.append(packed)
        is_output = int(x.rows is Rows.OUTPUT)
        source, stride = self._place(x)
        source, slot_stride = source + 4 * x_offset, 4 * x_head_size
        if not is_float(packed.layout):
            row = protocol.activation_row_bytes(columns)
            memory = aligned(self._max_rows[x.rows] * heads * row)
            self._keep.append(memory)
            words = (source, stride, address(memory), row, columns, is_output, heads, slot_stride)
            self._add("quantize.quantize_rows", *words, writes=None)
            source, stride, slot_stride = address(memory), heads * row, row
        target, out_stride = self._place(out)
        zeros = self._zero_row(rows)
        for head in range(heads):
            inputs = (source + head * slot_stride, stride, columns, is_output, 1, self._max_rows[x.rows])
            weights = (address(packed.data) + head * packed.expert_bytes, packed.tile_bytes, num_tiles(rows), rows)
            place = (target + 4 * (head * out_head_size + out_offset), out_stride)
            kernel = f"matmul.matmul_{packed.layout.name.lower()}"
            residual = (zeros, 0, zeros, 0, _bits(1.0), 0)
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
        _check(out.width == num_heads * out_head_size and out_offset + width <= out_head_size, f"heads of {out.name}")
        _check(x.width == num_heads * x_head_size and x_offset + width <= x_head_size, f"heads of {x.name}")
        (target, out_stride), (source, stride) = self._place(out), self._place(x)
        places = (target + 4 * out_offset, out_stride, source + 4 * x_offset, stride)
        words = (num_heads, width, 4 * out_head_size, 4 * x_head_size, int(x.rows is Rows.OUTPUT))
        self._add("elementwise.copy_heads", *places, *words, writes=out)

    def expert_sum(self, out: Buffer, x: Buffer, expert_weights: Buffer, residual: Buffer | None = None) -> None:
        selected = expert_weights.width
        _check(x.width == selected * out.width, f"{x.name} is {x.width} wide for {selected} slots of {out.width}")
        self._same_rows(out, x, expert_weights)
        if residual is not None:
            self._same_shape(out, residual)
        place = self._place(residual) if residual is not None else (0, 0)
        places = (*self._place(out), *self._place(x), *self._place(expert_weights), *place)
        self._add("experts.expert_sum", *places, selected, out.width, int(out.rows is Rows.OUTPUT), writes=out)

    def expert_scale(self, x: Buffer, expert_weights: Buffer) -> None:
        selected = expert_weights.width
        columns = x.width // selected
        _check(x.width % (16 * selected) == 0, f"{x.name} holds slots of {columns}; whole vectors of 16 are needed")
        self._same_rows(x, expert_weights)
        words = (*self._place(x), *self._place(expert_weights), selected, columns, int(x.rows is Rows.OUTPUT))
        self._add("experts.expert_scale", *words, writes=x)

    def finish(self, logits: Buffer) -> "CpuProgram":
        _check(logits.rows is Rows.OUTPUT, f"{logits.name} holds batch rows; logits are of output rows")
        kernels = list(dict.fromkeys(kernel for kernel, _ in self._ops))
        for done, kernel in enumerate(kernels):
            if self._progress is not None:
                stage = "loading kernels" if kernel.is_cached else "compiling kernels (once per machine)"
                self._progress(stage, done, len(kernels))
            assert kernel.address, "compiled or loaded"
        return CpuProgram(self, logits)


class CpuProgram:
    """A finished CPU tape."""

    def __init__(self, tape: CpuTape, logits: Buffer) -> None:
        self.max_batch_rows = tape._max_rows[Rows.BATCH]
        self.max_output_rows = tape._max_rows[Rows.OUTPUT]
        self.num_threads = tape._pool.num_threads
        self._pool = tape._pool
        self._operations = tuple(tape._operations)
        self._keep = (tape._memory, tape._keep, [parameters for _, parameters in tape._ops])
        self._ops = np.array([[kernel.address, address(words)] for kernel, words in tape._ops], np.int64)
        self._logits = tape._memory[logits.index].view(np.float32).reshape(self.max_output_rows, -1)[:, : logits.width]
        self._token_limit = tape._token_limit if tape._token_limit is not None else math.inf
        self._position_limit = tape._position_limit if tape._position_limit is not None else math.inf
        self._page_tokens = tape._kv_layout.page_tokens
        rows = self.max_batch_rows
        self._token_ids = np.zeros(rows, np.int64)
        self._positions = np.zeros(rows, np.int64)
        self._page_tables = np.zeros(rows, np.int64)
        self._output_rows = np.zeros(self.max_output_rows, np.int64)
        self._segments = np.zeros((rows, 4), np.int64)
        self._scratch = aligned_zeros(self._pool.num_threads * protocol.SCRATCH_BYTES)
        self._header = np.zeros(protocol.HEADER_WORDS, np.int64)
        for offset, array in (
            (protocol.TOKEN_IDS, self._token_ids),
            (protocol.POSITIONS, self._positions),
            (protocol.PAGE_TABLES, self._page_tables),
            (protocol.OUTPUT_ROWS, self._output_rows),
            (protocol.SCRATCH, self._scratch),
            (protocol.SEGMENTS, self._segments),
        ):
            self._header[offset // 8] = address(array)
        self._header[protocol.CONTROL // 8] = self._pool.control_address

    def run(self, batch: Batch) -> FloatArray:
        """Compute a batch; see `ops.Program.run`. Raises RequestError or ContextLengthError for a batch it cannot
        hold."""
        rows, outputs = len(batch.token_ids), len(batch.output_rows)
        if not 0 < rows <= self.max_batch_rows or outputs > self.max_output_rows:
            raise RequestError(
                f"a batch of {rows} rows with {outputs} outputs; at most {self.max_batch_rows} and "
                f"{self.max_output_rows} fit, so split it"
            )
        self._token_ids[:rows] = batch.token_ids
        lowest, highest = int(batch.token_ids.min()), int(batch.token_ids.max())
        if lowest < 0 or highest >= self._token_limit:
            found = lowest if lowest < 0 else highest
            raise RequestError(f"token id {found} is not in the vocabulary of {self._token_limit} entries")
        self._output_rows[:outputs] = batch.output_rows
        if outputs and not 0 <= int(batch.output_rows.min()) <= int(batch.output_rows.max()) < rows:
            raise RequestError(f"output rows must lie in 0..{rows - 1}")
        self._set_segments(batch, rows)
        self._header[protocol.NUM_ROWS // 8] = rows
        self._header[protocol.NUM_OUTPUT_ROWS // 8] = outputs
        self._pool.run(address(self._ops), len(self._ops), address(self._header))
        return self._logits[:outputs]

    def operations(self) -> Sequence[Operation]:
        """Every op, in the order they run."""
        return self._operations

    def run_operations(self, first: int, count: int) -> None:
        """Run some ops again over the last batch; see `ops.MeasurableProgram`."""
        assert 0 <= first <= first + count <= len(self._ops), "ops outside the tape"
        self._pool.run(address(self._ops[first:]), count, address(self._header))

    def _set_segments(self, batch: Batch, rows: int) -> None:
        row = 0
        for index, segment in enumerate(batch.segments):
            count, start, pages = segment.num_rows, segment.start_position, segment.page_addresses
            end = start + count
            if count <= 0 or start < 0 or pages.dtype != np.int64 or not pages.flags.c_contiguous:
                raise RequestError(f"segment {index} of {count} rows from position {start} is not a run of positions")
            if end > len(pages) * self._page_tokens:
                raise RequestError(f"segment {index} ends at position {end}, but {len(pages)} pages were given for it")
            if end > self._position_limit:
                raise ContextLengthError(
                    f"position {end - 1} is beyond the {self._position_limit} the model has learned"
                )
            if row + count > rows:
                raise RequestError(f"the segments hold more than the batch's {rows} token ids")
            table = pages.ctypes.data
            self._segments[index] = (row, count, start, table)
            self._positions[row : row + count] = np.arange(start, end)
            self._page_tables[row : row + count] = table
            row += count
        if row != rows:
            raise RequestError(f"the segments hold {row} rows, the batch {rows} token ids")
        self._header[protocol.NUM_SEGMENTS // 8] = len(batch.segments)

    def close(self) -> None:
        """End the pool's threads."""
        self._pool.close()
