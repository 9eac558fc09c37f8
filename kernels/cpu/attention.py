"""The parameters of the attention ops, from the layout of the cache and the shape of the attention."""

from typing import Any

import numpy as np

from localinfer.kernels.cpu import kernel_abi
from localinfer.kernels.cpu.memory import zeros
from localinfer.kernels.cpu.parameters import BATCH, SEGMENT
from localinfer.kernels.graph_builder import check
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout, is_quantized, num_blocks
from localinfer.kernels.ops import AttentionShape, Chosen
from localinfer.types import FloatArray

_KINDS = {
    "f32": kernel_abi.KIND_F32, "f16": kernel_abi.KIND_F16, "q8_0": kernel_abi.KIND_Q8_0, "q4_0": kernel_abi.KIND_Q4_0
}  # fmt: skip
_COLUMNS_PER_STEP = {"f32": 1, "f16": 1, "q8_0": 4, "q4_0": 8}
_CODE_BIASES = {"q8_0": 128, "q4_0": 8}


def rotation_size(size: int, name: str) -> int:
    """Elements of a head that are rotated together: the largest power of two that divides it; 1 where nothing is."""
    return size & -size if is_quantized(name) else 1


def query_head_bytes(columns: int) -> int:
    """Bytes of one quantized query, whole cache lines."""
    return -(-(columns + 8 * num_blocks(columns)) // 64) * 64


def attention_sum_arrays(layout: KVLayout, num_segments: int, num_tokens: int) -> FloatArray:
    """float32[segments, heads, pages] of zeros, for `attention_sums` ops over sequences of at most so many tokens."""
    heads = max((shape.num_kv_heads for shape in layout.layers), default=1)
    return zeros((num_segments, heads, -(-num_tokens // layout.page_tokens)), np.float32)


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
        table=SEGMENT.offset("windowed_table" if layout.layers[layer].window else "page_table"),
        own=0 if shape.excludes_own else 1, **dict.fromkeys(called_kernels(layout), 0),
    )  # fmt: skip


def chosen_parameters(layout: KVLayout, layer: int, chosen: Chosen | None) -> dict[str, int]:
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
    """What an `attention` op calls, by the word of ATTENTION that holds its address."""
    return {
        step: Kernel(f"{'attention_codes' if is_quantized(kind) else 'attention_tiles'}.{step}_{kind}")
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
        "tables": BATCH.offset("windowed_tables" if shape.window else "page_tables"),
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
