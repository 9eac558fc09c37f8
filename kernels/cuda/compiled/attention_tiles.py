"""Attention of many rows of one sequence on tensor cores: the rows and query heads of a tile share every key and value.

A tile iterates over its pages from the first to the last, with a running maximum; positions are fixed in a
step, so a row's result depends only on its own prefix. Queries and weights are rounded to float16, codes of keys and
values are converted to float16 with their scales, and sums are float32.
Source: FlashAttention-2 (arXiv 2307.08691), algorithm 1.

No measurement on a GPU has justified this file yet: what the first run shows to be no gain is to be deleted.
"""

from numba import cuda, float32, int64, uint32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.activations import exponential, hyperbolic_tangent
from localinfer.kernels.cuda.compiled.attention import LEAST, OWN, RANGES, REACH, first_seen
from localinfer.kernels.cuda.compiled.half_bytes import stage_key_half_bytes, stage_value_half_bytes
from localinfer.kernels.cuda.compiled.kv_store import CODES, HALF_BYTES, PAGE
from localinfer.kernels.cuda.compiled.rows import ROPE, rotated
from localinfer.kernels.cuda.jit import inline, template
from localinfer.kernels.kv_layout import SCALE_BLOCK

MOST_COLUMNS = 128
"""Columns of values per block: their sums are in registers."""
VALUE_STRIDE = PAGE // 2 + 4
"""32-bit words between columns of values, so that the lanes of a warp have no bank conflicts."""


@inline
def signed_byte(word, number):
    """Byte `number` of a word, as float32."""
    return ptx.to_float((((word >> (8 * number)) & 255) ^ 128) - 128)


@inline
def stage_half_keys(key, place, key_size, steps, threads):
    """Keys of a page, float16, as pairs of dimensions of each position."""
    stride = 8 * steps + 4
    index = ptx.thread()
    while index < 128 * steps:
        word = index // 8 % (8 * steps)
        position = index // (64 * steps) * 16 + index % 8 * 2
        source = place + index // (64 * steps) * 32 * key_size + 64 * word + index % 8 * 4
        first = 0
        second = 0
        if 2 * word < key_size:
            first = ptx.load_u32(source)
        if 2 * word + 1 < key_size:
            second = ptx.load_u32(source + 32)
        key[position * stride + word] = (first & 0xFFFF) | ((second & 0xFFFF) << 16)
        key[position * stride + stride + word] = (first >> 16) | ((second >> 16) << 16)
        index = index + threads


@inline
def stage_key_codes(key, place, scales, key_size, steps, threads):
    """Keys of a page, codes, as pairs of dimensions of each position, with their scales in them."""
    stride = 8 * steps + 4
    words = (key_size + 3) // 4
    blocks = (key_size + SCALE_BLOCK - 1) // SCALE_BLOCK
    index = ptx.thread()
    while index < 128 * steps:
        word = index // 16 % (4 * steps)
        group = index // (64 * steps)
        code = 0
        scale = float32(0.0)
        if word < words:
            code = ptx.load_u32(place + (group * words + word) * 64 + index % 16 * 4) ^ 0x80808080
            scale_place = scales + (group * blocks + 4 * word // SCALE_BLOCK) * 32 + index % 16 * 2
            scale = ptx.half_to_float(ptx.load_u16(scale_place))
        target = (group * 16 + index % 16) * stride + 2 * word
        key[target] = ptx.pack_halves(scale * signed_byte(code, 0), scale * signed_byte(code, 1))
        key[target + 1] = ptx.pack_halves(scale * signed_byte(code, 2), scale * signed_byte(code, 3))
        index = index + threads


@inline
def stage_half_values(value, place, num_seen, value_columns, first_column, tiles, threads):
    """Values of a page, float16, as pairs of positions of each column; those not yet seen by any row are 0."""
    index = ptx.thread()
    while index < 64 * tiles:
        column = (index // 32 % tiles * 4 + index % 4) * 2
        pair = index // (32 * tiles) * 8 + index // 4 % 8
        source = place + 2 * (2 * pair * value_columns + first_column + column)
        first = 0
        second = 0
        # The last part of the columns may reach past those that there are.
        is_there = first_column + column < value_columns
        if is_there and 2 * pair < num_seen:
            first = ptx.load_u32(source)
        if is_there and 2 * pair + 1 < num_seen:
            second = ptx.load_u32(source + 2 * value_columns)
        value[column * VALUE_STRIDE + pair] = (first & 0xFFFF) | ((second & 0xFFFF) << 16)
        value[column * VALUE_STRIDE + VALUE_STRIDE + pair] = (first >> 16) | ((second >> 16) << 16)
        index = index + threads


@inline
def stage_value_codes(value, place, scales, num_seen, value_columns, first_column, tiles, threads):
    """Values of a page, codes, as pairs of positions of each column, with their scales in them."""
    index = ptx.thread()
    while index < 64 * tiles:
        column = (index // 32 % tiles * 4 + index % 4) * 2
        pair = index // (32 * tiles) * 8 + index // 4 % 8
        code = 0
        left = float32(0.0)
        right = float32(0.0)
        if first_column + column < value_columns and 2 * pair < num_seen:
            code = ptx.load_u32(place + 2 * (pair * value_columns + first_column + column))
            scale_place = scales + (first_column + column) // SCALE_BLOCK * 64 + 4 * pair
            left = ptx.half_to_float(ptx.load_u16(scale_place))
            if 2 * pair + 1 < num_seen:
                right = ptx.half_to_float(ptx.load_u16(scale_place + 2))
        target = column * VALUE_STRIDE + pair
        value[target] = ptx.pack_halves(left * signed_byte(code, 0), right * signed_byte(code, 1))
        value[target + VALUE_STRIDE] = ptx.pack_halves(left * signed_byte(code, 2), right * signed_byte(code, 3))
        index = index + threads


@inline
def add_product(sums, first, left, upper, lower):
    """Add a product of tiles to a lane's four sums from `first` on; see `ptx.multiply_halves`."""
    product = ptx.multiply_halves(
        left[0], left[1], left[2], left[3], upper, lower,
        sums[first], sums[first + 1], sums[first + 2], sums[first + 3],
    )  # fmt: skip
    for i in range(4):
        sums[first + i] = product[i]


@template(floats="scale softcap", tuples={**ROPE, "reach": REACH})
def attend_tiles(key_kind, value_kind, key_size, value_size, warps, sight=OWN):
    """Attention of rows of one sequence, of [tiles, KV heads, parts of columns]; a warp to 16 of rows x query heads.

    Keys and values are float16 or codes; queries of codes were rotated before, and what is written is still rotated if
    values are codes. The group of query heads is at most 16 * warps, and the last tile comes first: it is the longest.
    sight and reach: see `attention.attend_chunks`.
    """
    key_is_codes = key_kind == CODES
    value_is_codes = value_kind == CODES
    key_is_half_bytes = key_kind == HALF_BYTES
    value_is_half_bytes = value_kind == HALF_BYTES
    steps = -(-key_size // 16)
    stride = 8 * steps + 4
    pairs = 16 * warps
    threads = 32 * warps
    tiles = -(-min(value_size, MOST_COLUMNS) // 8)
    query_words = pairs * stride
    key_words = PAGE * stride
    value_words = 8 * tiles * VALUE_STRIDE
    sums_size = 4 * tiles
    is_ranged = sight == RANGES
    sees_later = sight != OWN

    def kernel(
        queries, queries_stride, out, out_stride, positions, page_tables, num_rows,
        group_heads, head_bytes, layer_offset, key_scales, values_offset, value_scales, value_columns,
        window, span, slopes, sinks, rope, num_tiles, scale, softcap, reach,
    ):  # fmt: skip
        kv_head = ptx.block_y()
        first_column = ptx.block_z() * MOST_COLUMNS
        tile_rows = pairs // group_heads
        first_row = (num_tiles - 1 - ptx.block_x()) * tile_rows
        last_row = min(first_row + tile_rows, num_rows) - 1
        pages = ptx.load_i64(page_tables + 8 * first_row)
        query = cuda.shared.array(query_words, uint32)
        key = cuda.shared.array(key_words, uint32)
        value = cuda.shared.array(value_words, uint32)
        index = ptx.thread()
        while index < 8 * steps * pairs:
            pair = index // (8 * steps)
            column = index % (8 * steps) * 2
            row = min(first_row + pair // group_heads, last_row)
            head = queries + row * queries_stride + 4 * (kv_head * group_heads + pair % group_heads) * key_size
            left = float32(0.0)
            right = float32(0.0)
            if column < key_size:
                left = scale * rotated(head, column, rope, row)
            if column + 1 < key_size:
                right = scale * rotated(head, column + 1, rope, row)
            query[pair * stride + column // 2] = ptx.pack_halves(left, right)
            index = index + threads

        group = ptx.thread() % 32 // 4
        within = ptx.thread() % 4
        # A lane holds parts of two of a warp's sixteen pairs of row and head: this one, and that eight after it.
        first_pair = ptx.thread() // 32 * 16 + group
        rows = cuda.local.array(2, int64)
        heads = cuda.local.array(2, int64)
        position = cuda.local.array(2, int64)
        least = cuda.local.array(2, int64)
        last = cuda.local.array(2, int64)
        slope = cuda.local.array(2, float32)
        largest = cuda.local.array(2, float32)
        total = cuda.local.array(2, float32)
        factor = cuda.local.array(2, float32)
        for r in range(2):
            rows[r] = first_row + (first_pair + 8 * r) // group_heads
            heads[r] = kv_head * group_heads + (first_pair + 8 * r) % group_heads
            position[r] = ptx.load_i64(positions + 8 * min(rows[r], last_row))
            least[r] = first_seen(position[r], window, span)
            last[r] = position[r]
            if is_ranged:
                least[r] = min(least[r], ptx.load_i64(reach[2] + 8 * min(rows[r], last_row)))
                least[r] = max(least[r], ptx.load_i64(reach[0] + 8 * min(rows[r], last_row)))
                last[r] = ptx.load_i64(reach[1] + 8 * min(rows[r], last_row)) - 1
            elif sees_later:
                last[r] = min(position[r] + reach[0], ptx.load_i64(reach[1] + 8 * last_row))
            slope[r] = float32(0.0)
            if slopes != 0:
                slope[r] = ptx.load_f32(slopes + 4 * heads[r])
            largest[r] = float32(LEAST)
            total[r] = float32(0.0)
        scores = cuda.local.array(16, float32)
        sums = cuda.local.array(sums_size, float32)
        for i in range(sums_size):
            sums[i] = float32(0.0)

        first_position = first_seen(ptx.load_i64(positions + 8 * first_row), window, span)
        last_position = ptx.load_i64(positions + 8 * last_row)
        if is_ranged:
            row = first_row
            while row <= last_row:
                first_position = min(first_position, ptx.load_i64(reach[2] + 8 * row))
                last_position = max(last_position, ptx.load_i64(reach[1] + 8 * row) - 1)
                row = row + 1
        elif sees_later:
            last_position = min(last_position + reach[0], ptx.load_i64(reach[1] + 8 * last_row))
        page = first_position // PAGE
        while page <= last_position // PAGE:
            place = ptx.load_i64(pages + 8 * page) + layer_offset + kv_head * head_bytes
            num_seen = last_position - page * PAGE + 1
            ptx.syncthreads()
            if key_is_codes:
                stage_key_codes(key, place, place + key_scales, key_size, steps, threads)
            elif key_is_half_bytes:
                stage_key_half_bytes(key, place, place + key_scales, key_size, steps, threads)
            else:
                stage_half_keys(key, place, key_size, steps, threads)
            source = place + values_offset
            if value_is_codes:
                scales = place + value_scales
                stage_value_codes(value, source, scales, num_seen, value_columns, first_column, tiles, threads)
            elif value_is_half_bytes:
                scales = place + value_scales
                columns = (value_columns, first_column, tiles)
                stage_value_half_bytes(value, VALUE_STRIDE, source, scales, num_seen, columns, threads)
            else:
                stage_half_values(value, source, num_seen, value_columns, first_column, tiles, threads)
            ptx.syncthreads()

            for i in range(16):
                scores[i] = float32(0.0)
            step = 0
            while step < steps:
                a = first_pair * stride + 8 * step + within
                for n in range(4):
                    b = (8 * n + group) * stride + 8 * step + within
                    left = (query[a], query[a + 8 * stride], query[a + 4], query[a + 8 * stride + 4])
                    add_product(scores, 4 * n, left, key[b], key[b + 4])
                step = step + 1

            for r in range(2):
                next_largest = largest[r]
                for i in range(8):
                    element = i // 2 * 4 + 2 * r + i % 2
                    seen = page * PAGE + i // 2 * 8 + 2 * within + i % 2
                    score = scores[element]
                    if softcap > float32(0.0):
                        score = softcap * hyperbolic_tangent(ptx.divide(score, softcap))
                    distance = seen - position[r]
                    if sees_later:
                        distance = -abs(distance)
                    score = score + slope[r] * ptx.to_float(distance)
                    if seen < least[r] or seen > last[r]:
                        score = float32(LEAST)
                    next_largest = ptx.maximum(next_largest, score)
                    scores[element] = score
                for distance in (1, 2):
                    next_largest = ptx.maximum(next_largest, ptx.shuffle(next_largest, distance))
                factor[r] = exponential(largest[r] - next_largest)
                largest[r] = next_largest
                total[r] = total[r] * factor[r]
                for i in range(8):
                    element = i // 2 * 4 + 2 * r + i % 2
                    weight = float32(0.0)
                    if scores[element] != float32(LEAST):
                        weight = exponential(scores[element] - next_largest)
                    total[r] = total[r] + weight
                    scores[element] = weight

            for i in range(sums_size):
                sums[i] = sums[i] * factor[i // 2 % 2]
            for half in range(2):
                w = 8 * half
                weights = (
                    ptx.pack_halves(scores[w], scores[w + 1]),
                    ptx.pack_halves(scores[w + 2], scores[w + 3]),
                    ptx.pack_halves(scores[w + 4], scores[w + 5]),
                    ptx.pack_halves(scores[w + 6], scores[w + 7]),
                )
                for n in range(tiles):
                    b = (8 * n + group) * VALUE_STRIDE + 8 * half + within
                    add_product(sums, 4 * n, weights, value[b], value[b + 4])
            page = page + 1

        for r in range(2):
            for distance in (1, 2):
                total[r] = total[r] + ptx.shuffle(total[r], distance)
            factor[r] = float32(1.0)
            if sinks != 0:
                sink = ptx.load_f32(sinks + 4 * heads[r])
                next_largest = ptx.maximum(largest[r], sink)
                factor[r] = exponential(largest[r] - next_largest)
                total[r] = total[r] * factor[r] + exponential(sink - next_largest)
            factor[r] = ptx.divide(factor[r], total[r])
            if first_pair + 8 * r < tile_rows * group_heads and rows[r] <= last_row:
                place = out + rows[r] * out_stride + 4 * heads[r] * value_size
                for i in range(2 * tiles):
                    element = i // 2 * 4 + 2 * r + i % 2
                    column = first_column + i // 2 * 8 + 2 * within + i % 2
                    if column < value_size:
                        ptx.store_f32(place + 4 * column, sums[element] * factor[r])

    return kernel
