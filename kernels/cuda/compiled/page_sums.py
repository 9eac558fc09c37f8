"""Attention summed by page of the cache: the softmax of chosen rows, summed by page.

The scores of those rows are computed once more, which is cheap relative to a batch; sinks are left out. A row's target
is the address of the float32[pages] of its segment, which no other segment's rows have; 0 leaves the row out.
"""

from numba import cuda, float32, int64, uint32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.activations import exponential, hyperbolic_tangent
from localinfer.kernels.cuda.compiled.attention import LEAST, first_seen, round_queries
from localinfer.kernels.cuda.compiled.kv_store import CODES, HALF_BYTES, HALVES, PAGE, key_group_bytes, key_words_of
from localinfer.kernels.cuda.compiled.reductions import warp_max, warp_sum
from localinfer.kernels.cuda.compiled.rotation import fold, rotation_factor, rotation_stages
from localinfer.kernels.cuda.compiled.rows import ROPE, rotated
from localinfer.kernels.cuda.jit import kernel, template
from localinfer.kernels.kv_layout import SCALE_BLOCK

THREADS = 128
_WARPS = THREADS // 32


@template(floats="scale softcap", tuples=ROPE)
def page_shares(key_kind, key_size):
    """The share of every page in the softmax of a row's query head, of [heads, rows].

    Writes to shares [row][head][2][pages]: the largest score of a page, then its share. A warp scores one page at a
    time, a lane to each position.
    """
    key_is_half_bytes = key_kind == HALF_BYTES
    key_is_codes = key_kind <= CODES
    key_is_half = key_kind == HALVES
    key_factor = rotation_factor(key_size) if key_is_codes else 1.0
    key_stages = rotation_stages(key_size)
    key_blocks = -(-key_size // SCALE_BLOCK)
    key_words = key_words_of(key_kind, key_size)
    key_group = key_group_bytes(key_kind, key_size)
    code_unit = 0.0625 if key_is_half_bytes else 1.0
    block_words = SCALE_BLOCK // 4

    def kernel(
        queries, queries_stride, positions, page_tables, targets, shares, num_pages, num_heads, group_heads,
        head_bytes, layer_offset, key_scales, window, span, slopes, rope, scale, softcap,
    ):  # fmt: skip
        head = ptx.block_x()
        row = ptx.block_y()
        if ptx.load_i64(targets + 8 * row) != 0:
            lane = ptx.thread() % 32
            pages = ptx.load_i64(page_tables + 8 * row)
            position = ptx.load_i64(positions + 8 * row)
            least = first_seen(position, window, span)
            query = cuda.shared.array(key_size, float32)
            factor = scale
            if key_is_codes:
                factor = float32(key_factor)
            source = queries + row * queries_stride + 4 * head * key_size
            column = ptx.thread()
            while column < key_size:
                query[column] = factor * rotated(source, column, rope, row)
                column = column + THREADS
            if key_is_codes:
                query_words = cuda.shared.array(key_words, uint32)
                query_scales = cuda.shared.array(key_blocks, float32)
                fold(query, key_size, key_stages)
                round_queries(query, query_words, query_scales, 1, key_size, key_words)
            else:
                ptx.syncthreads()

            largest_scores = shares + (row * num_heads + head) * 8 * num_pages
            sums = largest_scores + 4 * num_pages
            page = least // PAGE + ptx.thread() // 32
            while page <= position // PAGE:
                seen = page * PAGE + lane
                score = float32(LEAST)
                if least <= seen <= position:
                    place = ptx.load_i64(pages + 8 * page) + layer_offset + head // group_heads * head_bytes
                    score = float32(0.0)
                    if key_is_codes:
                        half_scales = place + key_scales + lane // 16 * 32 * key_blocks + lane % 16 * 2
                        place = place + lane // 16 * key_group + lane % 16 * 4
                        block = 0
                        while block < key_blocks:
                            dot = int64(0)
                            word = block * block_words
                            end = min(word + block_words, key_words)
                            while word < end:
                                if key_is_half_bytes:
                                    loaded = ptx.load_u32(place + 32 * word)
                                    low = (loaded << 4 & 0xF0F0F0F0) ^ 0x80808080
                                    high = (loaded & 0xF0F0F0F0) ^ 0x80808080
                                    dot = ptx.dot_signed(low, query_words[word], dot)
                                    dot = ptx.dot_signed(high, query_words[word + 1], dot)
                                    word = word + 2
                                else:
                                    loaded = ptx.load_u32(place + 64 * word) ^ 0x80808080
                                    dot = ptx.dot_signed(loaded, query_words[word], dot)
                                    word = word + 1
                            key_scale = scale * ptx.half_to_float(ptx.load_u16(half_scales + 32 * block))
                            key_scale = key_scale * float32(code_unit)
                            score = score + ptx.to_float(dot) * (key_scale * query_scales[block])
                            block = block + 1
                    else:
                        element = lane // 16 * key_size * 16 + lane % 16
                        column = 0
                        while column < key_size:
                            if key_is_half:
                                key = ptx.half_to_float(ptx.load_u16(place + 2 * (element + 16 * column)))
                            else:
                                key = ptx.load_f32(place + 4 * (element + 16 * column))
                            score = score + query[column] * key
                            column = column + 1
                    if softcap > float32(0.0):
                        score = softcap * hyperbolic_tangent(ptx.divide(score, softcap))
                    if slopes != 0:
                        score = score + ptx.load_f32(slopes + 4 * head) * ptx.to_float(seen - position)
                largest = warp_max(score)
                weight = float32(0.0)
                if least <= seen <= position:
                    weight = exponential(score - largest)
                weight = warp_sum(weight)
                if lane == 0:
                    ptx.store_f32(largest_scores + 4 * page, largest)
                    ptx.store_f32(sums + 4 * page, weight)
                page = page + _WARPS
            ptx.syncthreads()

            # Every warp adds all pages, in the same order.
            largest = float32(LEAST)
            page = least // PAGE + lane
            while page <= position // PAGE:
                largest = ptx.maximum(largest, ptx.load_f32(largest_scores + 4 * page))
                page = page + 32
            largest = warp_max(largest)
            total = float32(0.0)
            page = least // PAGE + lane
            while page <= position // PAGE:
                weight = exponential(ptx.load_f32(largest_scores + 4 * page) - largest)
                total = total + weight * ptx.load_f32(sums + 4 * page)
                page = page + 32
            total = warp_sum(total)
            ptx.syncthreads()
            page = least // PAGE + ptx.thread()
            while page <= position // PAGE:
                weight = exponential(ptx.load_f32(largest_scores + 4 * page) - largest)
                ptx.store_f32(sums + 4 * page, ptx.divide(weight * ptx.load_f32(sums + 4 * page), total))
                page = page + THREADS

    return kernel


@kernel()
def add_shares(positions, targets, shares, num_pages, num_heads, window, span, num_rows):
    """Add to the target of every row the shares of its heads, in order, of [pages / 128, rows].

    The rows of a segment are in a run, and are added by the block of its first one.
    """
    page = ptx.block_x() * THREADS + ptx.thread()
    row = ptx.block_y()
    target = ptx.load_i64(targets + 8 * row)
    is_first = target != 0
    if row > 0 and ptx.load_i64(targets + 8 * (row - 1)) == target:
        is_first = False
    if is_first and page < num_pages:
        total = ptx.load_f32(target + 4 * page)
        while row < num_rows and ptx.load_i64(targets + 8 * row) == target:
            position = ptx.load_i64(positions + 8 * row)
            if first_seen(position, window, span) // PAGE <= page <= position // PAGE:
                head = 0
                while head < num_heads:
                    place = shares + ((row * num_heads + head) * 2 + 1) * 4 * num_pages
                    total = total + ptx.load_f32(place + 4 * page)
                    head = head + 1
            row = row + 1
        ptx.store_f32(target + 4 * page, total)
