"""Attention over a paged cache: every chunk of positions separately, then the chunks are merged in order.

Chunks are at fixed positions and are merged from the first to the last, so a row's result depends only on its own
prefix. Source: flash-decoding (Dao et al., 2023) over the online softmax of FlashAttention (arXiv 2205.14135).
Pages are those of `kernels/kv_layout.py`. Codes of keys are multiplied by queries rotated and rounded to int8 as on the
CPU, four at once; codes of values are multiplied by their scales. Codes of four bits become bytes, sixteen times them.
"""

from numba import cuda, float32, int64, uint32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.activations import exponential, hyperbolic_tangent
from localinfer.kernels.cuda.compiled.kv_store import (
    CODES,
    HALF_BYTES,
    HALVES,
    PAGE,
    key_group_bytes,
    key_store_of,
    key_words_of,
    value_store_of,
)
from localinfer.kernels.cuda.compiled.last_block import is_last_block
from localinfer.kernels.cuda.compiled.merging import merge_of
from localinfer.kernels.cuda.compiled.reductions import warp_max, warp_sum
from localinfer.kernels.cuda.compiled.rotation import (
    block_scale,
    code_of,
    fold,
    rotation_factor,
    rotation_stages,
)
from localinfer.kernels.cuda.compiled.rows import ROPE, rotated
from localinfer.kernels.cuda.jit import inline, template
from localinfer.kernels.kv_layout import SCALE_BLOCK

THREADS = 128
CHUNK = 128
"""Positions of a chunk: one page per warp of a block."""
_WARPS = THREADS // 32
_POSITIONS = 8
"""Positions whose values a warp reads at once."""
_LANE_COLUMNS = 4
_COLUMNS = 32 * _LANE_COLUMNS
"""Columns of values of a lane and of a warp."""
_LINE = 128
"""Bytes of a cache line."""
REACH = "first_word second_word third_word"
OWN, LATER, RANGES = range(3)
"""Last position that a row attends to: its own, some after it, or the end of a range that the batch gives."""
LEAST = -3.0e38
"""Instead of minus infinity, whose difference from itself is NaN."""


@inline
def first_seen(position, window, span):
    """The first position that a row at `position` attends to."""
    first = position * 0
    if window > 0:
        first = max(first, position - window + 1)
    if span > 0:
        first = max(first, position // span * span)
    return first


@inline
def round_queries(query, words, scales, heads, size, head_words):
    """Rotated queries float32[heads][size] as words of four codes, and a scale per block; query is left as codes."""
    blocks = (size + SCALE_BLOCK - 1) // SCALE_BLOCK
    lane = ptx.thread() % 32
    block = ptx.thread() // 32
    while block < heads * blocks:
        head = block // blocks
        first = head * size + block % blocks * SCALE_BLOCK
        end = min(first + SCALE_BLOCK, head * size + size)
        scale = block_scale(query, first, end)
        if lane == 0:
            scales[block] = scale
        column = first + lane
        while column < end:
            query[column] = ptx.to_float(code_of(query[column], scale))
            column = column + 32
        block = block + THREADS // 32
    ptx.syncthreads()
    index = ptx.thread()
    while index < heads * head_words:
        word = int64(0)
        for c in range(4):
            column = index % head_words * 4 + c
            if column < size:
                word = word | ((int64(query[index // head_words * size + column]) & 255) << (8 * c))
        words[index] = word
        index = index + THREADS
    ptx.syncthreads()


def _bounds(key_kind, value_kind, heads, key_size, value_size, stores=0, quantizes=0, sight=OWN):
    """Registers enough to load many keys and values before the first is used."""
    return THREADS, 4


@template(
    floats="scale softcap",
    tuples={
        **ROPE,
        "fresh": "fresh_keys fresh_values",
        "fresh_rope": ROPE["rope"],
        "into": "out out_stride sinks counters codes codes_stride records records_stride",
        "reach": REACH,
    },
    bounds=_bounds,
)
def attend_chunks(key_kind, value_kind, heads, key_size, value_size, stores=0, quantizes=0, sight=OWN):
    """Attention of `heads` query heads of one KV head to one chunk, of [rows, KV heads * parts, chunks].

    stores: 1 for one row whose own keys and values, at `fresh`, the block that attends to them first writes into the
    cache; a KV head then has one part. quantizes: 1 if codes of what is written are wanted too. sight: LATER for rows
    that attend to later positions, up to `reach`: how many, and of every row the last one of its sequence; RANGES for
    rows that attend to positions from a first one on and before an end, both given in `reach` as is the position from
    which on they see what their window no longer holds.

    Writes to partials [row][head][chunk][value_size + 2]: largest score, sum of weights, weighted values, which are
    rotated still if they are codes. The last block of a row's heads merges them into out; see `merging`.
    into: out and its stride, sinks, counters of blocks per row and head, codes and records with their strides.
    """
    key_is_half_bytes = key_kind == HALF_BYTES
    key_is_codes = key_kind <= CODES
    key_is_half = key_kind == HALVES
    value_is_half_bytes = value_kind == HALF_BYTES
    value_is_codes = value_kind <= CODES
    value_is_half = value_kind == HALVES
    step = 32 if key_size % 32 == 0 else 8 if key_size % 8 == 0 else 1
    queries_size = heads * key_size
    scores_size = heads * CHUNK
    head_rounds = (heads + 3) // 4
    key_factor = rotation_factor(key_size) if key_is_codes else 1.0
    key_stages = rotation_stages(key_size)
    key_blocks = -(-key_size // SCALE_BLOCK)
    # Words of queries: a word of half bytes meets two of them.
    key_words = key_words_of(key_kind, key_size)
    word_step = 4 if key_words % 4 == 0 else 2 if key_is_half_bytes else 1
    pair_step = word_step // 2
    key_group = key_group_bytes(key_kind, key_size)
    code_unit = 0.0625 if key_is_half_bytes else 1.0
    block_words = SCALE_BLOCK // 4
    words_size = heads * key_words
    query_blocks = heads * key_blocks
    value_blocks = -(-value_size // SCALE_BLOCK)
    value_scales_size = value_blocks * CHUNK
    column_rounds = -(-value_size // _COLUMNS)
    sums_size = heads * _LANE_COLUMNS
    loaded_size = _POSITIONS * _LANE_COLUMNS
    merged_size = max(_WARPS * heads * _COLUMNS, heads * value_size if value_is_codes else 0)
    store_key = key_store_of(key_kind, key_size)
    store_value = value_store_of(value_kind, value_size, not key_is_codes)
    merge = merge_of(heads, value_size, value_is_codes, quantizes == 1)
    is_ranged = sight == RANGES
    sees_later = sight != OWN
    fresh_key_size = key_size if key_is_codes else 1
    fresh_value_size = value_size if value_is_codes else 1

    def kernel(
        queries, queries_stride, positions, page_tables, partials, partial_chunks,
        num_heads, group_heads, head_bytes, layer_offset, key_scales, values_offset, value_scales, value_columns,
        window, span, slopes, rope, scale, softcap, fresh, fresh_rope, into, reach,
    ):  # fmt: skip
        row = ptx.block_x()
        first = ptx.block_z() * CHUNK
        pages = ptx.load_i64(page_tables + 8 * row)
        position = ptx.load_i64(positions + 8 * row)
        least = first_seen(position, window, span)
        last = position
        if is_ranged:
            least = max(min(least, ptx.load_i64(reach[2] + 8 * row)), ptx.load_i64(reach[0] + 8 * row))
            last = ptx.load_i64(reach[1] + 8 * row) - 1
        elif sees_later:
            last = min(position + reach[0], ptx.load_i64(reach[1] + 8 * row))
        if pages != 0 and first <= last and first + CHUNK > least:
            lane = ptx.thread() % 32
            warp = ptx.thread() // 32
            parts = (group_heads + heads - 1) // heads
            kv_head = ptx.block_y() // parts
            first_head = kv_head * group_heads + ptx.block_y() % parts * heads
            last_head = kv_head * group_heads + group_heads - 1
            page_first = first + PAGE * warp
            if page_first <= last and page_first + PAGE > least:
                # The page's keys and values are under way while queries are read and rotated.
                place = ptx.load_i64(pages + page_first // PAGE * 8) + layer_offset + kv_head * head_bytes
                offset = _LINE * lane
                while offset < head_bytes:
                    ptx.prefetch(place + offset)
                    offset = offset + _LINE * 32
            if stores:
                fresh_key = cuda.shared.array(fresh_key_size, float32)
                fresh_value = cuda.shared.array(fresh_value_size, float32)
                if position < first + CHUNK:
                    # Read by this block alone, after the barriers below.
                    within = position % PAGE
                    place = ptx.load_i64(pages + position // PAGE * 8) + layer_offset + kv_head * head_bytes
                    source = fresh[0] + 4 * kv_head * key_size
                    store_key(fresh_key, source, fresh_rope, row, place, within, key_scales)
                    source = fresh[1] + 4 * kv_head * value_size
                    scales = place + value_scales
                    store_value(fresh_value, source, place + values_offset, within, scales, value_columns)
            query = cuda.shared.array(queries_size, float32)
            scores = cuda.shared.array(scores_size, float32)
            factor = scale
            if key_is_codes:
                factor = float32(key_factor)
            index = ptx.thread()
            while index < queries_size:
                head = min(first_head + index // key_size, last_head)
                source = queries + row * queries_stride + 4 * head * key_size
                query[index] = factor * rotated(source, index % key_size, rope, row)
                index = index + THREADS
            if key_is_codes:
                query_words = cuda.shared.array(words_size, uint32)
                query_scales = cuda.shared.array(query_blocks, float32)
                fold(query, queries_size, key_stages)
                round_queries(query, query_words, query_scales, heads, key_size, key_words)
            else:
                ptx.syncthreads()

            sums = cuda.local.array(heads, float32)
            for h in range(heads):
                sums[h] = float32(0.0)
            seen = first + ptx.thread()
            is_seen = least <= seen <= last
            if value_is_codes:
                # Weights and scales of masked positions are 0, whatever their page contains.
                position_scales = cuda.shared.array(value_scales_size, float32)
                for b in range(value_blocks):
                    value = float32(0.0)
                    if is_seen:
                        place = ptx.load_i64(pages + seen // PAGE * 8) + layer_offset + kv_head * head_bytes
                        value = ptx.half_to_float(ptx.load_u16(place + value_scales + 64 * b + 2 * lane))
                    position_scales[b * CHUNK + ptx.thread()] = value
            if is_seen:
                place = ptx.load_i64(pages + seen // PAGE * 8) + layer_offset + kv_head * head_bytes
                if key_is_codes:
                    dots = cuda.local.array(heads, int64)
                    half_scales = place + key_scales + lane // 16 * 32 * key_blocks + lane % 16 * 2
                    place = place + lane // 16 * key_group + lane % 16 * 4
                    block = 0
                    while block < key_blocks:
                        for h in range(heads):
                            dots[h] = int64(0)
                        word = block * block_words
                        end = min(word + block_words, key_words)
                        while word < end:
                            if key_is_half_bytes:
                                for c in range(pair_step):
                                    loaded = ptx.load_u32(place + 32 * (word + 2 * c))
                                    low = (loaded << 4 & 0xF0F0F0F0) ^ 0x80808080
                                    high = (loaded & 0xF0F0F0F0) ^ 0x80808080
                                    for h in range(heads):
                                        at = h * key_words + word + 2 * c
                                        dots[h] = ptx.dot_signed(low, query_words[at], dots[h])
                                        dots[h] = ptx.dot_signed(high, query_words[at + 1], dots[h])
                            else:
                                for c in range(word_step):
                                    key_word = ptx.load_u32(place + 64 * (word + c)) ^ 0x80808080
                                    for h in range(heads):
                                        at = h * key_words + word + c
                                        dots[h] = ptx.dot_signed(key_word, query_words[at], dots[h])
                            word = word + word_step
                        key_scale = scale * ptx.half_to_float(ptx.load_u16(half_scales + 32 * block))
                        key_scale = key_scale * float32(code_unit)
                        for h in range(heads):
                            sums[h] = sums[h] + ptx.to_float(dots[h]) * (
                                key_scale * query_scales[h * key_blocks + block]
                            )
                        block = block + 1
                else:
                    element = lane // 16 * key_size * 16 + lane % 16
                    keys = cuda.local.array(step, float32)
                    column = 0
                    while column < key_size:
                        for c in range(step):
                            if key_is_half:
                                keys[c] = ptx.half_to_float(ptx.load_u16(place + 2 * (element + 16 * (column + c))))
                            else:
                                keys[c] = ptx.load_f32(place + 4 * (element + 16 * (column + c)))
                        for c in range(step):
                            for h in range(heads):
                                sums[h] = sums[h] + query[h * key_size + column + c] * keys[c]
                        column = column + step
            for h in range(heads):
                score = sums[h]
                if softcap > float32(0.0):
                    score = softcap * hyperbolic_tangent(ptx.divide(score, softcap))
                if slopes != 0:
                    head = min(first_head + h, last_head)
                    distance = seen - position
                    if sees_later:
                        distance = -abs(distance)
                    score = score + ptx.load_f32(slopes + 4 * head) * ptx.to_float(distance)
                if not is_seen:
                    score = float32(LEAST)
                scores[h * CHUNK + ptx.thread()] = score
            ptx.syncthreads()

            for head_round in range(head_rounds):
                h = head_round * 4 + warp
                if h < heads:
                    largest = float32(LEAST)
                    for quarter in range(4):
                        largest = ptx.maximum(largest, scores[h * CHUNK + 32 * quarter + lane])
                    largest = warp_max(largest)
                    total = float32(0.0)
                    for quarter in range(4):
                        place = h * CHUNK + 32 * quarter + lane
                        weight = float32(0.0)
                        if least <= first + 32 * quarter + lane <= last:
                            weight = exponential(scores[place] - largest)
                        scores[place] = weight
                        total = total + weight
                    total = warp_sum(total)
                    if lane == 0 and first_head + h <= last_head:
                        part = (row * num_heads + first_head + h) * partial_chunks + ptx.block_z()
                        ptx.store_f32(partials + part * (4 * value_size + 8), largest)
                        ptx.store_f32(partials + part * (4 * value_size + 8) + 4, total)
            ptx.syncthreads()

            # A warp sums the positions of one page, a lane four columns, and warps are added in order.
            values = cuda.local.array(loaded_size, float32)
            partial = cuda.local.array(sums_size, float32)
            merged = cuda.shared.array(merged_size, float32)
            start = max(least - page_first, 0) // _POSITIONS * _POSITIONS
            end = min(last - page_first, PAGE - 1)
            for column_round in range(column_rounds):
                column = _COLUMNS * column_round + _LANE_COLUMNS * lane
                for i in range(sums_size):
                    partial[i] = float32(0.0)
                if column < value_size and start <= end:
                    place = ptx.load_i64(pages + page_first // PAGE * 8) + layer_offset + kv_head * head_bytes
                    place = place + values_offset
                    inner = start
                    while inner <= end:
                        # Positions past the end have no weight, and read the last.
                        if value_is_half_bytes:
                            for four in range(_POSITIONS // 4):
                                within = min(inner + 4 * four, end) // 4
                                words = place + within * 2 * value_columns + column // 32 * 64 + column % 16 * 4
                                loaded = ptx.load_v4(words)
                                for byte in range(4):
                                    # Bytes are of positions 0, 2, 1 and 3.
                                    c = 4 * four + byte % 2 * 2 + byte // 2
                                    scales = column // SCALE_BLOCK * CHUNK + PAGE * warp + inner + c
                                    for k in range(_LANE_COLUMNS):
                                        code = (loaded[k] >> (8 * byte + column % 32 // 16 * 4)) & 15
                                        value = position_scales[scales] * ptx.to_float(code - 8)
                                        values[c * _LANE_COLUMNS + k] = value
                        elif value_is_codes:
                            for pair in range(_POSITIONS // 2):
                                within = min(inner + 2 * pair, end) // 2
                                loaded = ptx.load_v2(place + within * 2 * value_columns + 2 * column)
                                for odd in range(2):
                                    scales = column // SCALE_BLOCK * CHUNK + PAGE * warp + inner + 2 * pair + odd
                                    for k in range(_LANE_COLUMNS):
                                        code = (loaded[k // 2] >> (16 * (k % 2) + 8 * odd)) & 255
                                        value = position_scales[scales] * ptx.to_float((code ^ 128) - 128)
                                        values[(2 * pair + odd) * _LANE_COLUMNS + k] = value
                        elif value_is_half:
                            for c in range(_POSITIONS):
                                within = min(inner + c, end)
                                loaded = ptx.load_v2(place + 2 * (within * value_columns + column))
                                for k in range(_LANE_COLUMNS):
                                    half = (loaded[k // 2] >> (16 * (k % 2))) & 0xFFFF
                                    values[c * _LANE_COLUMNS + k] = ptx.half_to_float(half)
                        else:
                            for c in range(_POSITIONS):
                                within = min(inner + c, end)
                                loaded = ptx.load_v4(place + 4 * (within * value_columns + column))
                                for k in range(_LANE_COLUMNS):
                                    values[c * _LANE_COLUMNS + k] = ptx.bits_float(loaded[k])
                        for c in range(_POSITIONS):
                            for h in range(heads):
                                weight = scores[h * CHUNK + PAGE * warp + inner + c]
                                for k in range(_LANE_COLUMNS):
                                    at = h * _LANE_COLUMNS + k
                                    partial[at] = partial[at] + weight * values[c * _LANE_COLUMNS + k]
                        inner = inner + _POSITIONS
                if column_round > 0:
                    ptx.syncthreads()
                for h in range(heads):
                    for k in range(_LANE_COLUMNS):
                        at = (warp * heads + h) * _COLUMNS + _LANE_COLUMNS * lane + k
                        merged[at] = partial[h * _LANE_COLUMNS + k]
                ptx.syncthreads()
                column = _COLUMNS * column_round + ptx.thread()
                if column < value_size:
                    for h in range(heads):
                        total = float32(0.0)
                        for w in range(_WARPS):
                            total = total + merged[(w * heads + h) * _COLUMNS + ptx.thread()]
                        if first_head + h <= last_head:
                            part = (row * num_heads + first_head + h) * partial_chunks + ptx.block_z()
                            ptx.store_f32(partials + part * (4 * value_size + 8) + 8 + 4 * column, total)

            out, out_stride, sinks, counters, codes, codes_stride, records, records_stride = into
            first_chunk = least // CHUNK
            last_chunk = last // CHUNK
            partials = partials + row * num_heads * partial_chunks * (4 * value_size + 8)
            if is_last_block(counters + 4 * (row * num_heads + first_head), last_chunk - first_chunk + 1):
                out = out + row * out_stride
                codes = codes + row * codes_stride
                records = records + row * records_stride
                merge(
                    partials, partial_chunks, first_chunk, last_chunk, first_head, last_head,
                    sinks, merged, out, codes, records,
                )  # fmt: skip

    return kernel
