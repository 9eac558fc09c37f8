"""From a graph of ops to a tape for the CPU: each op becomes a kernel's address and a parameter block.

`LOWER` has one function per op. `GraphBuilder` proved the shapes; proven here is what else a kernel will believe: that
packed weights are what their handles say, and what only these kernels cannot do. The program keeps all that the blocks
point to alive.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels import further_ops, ops
from localinfer.kernels.cpu import attention, further, kernel_abi, parameters, recurrent
from localinfer.kernels.cpu.memory import address, aligned, padded, placed, zeros
from localinfer.kernels.cpu.program import CpuProgram, ThreadPool
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.cpu.weights import PackedWeight
from localinfer.kernels.graph_builder import check, packed_weight
from localinfer.kernels.jit.compile_ahead import compile_ahead, link
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout, is_quantized
from localinfer.kernels.layouts import GGUF_LAYOUTS, SIZES, is_float, num_tiles
from localinfer.kernels.ops import (
    AttentionShape,
    Buffer,
    Gating,
    LinearWeight,
    OpGraph,
    Projection,
    Relative,
    RopeTable,
    Rows,
)
from localinfer.kernels.program import Operation
from localinfer.types import ProgressCallback

ACTIVATION_BYTES_PER_BLOCK = 384 * 1024
"""Rows of a matmul are taken in blocks of about this many bytes of activations: they and a tile share a 1 MiB cache."""

MAX_BATCH_ROWS = 512
"""Rows of a batch by default."""

_GATING_CODES = {Gating.SOFTMAX: 0, Gating.SIGMOID: 1, Gating.SOFTMAX_SELECTED: 2, Gating.SPARSE_MIXER: 3}


def lower_to_cpu(
    graph: OpGraph,
    pool: ThreadPool,
    kv_layout: KVLayout,
    *,
    max_batch_rows: int = MAX_BATCH_ROWS,
    max_output_rows: int = 64,
    max_summed_tokens: int = 0,
    progress: ProgressCallback | None = None,
) -> CpuProgram:
    """Compile a graph for a thread pool: `max_batch_rows` tokens per run, `max_output_rows` of them with logits.

    kv_layout: of the graph's own layers.
    max_summed_tokens: where it is not 0, every page's share of attention is measured, and no sequence may hold more
    positions than that.
    Raises: ShapeError for what no kernel computes.
    """
    is_kept = graph.kv_layers == tuple(kv_layout.layers) and graph.states in ((), tuple(kv_layout.states))
    assert is_kept, "a graph reads and writes the cache that it was written for"
    tape = CpuTape(graph, pool, kv_layout, max_batch_rows, min(max_output_rows, max_batch_rows), max_summed_tokens)
    for op in graph.ops:
        LOWER[type(op)](tape, op)
    kernels = _kernels_of(tape)
    compile_ahead(kernels, progress)
    link(kernels, progress)
    for block, index, called in tape.calls:
        block[index] = called.address
    return CpuProgram(tape)


def kernels_of_graph(graph: OpGraph, pool: ThreadPool, kv_layout: KVLayout, max_summed_tokens: int = 0) -> list[Kernel]:
    """The kernels of the program that `lower_to_cpu` makes of a graph, for batches of any size."""
    tape = CpuTape(graph, pool, kv_layout, 1, 1, max_summed_tokens)
    for op in graph.ops:
        LOWER[type(op)](tape, op)
    return _kernels_of(tape)


def _kernels_of(tape: CpuTape) -> list[Kernel]:
    return list(dict.fromkeys([*tape.kernels, *(called for _, _, called in tape.calls)]))


_LOOKED_UP: dict[type, str] = {ops.Embed: "token_ids", ops.EmbedPositions: "positions", ops.EmbedTypes: "token_types"}


def _embed(tape: CpuTape, op: ops.Embed | ops.EmbedPositions | ops.EmbedTypes) -> None:
    out, table = op.out, op.table
    scale, adds = (op.scale, False) if isinstance(op, ops.Embed) else (1.0, True)
    rows = tape.memory.placed_table(table.packed)
    check(rows.num_columns == table.width, f"{table.name} is {table.width} wide, and stored {rows.num_columns} wide")
    check(rows.layout in GGUF_LAYOUTS, f"{table.name} is in {rows.layout.name}, which embeddings are not")
    sizes = SIZES[rows.layout]
    row_bytes = rows.num_columns // sizes.unit * sizes.file_bytes
    check(
        rows.data.size == table.num_rows * row_bytes and rows.num_columns % sizes.unit == 0,
        f"{table.name} holds {rows.data.size} bytes; {table.num_rows} rows need {table.num_rows * row_bytes}",
    )
    tape.memory.keep_table(rows, is_small=adds)
    words = parameters.EMBED.pack(
        **tape.places(out=out), table=rows.data.ctypes.data, row_bytes=row_bytes,
        columns=rows.num_columns, scale=scale, indices=parameters.BATCH.offset(_LOOKED_UP[type(op)]), adds=adds,
    )  # fmt: skip
    kernel = f"embedding.embed_{rows.layout.name.lower()}"
    cost = Operation(kernel, Rows.BATCH, (table.name,), rows.data.size, rows.data.size // table.num_rows)
    about = f"{table.name} ({table.num_rows} rows x {table.width} columns, {rows.layout.name})"
    tape.add(kernel, words, writes=out, cost=cost, about=about)


def _norm(tape: CpuTape, op: ops.RmsNorm | ops.LayerNorm) -> None:
    size = op.group_size or op.x.width
    groups = op.x.width // size
    per_group = op.weight is not None and groups > 1 and op.weight.size == op.x.width
    bias, kernel = (op.bias, "layer_norm") if isinstance(op, ops.LayerNorm) else (None, "rms_norm")
    words = parameters.NORM.pack(
        **tape.places(out=op.out, x=op.x), weight=tape.memory.constant(op.weight), bias=tape.memory.constant(bias),
        weight_stride=4 * size if per_group else 0, groups=groups, size=size, epsilon=op.epsilon,
        is_output=op.x.is_output,
    )  # fmt: skip
    tape.add(f"elementwise.{kernel}", words, writes=op.out, about=op.x.name)


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
        cost = Operation(kernel, x.rows, names, num_bytes, num_bytes, products)
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
    residual, residual_stride = (zeros, 0) if projection.residual is None else tape.place(projection.residual)
    return parameters.PROJECTION.pack(
        **_weight_parameters(projection.weight.packed), **tape.places(out=out), residual=residual,
        residual_stride=residual_stride, bias=bias or zeros, bias_stride=64 if bias else 0, scale=projection.scale,
        spare=0,
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
    """Where a product finds its activations: address, stride per row and per slot; quantizes them if needed."""
    columns = packed.num_columns
    if is_float(packed.layout):
        place, stride = tape.place(x)
        return place, stride, 4 * columns if slots > 1 else 0
    stride = kernel_abi.activation_row_bytes(columns)
    if tape.quantized_source != (x.rows, x.index, columns):
        needed = tape.max_rows[x.rows] * slots * stride
        tape.quantized_place = tape.memory.shared(f"activations of {x.rows.value} rows", needed)
        words = parameters.QUANTIZE.pack(
            **tape.places(source=x), target=tape.quantized_place, target_stride=stride, columns=columns,
            is_output=x.is_output, slots=slots, slot_stride=4 * columns,
        )  # fmt: skip
        tape.add("quantize.quantize_rows", words, about=f"{x.name}, {columns} columns")
        tape.quantized_source = (x.rows, x.index, columns)
    return tape.quantized_place, stride * slots, stride if slots > 1 else 0


def _rope(tape: CpuTape, op: ops.Rope) -> None:
    x, pairs = op.x, op.table.inverse_frequencies.size
    angles = _rope_angles(tape, op.table)
    place, stride = tape.place(x)
    words = parameters.ROPE.pack(
        x=place + 4 * op.offset, x_stride=stride, angles=address(angles), angles_stride=8 * pairs,
        heads=x.width // op.head_size, head_size=op.head_size, pairs=pairs,
        is_halves=op.table.pairing is ops.Pairing.HALVES,
    )  # fmt: skip
    tape.add("elementwise.rope", words, writes=x, about=f"{pairs} pairs of each head of {op.head_size}")


def _rope_angles(tape: CpuTape, table: RopeTable) -> NDArray[np.uint8]:
    """The table's cosines and sines for every row, computed once per run."""
    frequencies = placed(np.ascontiguousarray(table.inverse_frequencies, np.float64))
    key = (frequencies.tobytes(), table.magnitude)
    if key not in tape.angles:
        angles = aligned(tape.max_rows[Rows.BATCH] * 8 * frequencies.size)
        tape.angles[key] = angles
        tape.memory.keep(angles, frequencies)
        words = parameters.ROPE_ANGLES.pack(
            out=address(angles), out_stride=8 * frequencies.size, frequencies=address(frequencies),
            count=frequencies.size, magnitude=table.magnitude,
        )  # fmt: skip
        tape.add("elementwise.rope_angles", words)
    return tape.angles[key]


def _store_kv(tape: CpuTape, op: ops.StoreKV) -> None:
    kernel, words = attention.store_parameters(tape.kv_layout, op.layer)
    (keys, keys_stride), (values, values_stride) = tape.place(op.keys), tape.place(op.values or op.keys)
    places = {"keys_source": keys, "keys_stride": keys_stride}
    places |= {"values_source": values, "values_stride": values_stride}
    tape.add(kernel, parameters.STORE_KV.pack(**places, **words), about=f"layer {op.layer}, {_cache_types(tape)}")


def _attention(tape: CpuTape, op: ops.Attention) -> None:
    layout, layer, shape = tape.kv_layout, op.layer, op.shape
    attention.check_limits(shape)
    words = attention.attention_parameters(layout, layer, shape) | tape.places(out=op.out)
    words |= _queries(tape, op.queries, layer, shape) | attention.chosen_parameters(layout, layer, op.chosen)
    if op.chosen is not None:
        num_bytes = tape.pool.max_threads * kernel_abi.CHUNK // layout.page_tokens * layout.head(layer).num_bytes
        gathered = tape.memory.shared("chosen positions", num_bytes)
        words |= tape.places(chosen=op.chosen.blocks) | {"rows_per_unit": 1, "gathered": gathered}
        check(tape.attention_sums is None, "attention to chosen positions is not summed by page")
    words |= attention.relative_parameters() if op.relative is None else _relative(tape, op.relative)
    words |= {"sinks": tape.memory.constant(shape.sinks), "slopes": tape.memory.constant(shape.alibi_slopes)}
    tape.partial_bytes = max(tape.partial_bytes, attention.partial_bytes(layout, layer, shape))
    seen = shape.window or shape.chunk if op.chosen is None else op.chosen.count * op.chosen.block_size
    cost = Operation(
        "attention.attention", kv_bytes=shape.num_kv_heads * layout.head(layer).num_bytes // layout.page_tokens,
        kv_multiply_adds=shape.num_heads * (shape.key_size + shape.value_size), window=seen,
    )  # fmt: skip
    calls = {
        parameters.ATTENTION.fields.index(word): kernel for word, kernel in attention.called_kernels(layout).items()
    }
    about = _about_attention(tape, layer, shape)
    block = parameters.ATTENTION.pack(**words)
    tape.add("attention.attention", block, writes=op.out, cost=cost, calls=calls, about=about)
    if tape.attention_sums is not None:
        _, heads, pages = tape.attention_sums.shape
        work = tape.memory.shared("attention sums", tape.pool.max_threads * 64 * pages)
        words |= {"sums": address(tape.attention_sums), "sums_heads": heads, "sums_pages": pages, "work": work}
        tape.add("attention_sums.attention_sums", parameters.ATTENTION_SUMS.pack(**words), calls=calls, about=about)


def _relative(tape: CpuTape, relative: Relative) -> dict[str, int]:
    """Words of an ATTENTION block about biases by distance."""
    check(tape.attention_sums is None, "attention with biases by distance is not summed by page")
    buckets = placed(4 * relative.buckets.astype(np.int64))
    tape.memory.keep(buckets)
    words = {"buckets": address(buckets), "reach": len(buckets) // 2, "num_buckets": relative.num_buckets}
    words["table_bias"] = tape.memory.constant(relative.table)
    for name, buffer in (("row_bias", relative.by_row), ("key_bias", relative.by_key)):
        words[name], words[f"{name}_stride"] = (0, 0) if buffer is None else tape.place(buffer)
    return words


def _cache_types(tape: CpuTape) -> str:
    return f"keys in {tape.kv_layout.key_type}, values in {tape.kv_layout.value_type}"


def _about_attention(tape: CpuTape, layer: int, shape: AttentionShape) -> str:
    """Attention of a layer, for reports of crashes."""
    heads = f"{shape.num_heads} heads over {shape.num_kv_heads} of {shape.key_size} and {shape.value_size}"
    return f"layer {layer}, {heads}, {_cache_types(tape)}"


def _choose_blocks(tape: CpuTape, op: further_ops.ChooseBlocks) -> None:
    """Two kernels: the scores of few rows, by all threads, and the choice."""
    layout, chosen = tape.kv_layout, op.chosen
    shape = AttentionShape(op.num_heads, 1, op.key_size, 0, op.scale)
    attention.check_limits(shape)
    cell = min(chosen.block_size, kernel_abi.CHUNK)
    is_whole = kernel_abi.CHUNK % cell == 0 and chosen.block_size % cell == 0
    check(is_whole, f"blocks of {chosen.block_size} positions are neither parts of {kernel_abi.CHUNK} nor multiples")
    num_cells = -(-op.max_positions // kernel_abi.CHUNK) * (kernel_abi.CHUNK // cell)
    slots = max(kernel_abi.SPLIT_ROWS, tape.pool.max_threads)
    scores = tape.memory.shared("scores of positions", 4 * slots * chosen.num_lists * num_cells)
    words = attention.attention_parameters(layout, op.layer, shape) | tape.places(out=chosen.blocks)
    words |= _queries(tape, op.queries, op.layer, shape) | attention.chosen_parameters(layout, op.layer, chosen)
    weights, stride = (0, 0) if op.weights is None else tape.place(op.weights)
    words |= {"head_weights": weights, "head_weights_stride": stride, "num_local": op.num_local, "cell": cell}
    words |= {"num_cells": num_cells, "scores": scores, "sinks": 0, "slopes": 0} | attention.relative_parameters()
    calls = {
        parameters.CHOOSE_BLOCKS.fields.index(word): kernel for word, kernel in attention.called_kernels(layout).items()
    }
    cost = Operation(
        "choosing.score_blocks", kv_bytes=layout.head(op.layer).num_bytes // layout.page_tokens,
        kv_multiply_adds=op.num_heads * op.key_size,
    )  # fmt: skip
    about, block = _about_attention(tape, op.layer, shape), parameters.CHOOSE_BLOCKS.pack(**words)
    tape.add("choosing.score_blocks", block, calls=calls, cost=cost, about=about)
    tape.add("choosing.choose_blocks", block.copy(), writes=chosen.blocks, calls=calls, about=about)


def _queries(tape: CpuTape, queries: Buffer, layer: int, shape: AttentionShape) -> dict[str, int]:
    """Where attention finds its queries: address, stride per row and per head; quantizes them for such keys."""
    layout = tape.kv_layout
    places = tape.places(queries=queries)
    if not is_quantized(layout.key_type):
        return places | {"query_head_bytes": 4 * shape.key_size}
    head_bytes = attention.query_head_bytes(layout.head(layer).key_columns)
    stride = shape.num_heads * head_bytes
    target = tape.memory.shared("queries", tape.max_rows[Rows.BATCH] * stride)
    words = attention.query_parameters(layout, layer, shape) | places
    words |= {"target": target, "target_stride": stride, "target_head_bytes": head_bytes}
    about = _about_attention(tape, layer, shape)
    tape.add("kv_store.quantize_queries", parameters.QUANTIZE_QUERIES.pack(**words), about=about)
    return {"queries": target, "queries_stride": stride, "query_head_bytes": head_bytes}


def _gated_activate(tape: CpuTape, op: ops.GatedActivate) -> None:
    kernel = f"gated_{op.kind.value}_limited" if op.limit else f"gated_{op.kind.value}"
    tape.elementwise(kernel, op.out, op.gate, op.up, op.limit)


def _select_output(tape: CpuTape, op: ops.SelectOutput) -> None:
    words = parameters.SELECT_OUTPUT.pack(**tape.places(out=op.out, x=op.x), columns=op.x.width)
    tape.add("elementwise.select_output", words, writes=op.out)


def _head_matmul(tape: CpuTape, op: ops.HeadMatmul) -> None:
    out, x, weight, packed = op.out, op.x, op.weight, _packed(tape, op.weight)
    heads, columns, rows = packed.num_experts, packed.num_columns, packed.num_rows
    source, stride = tape.place(x)
    source, slot_stride = source + 4 * op.x_offset, 4 * op.x_head_size
    if not is_float(packed.layout):
        row = kernel_abi.activation_row_bytes(columns)
        memory = aligned(tape.max_rows[x.rows] * heads * row)
        tape.memory.keep(memory)
        words = parameters.QUANTIZE.pack(
            source=source, source_stride=stride, target=address(memory), target_stride=row, columns=columns,
            is_output=x.is_output, slots=heads, slot_stride=slot_stride,
        )  # fmt: skip
        tape.add("quantize.quantize_rows", words, about=f"{x.name}, {columns} columns")
        source, stride, slot_stride = address(memory), heads * row, row
    target, out_stride = tape.place(out)
    zeros = tape.memory.zeros(rows)
    kernel = f"matmul.matmul_{packed.layout.name.lower()}"
    cost = Operation(kernel, x.rows, (weight.name,), packed.expert_bytes, packed.expert_bytes, rows * columns)
    for head in range(heads):
        words = parameters.MATMUL.pack(
            x=source + head * slot_stride, x_stride=stride, columns=columns, is_output=x.is_output, projections=1,
            rows_per_block=tape.max_rows[x.rows],
        )  # fmt: skip
        projection = parameters.PROJECTION.pack(
            **_weight_parameters(packed, head), out=target + 4 * (head * op.out_head_size + op.out_offset),
            out_stride=out_stride, residual=zeros, residual_stride=0, bias=zeros, bias_stride=0, scale=1.0, spare=0,
        )  # fmt: skip
        tape.add(kernel, words, projection, writes=out, cost=cost, about=_described(weight))


def _route(tape: CpuTape, op: ops.Route) -> None:
    routing, ids, logits = op.routing, op.expert_ids, op.logits
    count, selected = routing.num_experts, routing.num_selected
    words = parameters.ROUTE.pack(
        **tape.places(ids=ids, weights=op.expert_weights, logits=logits), experts=count, selected=selected,
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
        **tape.places(ids=ids), experts=count, selected=selected, starts=address(table), is_output=logits.is_output,
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
        **_weight_parameters(packed), **tape.places(out=out), bias=bias, bias_stride=4 * padded(packed.num_rows),
        zeros=tape.memory.zeros(packed.num_rows),
    )  # fmt: skip
    kernel = f"matmul.expert_matmul_{packed.layout.name.lower()}"
    row_bytes, products = packed.expert_bytes * selected, packed.num_rows * packed.num_columns * selected
    cost = Operation(kernel, x.rows, (weight.name,), packed.data.size, row_bytes, products)
    tape.add(kernel, words, writes=out, cost=cost, about=_described(weight))


def _expert_sum(tape: CpuTape, op: ops.ExpertSum) -> None:
    residual, residual_stride = tape.place(op.residual) if op.residual is not None else (0, 0)
    words = parameters.EXPERT_SUM.pack(
        **tape.places(out=op.out, x=op.x, weights=op.expert_weights), residual=residual,
        residual_stride=residual_stride, selected=op.expert_weights.width, columns=op.out.width,
        is_output=op.out.is_output,
    )  # fmt: skip
    tape.add("experts.expert_sum", words, writes=op.out)


def _exchange(tape: CpuTape, op: ops.Exchange) -> None:
    tape.stage_starts.append(len(tape.kernels))
    for buffer in op.takes:
        tape.forget_copies(buffer)


LOWER: dict[type, Callable[[CpuTape, Any], None]] = {
    ops.Embed: _embed,
    ops.EmbedPositions: _embed,
    ops.EmbedTypes: _embed,
    ops.Exchange: _exchange,
    ops.RmsNorm: _norm,
    ops.LayerNorm: _norm,
    ops.Matmul: _matmul,
    ops.Rope: _rope,
    ops.StoreKV: _store_kv,
    ops.Attention: _attention,
    further_ops.ChooseBlocks: _choose_blocks,
    ops.Activate: lambda tape, op: tape.elementwise(op.kind.value, op.out, op.x, op.x),
    ops.GatedActivate: _gated_activate,
    ops.Add: lambda tape, op: tape.elementwise("add", op.out, op.a, op.b, op.scale),
    ops.Scale: lambda tape, op: tape.elementwise("scale", op.x, op.x, op.x, op.factor),
    ops.HeadMatmul: _head_matmul,
    ops.SelectOutput: _select_output,
    ops.Route: _route,
    ops.ExpertMatmul: _expert_matmul,
    ops.ExpertSum: _expert_sum,
    **further.LOWER,
    **recurrent.LOWER,
}
