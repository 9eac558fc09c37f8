"""Attention over a paged cache: every chunk of positions by itself, then the chunks in order.

Chunks lie at fixed positions and are merged from the first to the last, so a row's result depends on its own prefix
alone. Source: flash-decoding (Dao et al., 2023) over the online softmax of FlashAttention (arXiv 2205.14135).
Pages are those of `kernels/kv_layout.py`, of float16 or float32.
"""

from numba import cuda, float32

from localinfer.kernels.cuda.compiled.activations import exponential, hyperbolic_tangent
from localinfer.kernels.cuda.compiled.ptx import (
    block_x,
    block_y,
    block_z,
    divide,
    float_to_half,
    half_to_float,
    load_f32,
    load_i64,
    load_u16,
    maximum,
    meet,
    shuffle,
    store_f32,
    store_u16,
    thread,
    to_float,
)
from localinfer.kernels.cuda.compiled.quantize import store_quantized
from localinfer.kernels.cuda.compiled.rows import rotated
from localinfer.kernels.cuda.jit import inline, template

THREADS = 128
CHUNK = 128
"""Positions of a chunk: a page to each of a block's four warps."""
PAGE = 32
LEAST = -3.0e38
"""Instead of minus infinity, whose difference from itself is no number."""


@inline
def first_seen(position, window, span):
    """The first position that a row at `position` looks at."""
    first = position * 0
    if window > 0:
        first = max(first, position - window + 1)
    if span > 0:
        first = max(first, position // span * span)
    return first


@template("qqqqqqqqqqqqqqqqq")
def store_kv(key_bytes, value_bytes):
    """Write rows into their pages, keys after RoPE if num_pairs is not 0.

    A thread to an element, of [kv_heads * (key_size + value_columns) / 128, rows]. Rows without a page table stay out.
    """
    key_is_half = key_bytes == 2
    value_is_half = value_bytes == 2

    def kernel(
        keys, keys_stride, values, values_stride, positions, page_tables,
        layer_offset, head_bytes, values_offset, num_kv_heads, key_size, value_size, value_columns,
        angles, num_pairs, halves, offset,
    ):  # fmt: skip
        index = block_x() * THREADS + thread()
        row = block_y()
        pages = load_i64(page_tables + 8 * row)
        head_columns = key_size + value_columns
        if pages != 0 and index < num_kv_heads * head_columns:
            position = load_i64(positions + 8 * row)
            within = position % PAGE
            head = index // head_columns
            column = index % head_columns
            place = load_i64(pages + position // PAGE * 8) + layer_offset + head * head_bytes
            if column < key_size:
                source = keys + row * keys_stride + 4 * head * key_size
                value = rotated(source, column, angles + row * num_pairs * 8, num_pairs, halves, offset)
                element = (within // 16 * key_size + column) * 16 + within % 16
                if key_is_half:
                    store_u16(place + 2 * element, float_to_half(value))
                else:
                    store_f32(place + 4 * element, value)
            else:
                column = column - key_size
                value = float32(0.0)
                if column < value_size:
                    value = load_f32(values + row * values_stride + 4 * (head * value_size + column))
                element = within * value_columns + column
                if value_is_half:
                    store_u16(place + values_offset + 2 * element, float_to_half(value))
                else:
                    store_f32(place + values_offset + 4 * element, value)

    return kernel


@template("qqqqqqqqqqqqqqqqqqff")
def attend_chunks(key_bytes, value_bytes, heads, key_size, value_size):
    """Attention of `heads` query heads of one KV head to one chunk, of [rows, KV heads * parts, chunks].

    Writes to partials [row][head][chunk][value_size + 2]: largest score, sum of weights, weighted values.
    """
    key_is_half = key_bytes == 2
    value_is_half = value_bytes == 2
    step = 8 if key_size % 8 == 0 else 1
    queries_size = heads * key_size
    scores_size = heads * CHUNK
    head_rounds = (heads + 3) // 4

    def kernel(
        queries, queries_stride, positions, page_tables, partials, partial_chunks,
        num_heads, group_heads, head_bytes, layer_offset, values_offset, value_columns,
        window, span, slopes, angles, num_pairs, halves_and_offset, scale, softcap,
    ):  # fmt: skip
        row = block_x()
        first = block_z() * CHUNK
        pages = load_i64(page_tables + 8 * row)
        position = load_i64(positions + 8 * row)
        least = first_seen(position, window, span)
        if pages != 0 and first <= position and first + CHUNK > least:
            lane = thread() % 32
            warp = thread() // 32
            parts = (group_heads + heads - 1) // heads
            kv_head = block_y() // parts
            first_head = kv_head * group_heads + block_y() % parts * heads
            last_head = kv_head * group_heads + group_heads - 1
            halves = halves_and_offset % 2
            offset = halves_and_offset // 2
            query = cuda.shared.array(queries_size, float32)
            scores = cuda.shared.array(scores_size, float32)
            index = thread()
            while index < queries_size:
                head = min(first_head + index // key_size, last_head)
                source = queries + row * queries_stride + 4 * head * key_size
                row_angles = angles + row * num_pairs * 8
                query[index] = scale * rotated(source, index % key_size, row_angles, num_pairs, halves, offset)
                index = index + THREADS
            meet()

            sums = cuda.local.array(heads, float32)
            for h in range(heads):
                sums[h] = float32(0.0)
            seen = first + thread()
            is_seen = least <= seen <= position
            if is_seen:
                place = load_i64(pages + seen // PAGE * 8) + layer_offset + kv_head * head_bytes
                element = lane // 16 * key_size * 16 + lane % 16
                column = 0
                while column < key_size:
                    for c in range(step):
                        if key_is_half:
                            key = half_to_float(load_u16(place + 2 * (element + 16 * (column + c))))
                        else:
                            key = load_f32(place + 4 * (element + 16 * (column + c)))
                        for h in range(heads):
                            sums[h] = sums[h] + query[h * key_size + column + c] * key
                    column = column + step
            for h in range(heads):
                score = sums[h]
                if softcap > float32(0.0):
                    score = softcap * hyperbolic_tangent(divide(score, softcap))
                if slopes != 0:
                    head = min(first_head + h, last_head)
                    score = score + load_f32(slopes + 4 * head) * to_float(seen - position)
                if not is_seen:
                    score = float32(LEAST)
                scores[h * CHUNK + thread()] = score
            meet()

            for turn in range(head_rounds):
                h = turn * 4 + warp
                if h < heads:
                    largest = float32(LEAST)
                    for quarter in range(4):
                        largest = maximum(largest, scores[h * CHUNK + 32 * quarter + lane])
                    for distance in (16, 8, 4, 2, 1):
                        largest = maximum(largest, shuffle(largest, distance))
                    total = float32(0.0)
                    for quarter in range(4):
                        place = h * CHUNK + 32 * quarter + lane
                        weight = float32(0.0)
                        if least <= first + 32 * quarter + lane <= position:
                            weight = exponential(scores[place] - largest)
                        scores[place] = weight
                        total = total + weight
                    for distance in (16, 8, 4, 2, 1):
                        total = total + shuffle(total, distance)
                    if lane == 0 and first_head + h <= last_head:
                        part = (row * num_heads + first_head + h) * partial_chunks + block_z()
                        store_f32(partials + part * (4 * value_size + 8), largest)
                        store_f32(partials + part * (4 * value_size + 8) + 4, total)
            meet()

            start = max(least - first, 0) // 4 * 4
            end = min(position - first, CHUNK - 1)
            column = thread()
            while column < value_size:
                for h in range(heads):
                    sums[h] = float32(0.0)
                inner = start
                while inner <= end:
                    # Four positions lie in one page; those past the end have no weight and read the last.
                    table = pages + (first + inner) // PAGE * 8
                    place = load_i64(table) + layer_offset + kv_head * head_bytes + values_offset
                    for c in range(4):
                        element = min(inner + c, end) % PAGE * value_columns + column
                        if value_is_half:
                            value = half_to_float(load_u16(place + 2 * element))
                        else:
                            value = load_f32(place + 4 * element)
                        for h in range(heads):
                            sums[h] = sums[h] + scores[h * CHUNK + inner + c] * value
                    inner = inner + 4
                for h in range(heads):
                    if first_head + h <= last_head:
                        part = (row * num_heads + first_head + h) * partial_chunks + block_z()
                        store_f32(partials + part * (4 * value_size + 8) + 8 + 4 * column, sums[h])
                column = column + THREADS

    return kernel


@template("qqqqqqqqqqqqqqq")
def merge_chunks(quantizes):
    """Join the chunks of every row and head, from the first to the last, of [heads, rows]."""

    def kernel(
        out, out_stride, positions, page_tables, partials, partial_chunks, num_heads, value_size,
        window, span, sinks, codes, codes_stride, records, records_stride,
    ):  # fmt: skip
        head = block_x()
        row = block_y()
        if load_i64(page_tables + 8 * row) != 0:
            position = load_i64(positions + 8 * row)
            first = first_seen(position, window, span) // CHUNK
            last = position // CHUNK
            stride = 4 * value_size + 8
            base = partials + (row * num_heads + head) * partial_chunks * stride
            largest = float32(LEAST)
            if sinks != 0:
                largest = load_f32(sinks + 4 * head)
            chunk = first
            while chunk <= last:
                largest = maximum(largest, load_f32(base + chunk * stride))
                chunk = chunk + 1
            column = thread()
            while column < value_size:
                total = float32(0.0)
                if sinks != 0:
                    total = exponential(load_f32(sinks + 4 * head) - largest)
                value = float32(0.0)
                chunk = first
                while chunk <= last:
                    weight = exponential(load_f32(base + chunk * stride) - largest)
                    total = total + weight * load_f32(base + chunk * stride + 4)
                    value = value + weight * load_f32(base + chunk * stride + 8 + 4 * column)
                    chunk = chunk + 1
                value = divide(value, total)
                whole = head * value_size + column
                store_f32(out + row * out_stride + 4 * whole, value)
                if quantizes:
                    lane = thread() % 32
                    store_quantized(value, lane, codes + row * codes_stride, records + row * records_stride, whole)
                column = column + THREADS

    return kernel
