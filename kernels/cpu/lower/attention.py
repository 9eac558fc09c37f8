"""Lowering of attention: RoPE, the cache, and parameters from the cache's layout and the attention's shape."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels import ops
from localinfer.kernels.cpu import kernel_abi, parameters
from localinfer.kernels.cpu.memory import address, aligned, placed
from localinfer.kernels.cpu.tape import CpuTape
from localinfer.kernels.graph_builder import check
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout, is_quantized, num_blocks
from localinfer.kernels.ops import AttentionShape, Buffer, Relative, RopeTable, Rows, SparseSelection
from localinfer.kernels.program import OpCost

_KINDS = {
    "f32": kernel_abi.KIND_F32, "f16": kernel_abi.KIND_F16, "q8_0": kernel_abi.KIND_Q8_0, "q4_0": kernel_abi.KIND_Q4_0
}  # fmt: skip


_COLUMNS_PER_STEP = {"f32": 1, "f16": 1, "q8_0": 4, "q4_0": 8}


_CODE_BIASES = {"q8_0": 128, "q4_0": 8}


def _rope(tape: CpuTape, op: ops.Rope) -> None:
    x, pairs = op.x, op.table.inverse_frequencies.size
    angles = _rope_angles(tape, op.table)
    place, stride = tape.address_of(x)
    words = parameters.ROPE.pack(
        x=place + 4 * op.offset, x_stride=stride, angles=address(angles), angles_stride=8 * pairs,
        heads=x.width // op.head_size, head_size=op.head_size, pairs=pairs,
        is_halves=op.table.pairing is ops.Pairing.HALVES,
    )  # fmt: skip
    tape.add("elementwise.rope", words, writes=x, about=f"{pairs} pairs of each head of {op.head_size}")


def _rope_angles(tape: CpuTape, table: RopeTable) -> NDArray[np.uint8]:
    """The table's cosines and sines for every row, computed once per run."""
    frequencies = placed(np.ascontiguousarray(table.inverse_frequencies, np.float64))
    axes = None if table.axes is None else placed(np.ascontiguousarray(table.axes, np.int64))
    key = (frequencies.tobytes(), table.magnitude, None if axes is None else axes.tobytes())
    if key not in tape.angles:
        angles = aligned(tape.max_rows[Rows.BATCH] * 8 * frequencies.size)
        tape.angles[key] = angles
        tape.memory.keep(angles, frequencies)
        words = dict(
            out=address(angles), out_stride=8 * frequencies.size, frequencies=address(frequencies),
            count=frequencies.size, magnitude=table.magnitude,
        )  # fmt: skip
        if axes is None:
            tape.add("elementwise.rope_angles", parameters.ROPE_ANGLES.pack(**words))
        else:
            tape.memory.keep(axes)
            block = parameters.ROPE_ANGLES_BY_AXIS.pack(**words, axes=address(axes))
            tape.add("elementwise.rope_angles_by_axis", block)
    return tape.angles[key]


def _rotate_by_row(tape: CpuTape, op: ops.RotateByRow) -> None:
    x, pairs = op.x, op.angles.width // 2
    (place, stride), (angles, angles_stride) = tape.address_of(x), tape.address_of(op.angles)
    words = parameters.ROPE.pack(
        x=place + 4 * op.offset, x_stride=stride, angles=angles, angles_stride=angles_stride,
        heads=x.width // op.head_size, head_size=op.head_size, pairs=pairs,
        is_halves=op.pairing is ops.Pairing.HALVES,
    )  # fmt: skip
    tape.add("elementwise.rope", words, writes=x, about=f"{pairs} pairs of each head of {op.head_size}")


def _store_kv(tape: CpuTape, op: ops.StoreKV) -> None:
    kernel, words = store_parameters(tape.kv_layout, op.layer)
    (keys, keys_stride), (values, values_stride) = tape.address_of(op.keys), tape.address_of(op.values or op.keys)
    places = {"keys_source": keys, "keys_stride": keys_stride}
    places |= {"values_source": values, "values_stride": values_stride}
    tape.add(kernel, parameters.STORE_KV.pack(**places, **words), about=f"layer {op.layer}, {_cache_types(tape)}")


def _attention(tape: CpuTape, op: ops.Attention) -> None:
    layout, layer, shape = tape.kv_layout, op.layer, op.shape
    check_limits(shape)
    words = attention_parameters(layout, layer, shape) | tape.addresses_of(out=op.out)
    words |= _queries(tape, op.queries, layer, shape) | chosen_parameters(layout, layer, op.chosen)
    if op.chosen is not None:
        num_bytes = tape.pool.max_threads * kernel_abi.CHUNK // layout.page_tokens * layout.head(layer).num_bytes
        gathered = tape.memory.shared("chosen positions", num_bytes)
        words |= tape.addresses_of(chosen=op.chosen.blocks) | {"rows_per_unit": 1, "gathered": gathered}
        check(tape.attention_sums is None, "attention to chosen positions is not summed by page")
    words |= relative_parameters() if op.relative is None else _relative(tape, op.relative)
    words |= {"sinks": tape.memory.constant(shape.sinks), "slopes": tape.memory.constant(shape.alibi_slopes)}
    tape.partial_bytes = max(tape.partial_bytes, partial_bytes(layout, layer, shape))
    seen = shape.window or shape.chunk if op.chosen is None else op.chosen.count * op.chosen.block_size
    kernels = ("attention_lanes.attention", "attention_lanes.attention_of_ranges")
    calls = {}
    if not _goes_by_lanes(tape, op):
        kernels = ("attention.attention", "attention_ranges.attention")
        calls = {parameters.ATTENTION.fields.index(word): kernel for word, kernel in called_kernels(layout).items()}
    cost = OpCost(
        kernels[0], kv_bytes=shape.num_kv_heads * layout.head(layer).num_bytes // layout.page_tokens,
        kv_multiply_adds=shape.num_heads * (shape.key_size + shape.value_size), window=seen,
    )  # fmt: skip
    about = _about_attention(tape, layer, shape)
    block = parameters.ATTENTION.pack(**words)
    if op.takes_ranges:
        tape.ranged_kernels[len(tape.kernels)] = Kernel(kernels[1])
    tape.add(kernels[0], block, writes=op.out, cost=cost, calls=calls, about=about)
    if tape.attention_sums is not None:
        _, heads, pages = tape.attention_sums.shape
        work = tape.memory.shared("attention sums", tape.pool.max_threads * 64 * pages)
        words |= {"sums": address(tape.attention_sums), "sums_heads": heads, "sums_pages": pages, "work": work}
        tape.add("attention.attention_sums", parameters.ATTENTION_SUMS.pack(**words), calls=calls, about=about)


def _goes_by_lanes(tape: CpuTape, op: ops.Attention) -> bool:
    """True for attention of an encoder, whose queries are computed side by side: each head has keys of its own."""
    shape, kinds = op.shape, (tape.kv_layout.key_type, tape.kv_layout.value_type)
    is_plain = not shape.softcap and not shape.window and shape.sinks is None and shape.alibi_slopes is None
    has_room = max(shape.key_size, shape.value_size) <= kernel_abi.MOST_LANE_COLUMNS
    is_alone = shape.num_heads == shape.num_kv_heads and op.relative is None and tape.attention_sums is None
    return shape.bidirectional and kinds == ("f32", "f32") and is_plain and has_room and is_alone


def _relative(tape: CpuTape, relative: Relative) -> dict[str, int]:
    """Words of an ATTENTION block about biases by distance."""
    check(tape.attention_sums is None, "attention with biases by distance is not summed by page")
    buckets = placed(4 * relative.buckets.astype(np.int64))
    tape.memory.keep(buckets)
    words = {"buckets": address(buckets), "reach": len(buckets) // 2, "num_buckets": relative.num_buckets}
    words["table_bias"] = tape.memory.constant(relative.table)
    for name, buffer in (("row_bias", relative.by_row), ("key_bias", relative.by_key)):
        words[name], words[f"{name}_stride"] = (0, 0) if buffer is None else tape.address_of(buffer)
    return words


def _cache_types(tape: CpuTape) -> str:
    return f"keys in {tape.kv_layout.key_type}, values in {tape.kv_layout.value_type}"


def _about_attention(tape: CpuTape, layer: int, shape: AttentionShape) -> str:
    """Attention of a layer, for reports of crashes."""
    heads = f"{shape.num_heads} heads over {shape.num_kv_heads} of {shape.key_size} and {shape.value_size}"
    return f"layer {layer}, {heads}, {_cache_types(tape)}"


def _choose_blocks(tape: CpuTape, op: ops.ChooseBlocks) -> None:
    """Two kernels: the scores of few rows, by all threads, and the choice."""
    layout, chosen = tape.kv_layout, op.chosen
    shape = AttentionShape(op.num_heads, 1, op.key_size, 0, op.scale)
    check_limits(shape)
    cell = min(chosen.block_size, kernel_abi.CHUNK)
    is_whole = kernel_abi.CHUNK % cell == 0 and chosen.block_size % cell == 0
    check(is_whole, f"blocks of {chosen.block_size} positions are neither parts of {kernel_abi.CHUNK} nor multiples")
    num_cells = -(-op.max_positions // kernel_abi.CHUNK) * (kernel_abi.CHUNK // cell)
    slots = max(kernel_abi.SPLIT_ROWS, tape.pool.max_threads)
    scores = tape.memory.shared("scores of positions", 4 * slots * chosen.num_lists * num_cells)
    words = attention_parameters(layout, op.layer, shape) | tape.addresses_of(out=chosen.blocks)
    words |= _queries(tape, op.queries, op.layer, shape) | chosen_parameters(layout, op.layer, chosen)
    weights, stride = (0, 0) if op.weights is None else tape.address_of(op.weights)
    words |= {"head_weights": weights, "head_weights_stride": stride, "num_local": op.num_local, "cell": cell}
    words |= {"num_cells": num_cells, "scores": scores, "sinks": 0, "slopes": 0} | relative_parameters()
    calls = {parameters.CHOOSE_BLOCKS.fields.index(word): kernel for word, kernel in called_kernels(layout).items()}
    cost = OpCost(
        "block_topk.score_blocks", kv_bytes=layout.head(op.layer).num_bytes // layout.page_tokens,
        kv_multiply_adds=op.num_heads * op.key_size,
    )  # fmt: skip
    about, block = _about_attention(tape, op.layer, shape), parameters.CHOOSE_BLOCKS.pack(**words)
    tape.add("block_topk.score_blocks", block, calls=calls, cost=cost, about=about)
    tape.add("block_topk.choose_blocks", block.copy(), writes=chosen.blocks, calls=calls, about=about)


def _queries(tape: CpuTape, queries: Buffer, layer: int, shape: AttentionShape) -> dict[str, int]:
    """Address of the queries and their stride per row and per head; quantizes them where keys are quantized."""
    layout = tape.kv_layout
    places = tape.addresses_of(queries=queries)
    if not is_quantized(layout.key_type):
        return places | {"query_head_bytes": 4 * shape.key_size}
    head_bytes = query_head_bytes(layout.head(layer).key_columns)
    stride = shape.num_heads * head_bytes
    target = tape.memory.shared("queries", tape.max_rows[Rows.BATCH] * stride)
    words = query_parameters(layout, layer, shape) | places
    words |= {"target": target, "target_stride": stride, "target_head_bytes": head_bytes}
    about = _about_attention(tape, layer, shape)
    tape.add("kv_store.quantize_queries", parameters.QUANTIZE_QUERIES.pack(**words), about=about)
    return {"queries": target, "queries_stride": stride, "query_head_bytes": head_bytes}


def rotation_size(size: int, name: str) -> int:
    """Elements of a head that are rotated together: the largest power of two that divides it; 1 where nothing is."""
    return size & -size if is_quantized(name) else 1


def query_head_bytes(columns: int) -> int:
    """Bytes of one quantized query, whole cache lines."""
    return -(-(columns + 8 * num_blocks(columns)) // 64) * 64


def check_limits(shape: AttentionShape) -> None:
    """Raise ShapeError unless the scratch memory fits what attention is asked for."""
    sizes, group = max(shape.key_size, shape.value_size), shape.num_heads // shape.num_kv_heads
    check(sizes <= kernel_abi.MAX_VALUE_SIZE, f"keys or values of {sizes} exceed the scratch memory")
    check(group <= kernel_abi.MAX_QUERIES_PER_UNIT, f"{group} heads share one KV head")


def partial_bytes(layout: KVLayout, layer: int, shape: AttentionShape) -> int:
    """Bytes that one row's results of one chunk take while they wait to be merged, at most.

    Eight queries are 16 maxima, 16 sums, and 8 rows of values, all float32.
    """
    eights = -(-shape.num_heads // shape.num_kv_heads // 8)
    return shape.num_kv_heads * eights * (128 + 32 * layout.head(layer).value_columns)


def attention_parameters(layout: KVLayout, layer: int, shape: AttentionShape) -> dict[str, Any]:
    """Words of an ATTENTION block, but for the addresses of queries, out, sinks and slopes."""
    head, group = layout.head(layer), shape.num_heads // shape.num_kv_heads
    steps = head.key_columns // _COLUMNS_PER_STEP[layout.key_type]
    element = {"f32": 4, "f16": 2}.get(layout.value_type, 0)
    return dict(
        group=group, kv_heads=shape.num_kv_heads, layer_offset=layout.layer_offset(layer), head_bytes=head.num_bytes,
        key_columns=head.key_columns, key_scales=head.key_scales, values=head.values, value_scales=head.value_scales,
        value_size=shape.value_size, value_columns=head.value_columns, value_row_bytes=element * head.value_columns,
        value_step=-(-(head.value_scales - head.values) // (2 * steps)), scale=shape.scale, softcap=shape.softcap,
        window=shape.reach[0],
        after=shape.reach[1],
        local_chunk=shape.chunk,
        rows_per_unit=max(1, min(kernel_abi.ROWS_PER_UNIT, kernel_abi.MAX_QUERIES_PER_UNIT // group)),
        rotation=rotation_size(shape.value_size, layout.value_type),
        table=parameters.SEGMENT.offset("windowed_table" if layout.layers[layer].window else "page_table"),
        own=0 if shape.excludes_own else 1, **dict.fromkeys(called_kernels(layout), 0),
    )  # fmt: skip


def chosen_parameters(layout: KVLayout, layer: int, chosen: SparseSelection | None) -> dict[str, int]:
    """Words of an ATTENTION block about a choice of positions, with no addresses."""
    head, shape = layout.head(layer), layout.layers[layer]
    codes = [is_quantized(name) for name in (layout.key_type, layout.value_type)]
    words = {
        "chosen": 0,
        "chosen_stride": 0,
        "chosen_lists": 1,
        "chosen_count": 0,
        "chosen_block": 1,
        "gathered": 0,
        "key_bytes": 2 if layout.key_type == "f16" else 4,
        "key_steps": head.key_columns // _COLUMNS_PER_STEP[layout.key_type],
        "key_blocks": num_blocks(shape.key_size) if codes[0] else 0,
        "value_share": {"q8_0": 2, "q4_0": 4}.get(layout.value_type, 1),
        "value_blocks": num_blocks(shape.value_size) if codes[1] else 0,
    }
    if chosen is not None:
        sizes = {"lists": chosen.num_lists, "count": chosen.count, "block": chosen.block_size}
        words |= {f"chosen_{name}": size for name, size in sizes.items()}
    return words


def relative_parameters() -> dict[str, int]:
    """Words of an ATTENTION block without biases by distance."""
    names = "buckets reach table_bias row_bias row_bias_stride key_bias key_bias_stride num_buckets"
    return dict.fromkeys(names.split(), 0)


def called_kernels(layout: KVLayout) -> dict[str, Kernel]:
    """Kernels that an `attention` op calls, by the word of ATTENTION that holds the address."""
    return {
        step: Kernel(f"attention_tiles.{step}_{kind}")
        for step, kind in (("score_keys", layout.key_type), ("weigh_values", layout.value_type))
    }


def query_parameters(layout: KVLayout, layer: int, shape: AttentionShape) -> dict[str, Any]:
    """Words of a QUANTIZE_QUERIES block, but for addresses and strides."""
    return dict(
        num_heads=shape.num_heads, size=shape.key_size, columns=layout.head(layer).key_columns,
        code_bias=_CODE_BIASES[layout.key_type], scale=shape.scale,
        rotation=rotation_size(shape.key_size, layout.key_type),
    )  # fmt: skip


def store_parameters(layout: KVLayout, layer: int) -> tuple[str, dict[str, Any]]:
    """The kernel that stores keys and values, and words of its STORE_KV block, but for their addresses and strides."""
    head, shape, start = layout.head(layer), layout.layers[layer], layout.layer_offset(layer)
    words = {
        "heads": shape.num_kv_heads,
        "head_bytes": head.num_bytes,
        "tables": parameters.BATCH.offset("windowed_tables" if shape.window else "page_tables"),
    }
    for part, name, size, columns, first, scales in (
        ("keys", layout.key_type, shape.key_size, head.key_columns, 0, head.key_scales),
        ("values", layout.value_type, shape.value_size, head.value_columns, head.values, head.value_scales),
    ):
        words |= {
            f"{part}_kind": _KINDS[name],
            f"{part}_size": size,
            f"{part}_columns": columns,
            f"{part}_first": start + first,
            f"{part}_scales": scales - first,
            f"{part}_rotation": rotation_size(size, name),
        }
    any_codes = is_quantized(layout.key_type) or is_quantized(layout.value_type)
    return "kv_store.store_codes" if any_codes else "kv_store.store_floats", words


LOWER: dict[type, Callable[[CpuTape, Any], None]] = {
    ops.Attention: _attention,
    ops.ChooseBlocks: _choose_blocks,
    ops.Rope: _rope,
    ops.RotateByRow: _rotate_by_row,
    ops.StoreKV: _store_kv,
}
