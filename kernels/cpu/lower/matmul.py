"""Lowering of products with weights: matrices, matrices per head, and experts with their routing."""

import functools
import time
from collections.abc import Callable
from contextlib import closing
from itertools import takewhile
from typing import Any

import numpy as np

from localinfer.kernels import ops
from localinfer.kernels.cpu import kernel_abi, parameters
from localinfer.kernels.cpu.memory import address, aligned, aligned_zeros, padded, zeros
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.cpu.weights import PackedWeight
from localinfer.kernels.graph_builder import check, packed_weight
from localinfer.kernels.jit import isa
from localinfer.kernels.jit.isa import ISA
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.layouts import TILE_ROWS, Layout, is_float, num_tiles, tile_bytes
from localinfer.kernels.ops import Buffer, Gating, LinearWeight, Projection
from localinfer.kernels.program import OpCost

ACTIVATION_BYTES_PER_BLOCK = 384 * 1024
"""Rows of a matmul are taken in blocks of about this many bytes of activations: they and a tile share a 1 MiB cache."""


_GATING_CODES = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SOFTMAX_SELECTED: 2, Gating.SPARSE_MIXER: 3}


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
        words = parameters.MATMUL.pack(
            x=place, x_stride=stride, columns=x.width, is_output=x.is_output, projections=len(group),
            rows_per_block=rows_per_block,
        )  # fmt: skip
        kernel = f"matmul.matmul_{layout.name.lower()}"
        weights = [projection.weight for projection in group]
        num_bytes = sum(weight.packed.data.size for weight in weights)
        products = sum(weight.num_rows * weight.num_columns for weight in weights)
        names = tuple(weight.name for weight in weights)
        cost = OpCost(kernel, x.rows, names, num_bytes, num_bytes, products)
        blocks = (_projection_parameters(tape, projection) for projection in group)
        tape.add(kernel, words, *blocks, cost=cost, about=", ".join(map(_described, weights)))
    for projection in op.projections:
        tape.forget_copies(projection.out)


def _described(weight: LinearWeight) -> str:
    """A matrix for reports of crashes: its name in the file, its shape, and how it is stored."""
    stack = f"{weight.num_experts} experts of " if weight.num_experts > 1 else ""
    return f"{weight.name} ({stack}{weight.num_rows} rows x {weight.num_columns} columns, {weight.packed.layout.name})"


def _projection_parameters(tape: CpuTape, projection: Projection) -> parameters.Words:
    out, memory = projection.out, tape.memory
    zeros = memory.zeros(out.width)
    bias = memory.constant(projection.bias)
    residual, residual_stride = (zeros, 0) if projection.residual is None else tape.address_of(projection.residual)
    return parameters.PROJECTION.pack(
        **_weight_parameters(projection.weight.packed), **tape.addresses_of(out=out), residual=residual,
        residual_stride=residual_stride, bias=bias or zeros, bias_stride=64 if bias else 0, scale=projection.scale,
        matrix_rows=0,
    )  # fmt: skip


def _weight_parameters(packed: PackedWeight, expert: int = 0) -> dict[str, int]:
    """One matrix of a stack: its address, the bytes of a tile, how many tiles, and rows."""
    return {
        "weights": address(packed.data) + expert * packed.expert_bytes,
        "tile_bytes": packed.tile_bytes,
        "tiles": num_tiles(packed.num_rows),
        "rows": packed.num_rows,
    }


def _packed(tape: CpuTape, weight: LinearWeight, *, may_gather: bool = False) -> PackedWeight:
    packed: PackedWeight = packed_weight(weight, may_gather=may_gather)
    tape.memory.keep(packed)
    return packed


def _activations(tape: CpuTape, x: Buffer, packed: PackedWeight, slots: int) -> tuple[int, int, int]:
    """Address of a product's activations and their stride per row and per slot; quantizes them if needed."""
    columns = packed.num_columns
    if is_float(packed.layout):
        place, stride = tape.address_of(x)
        return place, stride, 4 * columns if slots > 1 else 0
    stride = kernel_abi.activation_row_bytes(columns)
    if tape.quantized_source != (x.rows, x.index, columns):
        needed = _whole_pairs(tape.max_rows[x.rows]) * slots * stride
        tape.quantized_place = tape.memory.shared(f"activations of {x.rows.value} rows", needed)
        words = parameters.QUANTIZE.pack(
            **tape.addresses_of(source=x), target=tape.quantized_place, target_stride=stride, columns=columns,
            is_output=x.is_output, slots=slots, slot_stride=4 * columns,
        )  # fmt: skip
        tape.add("matmul.quantize_rows", words, about=f"{x.name}, {columns} columns")
        tape.quantized_source = (x.rows, x.index, columns)
    return tape.quantized_place, stride * slots, _slot_stride(stride) if slots > 1 else 0


def _whole_pairs(rows: int) -> int:
    """Rows that memory is needed for."""
    return -(-rows // 2) * 2 if isa.pairs_rows() else rows


def _slot_stride(row_bytes: int) -> int:
    """Bytes from one slot of quantized rows to the next: of two rows that lie in pairs."""
    return 2 * row_bytes if isa.pairs_rows() else row_bytes


def _head_matmul(tape: CpuTape, op: ops.HeadMatmul) -> None:
    out, x, weight, packed = op.out, op.x, op.weight, _packed(tape, op.weight)
    heads, columns, rows = packed.num_experts, packed.num_columns, packed.num_rows
    source, stride = tape.address_of(x)
    source, slot_stride = source + 4 * op.x_offset, 4 * op.x_head_size
    if not is_float(packed.layout):
        row = kernel_abi.activation_row_bytes(columns)
        memory = aligned(_whole_pairs(tape.max_rows[x.rows]) * heads * row)
        tape.memory.keep(memory)
        words = parameters.QUANTIZE.pack(
            source=source, source_stride=stride, target=address(memory), target_stride=row, columns=columns,
            is_output=x.is_output, slots=heads, slot_stride=slot_stride,
        )  # fmt: skip
        tape.add("matmul.quantize_rows", words, about=f"{x.name}, {columns} columns")
        source, stride, slot_stride = address(memory), heads * row, _slot_stride(row)
    target, out_stride = tape.address_of(out)
    zeros = tape.memory.zeros(rows)
    kernel = f"matmul.matmul_{packed.layout.name.lower()}"
    cost = OpCost(kernel, x.rows, (weight.name,), packed.expert_bytes, packed.expert_bytes, rows * columns)
    for head in range(heads):
        words = parameters.MATMUL.pack(
            x=source + head * slot_stride, x_stride=stride, columns=columns, is_output=x.is_output, projections=1,
            rows_per_block=tape.max_rows[x.rows],
        )  # fmt: skip
        projection = parameters.PROJECTION.pack(
            **_weight_parameters(packed, head), out=target + 4 * (head * op.out_head_size + op.out_offset),
            out_stride=out_stride, residual=zeros, residual_stride=0, bias=zeros, bias_stride=0, scale=1.0,
            matrix_rows=0,
        )  # fmt: skip
        tape.add(kernel, words, projection, writes=out, cost=cost, about=_described(weight))


def _route(tape: CpuTape, op: ops.Route) -> None:
    routing, ids, logits = op.routing, op.expert_ids, op.logits
    count, selected = routing.num_experts, routing.num_selected
    words = parameters.ROUTE.pack(
        **tape.addresses_of(ids=ids, weights=op.expert_weights, logits=logits), experts=count, selected=selected,
        gating=_GATING_CODES[routing.gating], normalise=routing.normalise, scale=routing.scale,
        bias=tape.memory.constant(routing.selection_bias), groups=routing.num_groups,
        kept_groups=routing.num_selected_groups, group_values=routing.num_group_values, margin=routing.margin,
        output_scales=tape.memory.constant(routing.output_scales), is_output=logits.is_output,
    )  # fmt: skip
    tape.add("experts.route", words, writes=ids)
    table = zeros(count + 2 + tape.max_rows[logits.rows] * selected, np.int64)
    tape.expert_groups[ids.index] = table
    tape.memory.keep(table)
    words = parameters.GROUP_BY_EXPERT.pack(
        **tape.addresses_of(ids=ids), experts=count, selected=selected, starts=address(table),
        is_output=logits.is_output,
    )  # fmt: skip
    tape.add("experts.group_by_expert", words, writes=op.expert_weights)


def _expert_matmul(tape: CpuTape, op: ops.ExpertMatmul) -> None:
    out, x, weight, ids, packed = op.out, op.x, op.weight, op.expert_ids, _packed(tape, op.weight)
    selected = ids.width
    check(ids.index in tape.expert_groups, f"{ids.name} was not routed")
    place, stride, slot_stride = _activations(tape, x, packed, selected if op.input_per_slot else 1)
    bias = 0
    if op.bias is not None:
        bias = tape.memory.constant(np.pad(op.bias, ((0, 0), (0, padded(packed.num_rows) - packed.num_rows))))
    words = parameters.EXPERT_MATMUL.pack(
        x=place, x_stride=stride, slot_stride=slot_stride, columns=packed.num_columns, experts=packed.num_experts,
        selected=selected, groups=address(tape.expert_groups[ids.index]), expert_bytes=packed.expert_bytes,
        **_weight_parameters(packed), **tape.addresses_of(out=out), bias=bias, bias_stride=4 * padded(packed.num_rows),
        zeros=tape.memory.zeros(packed.num_rows),
    )  # fmt: skip
    kernel = f"matmul.expert_matmul_{packed.layout.name.lower()}"
    row_bytes, products = packed.expert_bytes * selected, packed.num_rows * packed.num_columns * selected
    cost = OpCost(kernel, x.rows, (weight.name,), packed.data.size, row_bytes, products)
    tape.add(kernel, words, writes=out, cost=cost, about=_described(weight))


def _expert_sum(tape: CpuTape, op: ops.ExpertSum) -> None:
    residual, residual_stride = tape.address_of(op.residual) if op.residual is not None else (0, 0)
    words = parameters.EXPERT_SUM.pack(
        **tape.addresses_of(out=op.out, x=op.x, weights=op.expert_weights), residual=residual,
        residual_stride=residual_stride, selected=op.expert_weights.width, columns=op.out.width,
        is_output=op.out.is_output,
    )  # fmt: skip
    tape.add("experts.expert_sum", words, writes=op.out)


def _expert_scale(tape: CpuTape, op: ops.ExpertScale) -> None:
    x, selected = op.x, op.expert_weights.width
    columns = x.width // selected
    check(columns % 16 == 0, f"{x.name} holds slots of {columns}; whole vectors of 16 are needed")
    words = parameters.EXPERT_SCALE.pack(
        **tape.addresses_of(x=x, weights=op.expert_weights), selected=selected, columns=columns, is_output=x.is_output
    )
    tape.add("experts.expert_scale", words, writes=x)


def _expert_factors(tape: CpuTape, op: ops.ExpertFactors) -> None:
    x, ids, selected = op.x, op.expert_ids, op.expert_ids.width
    columns = x.width // selected
    check(columns % 16 == 0, f"{x.name} holds slots of {columns}; whole vectors of 16 are needed")
    table = tape.expert_groups.get(ids.index)
    check(table is not None, f"{ids.name} was not routed")
    num_experts = 0 if table is None else table.size - 2 - selected * tape.max_rows[ids.rows]
    check(num_experts == op.factors.size, f"{x.name} has {op.factors.size} factors for {num_experts} experts")
    words = parameters.EXPERT_FACTORS.pack(
        **tape.addresses_of(x=x, ids=ids), factors=tape.memory.constant(op.factors), selected=selected, columns=columns,
        is_output=x.is_output,
    )  # fmt: skip
    tape.add("experts.expert_factors", words, writes=x)


# The number of rows from which on a layout's products are made by AMX, measured once per process where there is AMX. A
# kernel of such a layout has both ways, which give the same bits, so a choice by the clock changes no result. One
# token, or a short draft, is never multiplied by it.

NEVER = 1 << 62
TRIED_ROWS = (8, 16, 32, 64)
"""Numbers of rows that are timed; fewer are never multiplied by AMX."""
_COLUMNS, _TILES, _ATTEMPTS = 1024, 4, 5
_LEAST_GAIN = 0.97
"""Of the time without AMX: what AMX may take at most to be chosen."""


def choose_matrix_rows(tape: CpuTape) -> None:
    """Write into all products of a tape, whose kernels are linked, from how many rows on AMX makes them."""
    if isa.SELECTED is not ISA.AMX:
        return
    layouts = {f"matmul.matmul_{layout.name.lower()}": layout for layout in Layout if not is_float(layout)}
    size = len(parameters.PROJECTION.fields)
    for kernel, words in zip(tape.kernels, tape.parameters, strict=True):
        if kernel.name in layouts:
            first = len(parameters.MATMUL.fields) + parameters.PROJECTION.fields.index("matrix_rows")
            words[first::size] = least_matrix_rows(layouts[kernel.name])


@functools.cache
def least_matrix_rows(layout: Layout) -> int:
    """Rows from which on AMX is the faster way; NEVER where it is not."""
    with closing(ThreadPool(1)) as pool:
        timed = _Timed(pool, layout)
        return fewest_faster(lambda rows: timed.seconds(rows, NEVER), lambda rows: timed.seconds(rows, rows))


def fewest_faster(without: Callable[[int], float], by_amx: Callable[[int], float]) -> int:
    """The fewest of TRIED_ROWS from which on AMX takes less time, in turns; NEVER if it does not for the most rows."""

    def is_faster(rows: int) -> bool:
        seconds = [(without(rows), by_amx(rows)) for _ in range(_ATTEMPTS)]
        return min(second for _, second in seconds) < _LEAST_GAIN * min(first for first, _ in seconds)

    return min(takewhile(is_faster, reversed(TRIED_ROWS)), default=NEVER)


class _Timed:
    """A product of a matrix of zeros, of which time does not depend on what it holds."""

    def __init__(self, pool: ThreadPool, layout: Layout) -> None:
        self._pool = pool
        most, outputs = max(TRIED_ROWS), TILE_ROWS * _TILES
        stride, num_bytes = kernel_abi.activation_row_bytes(_COLUMNS), tile_bytes(layout, _COLUMNS)
        weights, x = aligned_zeros(_TILES * num_bytes), aligned_zeros(most * stride)
        out, zeros, scratch = (
            aligned_zeros(most * 4 * outputs),
            aligned_zeros(4 * outputs),
            aligned_zeros(kernel_abi.SCRATCH_BYTES),
        )
        matmul = parameters.MATMUL.pack(
            x=address(x), x_stride=stride, columns=_COLUMNS, is_output=0, projections=1, rows_per_block=most
        )
        projection = parameters.PROJECTION.pack(
            weights=address(weights), tile_bytes=num_bytes, tiles=_TILES, rows=outputs, out=address(out),
            out_stride=4 * outputs, residual=address(zeros), residual_stride=0, bias=address(zeros), bias_stride=0,
            scale=1.0, matrix_rows=NEVER,
        )  # fmt: skip
        self._words = np.concatenate([matmul, projection])
        fields = dict.fromkeys(parameters.BATCH.fields, 0)
        self._header = parameters.BATCH.pack(**fields | {"control": pool.control_address, "scratch": address(scratch)})
        kernel = Kernel(f"matmul.matmul_{layout.name.lower()}")
        self._ops = np.array([[kernel.address, address(self._words)]], np.int64)
        self._kept = weights, x, out, zeros, scratch

    def seconds(self, rows: int, matrix_rows: int) -> float:
        """Seconds of the product by so many rows, made by AMX from `matrix_rows` on."""
        parameters.BATCH.write(self._header, num_rows=rows)
        self._words[len(parameters.MATMUL.fields) + parameters.PROJECTION.fields.index("matrix_rows")] = matrix_rows
        began = time.perf_counter()
        self._pool.run(address(self._ops), 1, address(self._header))
        return time.perf_counter() - began


LOWER: dict[type, Callable[[CpuTape, Any], None]] = {
    ops.Matmul: _matmul,
    ops.HeadMatmul: _head_matmul,
    ops.Route: _route,
    ops.ExpertMatmul: _expert_matmul,
    ops.ExpertSum: _expert_sum,
    ops.ExpertScale: _expert_scale,
    ops.ExpertFactors: _expert_factors,
}
