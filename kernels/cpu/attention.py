"""The parameter blocks of the attention ops: one order for the tape that writes them and the kernels that read them.

Offsets are in bytes; every word is an int64, a float its bits.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from localinfer.kernels.cpu import kernel_abi
from localinfer.kernels.graph_builder import check
from localinfer.kernels.jit.object_cache import Kernel
from localinfer.kernels.kv_layout import KVLayout, is_quantized, num_blocks
from localinfer.kernels.ops import AttentionShape, FloatArray

# An `attention` op. Queries are float32 rows, or what `quantize_queries` made of them.
QUERIES = 0
QUERIES_STRIDE = 8
QUERY_HEAD_BYTES = 16
OUT = 24
OUT_STRIDE = 32
GROUP = 40
"""Query heads per KV head."""
KV_HEADS = 48
LAYER_OFFSET = 56
HEAD_BYTES = 64
KEY_COLUMNS = 72
KEY_SCALES = 80
VALUES = 88
VALUE_SCALES = 96
VALUE_SIZE = 104
VALUE_COLUMNS = 112
VALUE_ROW_BYTES = 120
"""Of unquantized values."""
VALUE_STEP = 128
"""Bytes of values to fetch while one vector of keys is computed."""
SCALE = 136
SOFTCAP = 144
WINDOW = 152
LOCAL_CHUNK = 160
SINKS = 168
SLOPES = 176
ROWS_PER_UNIT = 184
ROTATION = 192
"""Size of the rotation to undo in every head of the result; 1 for none."""
SCORE_KEYS = 200
WEIGH_VALUES = 208
"""Addresses of the pieces for this cache's types."""

TABLE = 216
"""Which word of a segment has the table of this layer's pages."""

# A `attention_sums` op goes on after the words of `attention`.
MASS_OUT = 224
"""Address of float32[segments][heads][pages]."""
MASS_HEADS = 232
MASS_PAGES = 240
MASS_WORK = 248
"""Address of memory per thread: eight queries' maxima and sums, float32 per page."""
MASS_ROWS = 8
"""Rows at the end of a sequence's part of a batch that are measured."""

# A `quantize_queries` op begins with the first two words of `attention`, of float32 queries.
TARGET = 16
TARGET_STRIDE = 24
TARGET_HEAD_BYTES = 32
NUM_HEADS = 40
QUERY_SIZE = 48
QUERY_COLUMNS = 56
CODE_BIAS = 64
"""By how much the stored codes of keys exceed what they mean."""
QUERY_SCALE = 72
QUERY_ROTATION = 80

# A `store_floats` or `store_codes` op: two words, then a part for keys and one for values.
STORE_HEADS = 0
STORE_HEAD_BYTES = 8
STORE_KEYS = 16
STORE_VALUES = 80
STORE_TABLES = 144
"""Which word of the batch header has the tables of this layer's pages."""
PART_SOURCE = 0
PART_STRIDE = 8
PART_KIND = 16
PART_SIZE = 24
PART_COLUMNS = 32
PART_OFFSET = 40
"""Of the first head's keys or values in a page."""
PART_SCALES = 48
"""From keys or values to their scales."""
PART_ROTATION = 56

KIND_F32, KIND_F16, KIND_Q8_0, KIND_Q4_0 = range(4)
_KINDS = {"f32": KIND_F32, "f16": KIND_F16, "q8_0": KIND_Q8_0, "q4_0": KIND_Q4_0}
_COLUMNS_PER_STEP = {"f32": 1, "f16": 1, "q8_0": 4, "q4_0": 8}
_CODE_BIASES = {"q8_0": 128, "q4_0": 8}


def _words(values: dict[int, int]) -> NDArray[np.int64]:
    """A parameter block from words by their offset; offsets left out are 0."""
    block = np.zeros(max(values) // 8 + 1, np.int64)
    for offset, value in values.items():
        block[offset // 8] = value
    return block


def float_word(value: float) -> int:
    """A float32 as the integer a parameter word holds."""
    return int(np.float32(value).view(np.uint32))


def rotation_size(size: int, name: str) -> int:
    """Elements of a head that are rotated together: the largest power of two that divides it; 1 where nothing is."""
    return size & -size if is_quantized(name) else 1


def query_head_bytes(columns: int) -> int:
    """Bytes of one quantized query, whole cache lines."""
    return -(-(columns + 8 * num_blocks(columns)) // 64) * 64


def attention_sum_arrays(layout: KVLayout, num_segments: int, num_tokens: int) -> FloatArray:
    """float32[segments, heads, pages] of zeros, for `attention_sums` ops over sequences of at most so many tokens."""
    heads = max((shape.num_kv_heads for shape in layout.layers), default=1)
    return np.zeros((num_segments, heads, -(-num_tokens // layout.page_tokens)), np.float32)


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


def attention_words(
    layout: KVLayout, layer: int, shape: AttentionShape, places: Mapping[int, Sequence[int]]
) -> NDArray[np.int64]:
    """The block of an `attention` op. places: words of queries, out, sinks and slopes, by the offset of the first."""
    head, group = layout.head(layer), shape.num_heads // shape.num_kv_heads
    steps = head.key_columns // _COLUMNS_PER_STEP[layout.key_type]
    element = {"f32": 4, "f16": 2}.get(layout.value_type, 0)
    block = {
        KV_HEADS: shape.num_kv_heads,
        LAYER_OFFSET: layout.layer_offset(layer),
        HEAD_BYTES: head.num_bytes,
        KEY_COLUMNS: head.key_columns,
        KEY_SCALES: head.key_scales,
        VALUES: head.values,
        VALUE_SCALES: head.value_scales,
        VALUE_SIZE: shape.value_size,
        VALUE_COLUMNS: head.value_columns,
        VALUE_ROW_BYTES: element * head.value_columns,
        VALUE_STEP: -(-(head.value_scales - head.values) // (2 * steps)),
        ROTATION: rotation_size(shape.value_size, layout.value_type),
        GROUP: group,
        SCALE: float_word(shape.scale),
        SOFTCAP: float_word(shape.softcap),
        WINDOW: shape.window,
        LOCAL_CHUNK: shape.chunk,
        ROWS_PER_UNIT: max(1, min(kernel_abi.ROWS_PER_UNIT, kernel_abi.MAX_QUERIES_PER_UNIT // group)),
        TABLE: kernel_abi.SEGMENT_WINDOWED_TABLE if layout.layers[layer].window else kernel_abi.SEGMENT_TABLE,
    }
    for first, values in places.items():
        block |= {first + 8 * index: value for index, value in enumerate(values)}
    return _words(block | dict.fromkeys(pieces(layout), 0))


def query_words(
    layout: KVLayout, layer: int, shape: AttentionShape, source: tuple[int, int], target: tuple[int, int, int]
) -> NDArray[np.int64]:
    """The block of a `quantize_queries` op: from address and stride to address and strides per row and head."""
    return _words(
        {
            QUERIES: source[0],
            QUERIES_STRIDE: source[1],
            TARGET: target[0],
            TARGET_STRIDE: target[1],
            TARGET_HEAD_BYTES: target[2],
            NUM_HEADS: shape.num_heads,
            QUERY_SIZE: shape.key_size,
            QUERY_COLUMNS: layout.head(layer).key_columns,
            CODE_BIAS: _CODE_BIASES[layout.key_type],
            QUERY_SCALE: float_word(shape.scale),
            QUERY_ROTATION: rotation_size(shape.key_size, layout.key_type),
        }
    )


def store_words(
    layout: KVLayout, layer: int, keys: tuple[int, int], values: tuple[int, int]
) -> tuple[Kernel, NDArray[np.int64]]:
    """The op that stores keys and values, given the address and stride of their rows."""
    head, shape, start = layout.head(layer), layout.layers[layer], layout.layer_offset(layer)
    tables = kernel_abi.WINDOWED_TABLES if shape.window else kernel_abi.PAGE_TABLES
    block = {STORE_HEADS: shape.num_kv_heads, STORE_HEAD_BYTES: head.num_bytes, STORE_TABLES: tables}
    parts = (
        (STORE_KEYS, keys, layout.key_type, shape.key_size, head.key_columns, 0, head.key_scales),
        (STORE_VALUES, values, layout.value_type, shape.value_size, head.value_columns, head.values, head.value_scales),
    )
    for part, (source, stride), name, size, columns, offset, scales in parts:
        block |= {
            part + PART_SOURCE: source,
            part + PART_STRIDE: stride,
            part + PART_KIND: _KINDS[name],
            part + PART_SIZE: size,
            part + PART_COLUMNS: columns,
            part + PART_OFFSET: start + offset,
            part + PART_SCALES: scales - offset,
            part + PART_ROTATION: rotation_size(size, name),
        }
    any_codes = is_quantized(layout.key_type) or is_quantized(layout.value_type)
    return Kernel("kv_store.store_codes" if any_codes else "kv_store.store_floats"), _words(block)


def pieces(layout: KVLayout) -> dict[int, Kernel]:
    """What an `attention` op calls, by the word that holds its address."""
    return {
        SCORE_KEYS: Kernel(f"attention_pieces.score_keys_{layout.key_type}"),
        WEIGH_VALUES: Kernel(f"attention_pieces.weigh_values_{layout.value_type}"),
    }
