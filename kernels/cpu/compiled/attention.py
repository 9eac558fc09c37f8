"""Attention over the paged cache: splitting the work, and merging the results of chunks.

A tile is a few consecutive rows of one sequence and one KV head. Its queries, all heads of the group of all its rows,
are computed against each chunk of keys and values in groups of eight, so a chunk is read from memory once per tile. A
unit of work is a tile over all its chunks, or in a batch of few rows over some of them, to use every thread. Then
results of single chunks are stored, and the thread that finishes the last part of a tile merges them. Either way chunks
are merged one by one, in order, so the result does not depend on the split.

Chosen positions are gathered, and then attended to as if there were no others: the n-th chosen position stands for
position n, so whole chunks of them are computed at once, and choosing every position gives the bits of attention
without a choice. A page whose positions are all chosen in a row is read in place; of others single positions are
copied, to pages of this thread.

`attention_sums` follows an `attention` op, shares its parameters, and sums the softmax of the last rows of each segment
by page. It computes the scores of those rows again, which is cheap relative to the batch.
"""

import numpy as np

from localinfer.kernels.cpu.compiled import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention_scratch import PAGES_PER_CHUNK, SCORE_STRIDE
from localinfer.kernels.cpu.compiled.attention_tiles import divide_row, merge_chunk, softmax_chunk
from localinfer.kernels.cpu.compiled.elementwise import exp_of
from localinfer.kernels.cpu.compiled.kv_store import copy_padded, rotate
from localinfer.kernels.cpu.compiled.memory import (
    atomic_add,
    call_op,
    load_f32,
    load_i64,
    load_u8,
    load_u16_anywhere,
    load_u32_anywhere,
    store_f32,
    store_i64,
    store_u8,
    store_u16,
    store_u32,
)
from localinfer.kernels.cpu.compiled.pool import num_rows, scratch as scratch_of, take_units
from localinfer.kernels.cpu.kernel_abi import CHUNK, MAX_SPLIT_HEADS, PARTIAL_COUNTER_BYTES, SPLIT_ROWS, SUMMED_ROWS
from localinfer.kernels.cpu.parameters import ATTENTION, ATTENTION_SUMS, BATCH, SEGMENT
from localinfer.kernels.jit.numba import inline, op
from localinfer.kernels.kv_layout import PAGE_TOKENS


@inline
def most_chosen(p: int, position: int) -> int:
    """Maximum positions that a row at `position` attends to."""
    return min(ATTENTION.chosen_count(p) * ATTENTION.chosen_block(p), position + 1)


@inline
def num_chosen(p: int, entries: int, position: int) -> int:
    """Number of positions in the list of a row; only its last block may end behind the row's own."""
    size = ATTENTION.chosen_block(p)
    blocks = min(ATTENTION.chosen_count(p), position // size + 1)
    last = np.int64(load_f32(entries + 4 * (blocks - 1)))
    return (blocks - 1) * size + min(size, position + 1 - last * size)


@inline
def _position_of(p: int, entries: int, index: int) -> int:
    """The position that was chosen as number `index`."""
    size = ATTENTION.chosen_block(p)
    return np.int64(load_f32(entries + 4 * (index // size))) * size + index % size


@inline
def set_chosen_pages(p: int, memory: int, chunk: int, end: int) -> None:
    """Addresses of this head in pages that hold a chunk of chosen positions, of which there are `end`."""
    entries, table = load_i64(memory + scratch.CHOSEN), load_i64(memory + scratch.PAGE_TABLE)
    head = ATTENTION.layer_offset(p) + load_i64(memory + scratch.KV_HEAD) * ATTENTION.head_bytes(p)
    place = load_i64(memory + scratch.GATHERED)
    for page in range(PAGES_PER_CHUNK):
        first = min(chunk * CHUNK + page * PAGE_TOKENS, (end - 1) // PAGE_TOKENS * PAGE_TOKENS)
        last = min(first + PAGE_TOKENS, end) - 1
        position = _position_of(p, entries, first)
        if position % PAGE_TOKENS == 0 and _position_of(p, entries, last) == position + last - first:
            found = load_i64(table + 8 * (position // PAGE_TOKENS)) + head
        else:
            found = place
            place += ATTENTION.head_bytes(p)
            for index in range(first, last + 1):
                position = _position_of(p, entries, index)
                source = load_i64(table + 8 * (position // PAGE_TOKENS)) + head
                _copy_keys(p, source, position % PAGE_TOKENS, found, index - first)
                _copy_values(p, source, position % PAGE_TOKENS, found, index - first)
        # What follows a chunk is not known to be read, so it is not fetched.
        store_i64(memory + scratch.PAGES + 8 * page, found)
        store_i64(memory + scratch.PAGES + 8 * (PAGES_PER_CHUNK + page), found)


@inline
def _copy_keys(p: int, source: int, from_slot: int, target: int, to_slot: int) -> None:
    """One position's keys: sixteen positions lie side by side, in steps of a few bytes each."""
    size, steps, blocks = ATTENTION.key_bytes(p), ATTENTION.key_steps(p), ATTENTION.key_blocks(p)
    lane, to_lane = from_slot % 16, to_slot % 16
    first = source + from_slot // 16 * 16 * size * steps + size * lane
    place = target + to_slot // 16 * 16 * size * steps + size * to_lane
    if size == 2:
        for step in range(steps):
            store_u16(place + 32 * step, load_u16_anywhere(first + 32 * step))
    else:
        for step in range(steps):
            store_u32(place + 64 * step, load_u32_anywhere(first + 64 * step))
    first = source + ATTENTION.key_scales(p) + from_slot // 16 * 32 * blocks + 2 * lane
    place = target + ATTENTION.key_scales(p) + to_slot // 16 * 32 * blocks + 2 * to_lane
    for block in range(blocks):
        store_u16(place + 32 * block, load_u16_anywhere(first + 32 * block))


@inline
def _copy_values(p: int, source: int, from_slot: int, target: int, to_slot: int) -> None:
    """One position's values: a row of its own, or bytes between those of the one or three beside it."""
    source, target = source + ATTENTION.values(p), target + ATTENTION.values(p)
    share, columns = ATTENTION.value_share(p), ATTENTION.value_columns(p)
    if share == 1:
        size = ATTENTION.value_row_bytes(p)
        for word in range(size // 8):
            store_i64(target + to_slot * size + 8 * word, load_i64(source + from_slot * size + 8 * word))
        return
    num_bytes = 2 * columns // share
    first, place = _value_byte(source, from_slot, share, columns), _value_byte(target, to_slot, share, columns)
    for byte in range(num_bytes):
        store_u8(place + share * byte, load_u8(first + share * byte))
    offset = ATTENTION.value_scales(p) - ATTENTION.values(p)
    first, place = source + offset + 2 * from_slot, target + offset + 2 * to_slot
    for block in range(ATTENTION.value_blocks(p)):
        store_u16(place + 64 * block, load_u16_anywhere(first + 64 * block))


@inline
def _value_byte(values: int, slot: int, share: int, columns: int) -> int:
    """Address of the first byte of a position's codes, of pairs of positions or of fours in the order 0, 2, 1, 3."""
    if share == 2:
        return values + slot // 2 * 2 * columns + slot % 2
    return values + slot // 4 * 2 * columns + slot % 2 * 2 + slot % 4 // 2


@inline
def add_relative(
    p: int, memory: int, scores: int, head: int, row: int, start: int, offset: int, first: int, last: int
) -> None:
    """Add to the scores of one query, of positions first to last of a chunk, what its head has for each distance.

    p, memory: addresses of the op's parameters and of the thread's scratch memory. scores: float32, of the chunk's
    positions. row: of the unit's rows, the query's. start: position of the chunk's first key; offset: the same minus
    the query's. A key's bucket is that of its distance, or of the furthest that there is one for.
    """
    reach, size, scale = ATTENTION.reach(p), 4 * ATTENTION.num_buckets(p), ATTENTION.scale(p)
    middle = ATTENTION.buckets(p) + 8 * reach
    table, row_bias, key_bias = ATTENTION.table_bias(p), ATTENTION.row_bias(p), ATTENTION.key_bias(p)
    of_head = table + size * head
    of_row = load_i64(memory + scratch.ROW_BIAS) + row * ATTENTION.row_bias_stride(p) + size * head
    key_stride = ATTENTION.key_bias_stride(p)
    of_key = load_i64(memory + scratch.KEY_BIAS) + start * key_stride + size * head
    for place in range(first, last):
        bucket = load_i64(middle + 8 * min(max(place + offset, -reach), reach))
        score = load_f32(scores + 4 * place)
        if table != 0:
            score += load_f32(of_head + bucket)
        if row_bias != 0:
            score += scale * load_f32(of_row + bucket)
        if key_bias != 0:
            score += scale * load_f32(of_key + place * key_stride + bucket)
        store_f32(scores + 4 * place, score)


_SEGMENT_BYTES = SEGMENT.num_bytes
_LEAST_CHUNKS = 2
"""Minimum chunks of a part of a tile: merging fewer costs more than it gains."""
_PARTS_PER_THREAD = 8


@inline
def lowest_position(p: int, position: int) -> int:
    """First position that a query at `position` attends to."""
    window, local = ATTENTION.window(p), ATTENTION.local_chunk(p)
    low = 0
    if window > 0:
        low = max(low, position - window + 1)
    if local > 0:
        low = max(low, position // local * local)
    return low


@inline
def _end_position(p: int, memory: int, position: int) -> int:
    """The position after the last one that a query at `position` attends to: its own, or one of its segment's."""
    return min(position + ATTENTION.after(p), load_i64(memory + scratch.END) - 1) + ATTENTION.own(p)


@inline
def _first_chunk(p: int, position: int) -> int:
    return lowest_position(p, position) // CHUNK


@inline
def set_pages(p: int, memory: int, chunk: int, end: int) -> None:
    """Addresses of this head in a chunk's pages, and in those of the next chunk, which are prefetched.

    Only pages of positions before `end` are looked up; the others' entries repeat one that was.
    """
    table = load_i64(memory + scratch.PAGE_TABLE)
    offset = ATTENTION.layer_offset(p) + load_i64(memory + scratch.KV_HEAD) * ATTENTION.head_bytes(p)
    first, last = chunk * PAGES_PER_CHUNK, (end - 1) // PAGE_TOKENS
    for index in range(2 * PAGES_PER_CHUNK):
        page = load_i64(table + 8 * min(first + index, last))
        store_i64(memory + scratch.PAGES + 8 * index, page + offset)


@inline
def set_queries(p: int, memory: int, first_query: int, count: int) -> None:
    """Addresses of up to eight queries of a tile, which are computed at once."""
    group, last_query = ATTENTION.group(p), first_query + count - 1
    # Other counts are padded by repeating the last query.
    at_once = 1
    while at_once < count:
        at_once *= 2
    store_i64(memory + scratch.COUNT, at_once)
    for q in range(at_once):
        query = min(first_query + q, last_query)
        row = load_i64(memory + scratch.QUERY_ROW) + query // group * ATTENTION.queries_stride(p)
        head = load_i64(memory + scratch.KV_HEAD) * group + query % group
        store_i64(memory + scratch.QUERY_TABLE + 8 * q, row + head * ATTENTION.query_head_bytes(p))


@inline
def _attend(p: int, memory: int, chunk: int, first_query: int, count: int, place: int) -> None:
    """`count` queries of a tile against a chunk: maxima, sums and weighted values of it alone, 16, 16 and 8 rows."""
    group, kv_head = ATTENTION.group(p), load_i64(memory + scratch.KV_HEAD)
    position, start = load_i64(memory + scratch.POSITION), chunk * CHUNK
    last_query = first_query + count - 1
    low = max(0, lowest_position(p, position + first_query // group) - start)
    high = min(CHUNK, _end_position(p, memory, position + last_query // group) - start)
    for q in range(8):
        store_f32(place + 4 * q, np.float32(-np.inf))
    if low >= high:
        return
    set_queries(p, memory, first_query, count)
    store_i64(memory + scratch.CHUNK_VALUES, place + 128)
    # Blocks of sixteen positions that no query attends to are left out, on the chunk's grid.
    first_block, last_block = low // 16, (high + 15) // 16
    call_op(ATTENTION.score_keys(p), p, memory, first_block, last_block)
    softcap, slopes = ATTENTION.softcap(p), ATTENTION.slopes(p)
    for q in range(count):
        query = first_query + q
        here = position + query // group
        if ATTENTION.buckets(p) != 0:
            scores, head = memory + scratch.SCORES + SCORE_STRIDE * q, kv_head * group + query % group
            add_relative(p, memory, scores, head, query // group, start, start - here, 16 * first_block, high)
        slope = np.float32(0)
        if slopes != 0:
            slope = load_f32(slopes + 4 * (kv_head * group + query % group))
        softmax_chunk(
            memory + scratch.SCORES + SCORE_STRIDE * q,
            16 * first_block,
            16 * last_block,
            lowest_position(p, here) - start,
            min(high, _end_position(p, memory, here) - start),
            softcap,
            slope,
            start - here,
            place + 4 * q,
            place + 64 + 4 * q,
        )
    call_op(ATTENTION.weigh_values(p), p, memory, 16 * first_block, high)


@inline
def out_address(p: int, memory: int, query: int) -> int:
    """Address of a query's result."""
    group = ATTENTION.group(p)
    head = load_i64(memory + scratch.KV_HEAD) * group + query % group
    row = load_i64(memory + scratch.OUT_ROW) + query // group * ATTENTION.out_stride(p)
    return row + 4 * ATTENTION.value_size(p) * head


@inline
def merge(p: int, memory: int, first_query: int, count: int, place: int) -> None:
    """Add one chunk's results of some queries, at `place`, to those of the chunks before."""
    for q in range(count):
        store_i64(memory + scratch.TARGETS + 8 * q, out_address(p, memory, first_query + q))
    merge_chunk(
        count,
        memory + scratch.MAXIMA + 4 * first_query,
        memory + scratch.TOTALS + 4 * first_query,
        memory + scratch.TARGETS,
        place,
        place + 64,
        place + 128,
        4 * ATTENTION.value_columns(p),
        ATTENTION.value_size(p),
        memory + scratch.WORK,
    )


@inline
def finish_row(p: int, memory: int, out: int, total: float) -> None:
    """Divide one result by its sum, and undo the rotation of values."""
    size, rotation, row = ATTENTION.value_size(p), ATTENTION.rotation(p), memory + scratch.ROW
    divide_row(out, total, size)
    if rotation > 1:
        copy_padded(row, out, size)
        rotate(row, size, rotation)
        for column in range(size):
            store_f32(out + 4 * column, load_f32(row + 4 * column))


@inline
def _chunk_bytes(p: int, queries: int) -> int:
    """Bytes of one chunk's stored results: per eight queries maxima, sums and values."""
    return (queries + 7) // 8 * (128 + 32 * ATTENTION.value_columns(p))


@inline
def _set_pages_of(p: int, memory: int, chunk: int, end: int) -> None:
    """The pages of a chunk, of positions or of chosen ones."""
    if ATTENTION.chosen(p) != 0:
        set_chosen_pages(p, memory, chunk, end)
    else:
        set_pages(p, memory, chunk, end)


@inline
def _attend_part(p: int, memory: int, partials: int, first_chunk: int, last_chunk: int) -> None:
    """Some chunks of a tile; stores their results in `partials`."""
    rows = load_i64(memory + scratch.ROWS)
    queries = rows * ATTENTION.group(p)
    end = _end_position(p, memory, load_i64(memory + scratch.POSITION) + rows - 1)
    place = partials
    for chunk in range(first_chunk, last_chunk):
        _set_pages_of(p, memory, chunk, end)
        for first in range(0, queries, 8):
            _attend(p, memory, chunk, first, min(8, queries - first), place)
            place += _chunk_bytes(p, 8)


@inline
def _finish_tile(p: int, memory: int, partials: int, is_attended: bool) -> None:
    """Merge all chunks of a tile, from `partials` if they are stored there, and divide by the sums."""
    rows, position = load_i64(memory + scratch.ROWS), load_i64(memory + scratch.POSITION)
    queries, end = rows * ATTENTION.group(p), _end_position(p, memory, position + rows - 1)
    for query in range(queries):
        store_f32(memory + scratch.MAXIMA + 4 * query, np.float32(-np.inf))
    place = partials if is_attended else memory + scratch.CHUNK
    for chunk in range(_first_chunk(p, position), (end + CHUNK - 1) // CHUNK):
        if not is_attended:
            _set_pages_of(p, memory, chunk, end)
        for first in range(0, queries, 8):
            count = min(8, queries - first)
            if is_attended:
                merge(p, memory, first, count, place)
                place += _chunk_bytes(p, 8)
            else:
                _attend(p, memory, chunk, first, count, place)
                merge(p, memory, first, count, place)
    group, sinks = ATTENTION.group(p), ATTENTION.sinks(p)
    for query in range(queries):
        total = load_f32(memory + scratch.TOTALS + 4 * query)
        if sinks != 0:
            sink = load_f32(sinks + 4 * (load_i64(memory + scratch.KV_HEAD) * group + query % group))
            total += exp_of(sink - load_f32(memory + scratch.MAXIMA + 4 * query))
        finish_row(p, memory, out_address(p, memory, query), total)


@inline
def _segment_chunks(p: int, segment: int) -> int:
    """Chunks that a segment's rows attend to."""
    position, rows = SEGMENT.position(segment), SEGMENT.num_rows(segment)
    end = position + rows
    if ATTENTION.chosen(p) != 0:
        end = most_chosen(p, end - 1)
    return (end + CHUNK - 1) // CHUNK - _first_chunk(p, position)


@inline
def _chunks_per_part(p: int, batch: int, num_threads: int) -> int:
    """Chunks of a unit of work; 0 for all of a tile."""
    kv_heads, segments = ATTENTION.kv_heads(p), BATCH.segments(batch)
    if num_threads == 1 or num_rows(batch, 0) > SPLIT_ROWS or kv_heads > MAX_SPLIT_HEADS:
        return 0
    chunks, needed = 0, PARTIAL_COUNTER_BYTES
    for index in range(BATCH.num_segments(batch)):
        segment = segments + _SEGMENT_BYTES * index
        here, rows = _segment_chunks(p, segment), SEGMENT.num_rows(segment)
        chunks += here * kv_heads
        needed += here * kv_heads * _chunk_bytes(p, rows * ATTENTION.group(p))
        if rows > ATTENTION.rows_per_unit(p):
            return 0
    if needed > BATCH.partials_bytes(batch):
        return 0
    return max(_LEAST_CHUNKS, chunks // (_PARTS_PER_THREAD * num_threads))


@inline
def set_unit(p: int, memory: int, segment: int, first_row: int, rows: int, kv_head: int) -> None:
    """Store the rows, head and pages of a tile."""
    row = SEGMENT.first_row(segment) + first_row
    store_i64(memory + scratch.POSITION, SEGMENT.position(segment) + first_row)
    store_i64(memory + scratch.QUERY_ROW, ATTENTION.queries(p) + row * ATTENTION.queries_stride(p))
    store_i64(memory + scratch.OUT_ROW, ATTENTION.out(p) + row * ATTENTION.out_stride(p))
    store_i64(memory + scratch.KV_HEAD, kv_head)
    store_i64(memory + scratch.PAGE_TABLE, load_i64(segment + ATTENTION.table(p)))
    store_i64(memory + scratch.ROWS, rows)
    if ATTENTION.chosen(p) != 0:
        # Its only row attends to so many positions, as if they were the first.
        chosen_list = kv_head if ATTENTION.chosen_lists(p) > 1 else 0
        entries = ATTENTION.chosen(p) + row * ATTENTION.chosen_stride(p) + 4 * chosen_list * ATTENTION.chosen_count(p)
        store_i64(memory + scratch.CHOSEN, entries)
        store_i64(memory + scratch.POSITION, num_chosen(p, entries, SEGMENT.position(segment) + first_row) - 1)
    store_i64(memory + scratch.END, SEGMENT.position(segment) + SEGMENT.num_rows(segment))
    store_i64(memory + scratch.ROW_BIAS, ATTENTION.row_bias(p) + row * ATTENTION.row_bias_stride(p))
    first_of_text = SEGMENT.first_row(segment) - SEGMENT.position(segment)
    store_i64(memory + scratch.KEY_BIAS, ATTENTION.key_bias(p) + first_of_text * ATTENTION.key_bias_stride(p))


@op
def attention(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Attention over a cache of any type."""
    p, memory, control = parameters, scratch_of(batch, thread), BATCH.control(batch)
    store_i64(memory + scratch.GATHERED, ATTENTION.gathered(p) + thread * PAGES_PER_CHUNK * ATTENTION.head_bytes(p))
    kv_heads, group = ATTENTION.kv_heads(p), ATTENTION.group(p)
    segments, num_segments = BATCH.segments(batch), BATCH.num_segments(batch)
    per_part = _chunks_per_part(p, batch, num_threads)
    rows_per_tile = ATTENTION.rows_per_unit(p)
    if per_part == 0:
        # Smaller tiles, if there are too few for all threads.
        rows_per_tile = max(1, min(rows_per_tile, num_rows(batch, 0) * kv_heads // (4 * num_threads)))
    # The last rows of a prompt take longest, so they are computed first. A thread's units follow each other, so each is
    # looked for from the segment of the one before: a batch of short texts has many segments of little work.
    index, passed, units, counters = num_segments, 0, 0, BATCH.partials(batch)
    first_partial = counters + PARTIAL_COUNTER_BYTES
    segment, tiles, chunks, parts, tile_bytes = 0, 0, 0, 1, 0
    while True:
        unit = take_units(control, 1)
        while unit - passed >= units:
            if index == 0:
                return
            passed += units
            first_partial += tile_bytes * kv_heads
            index -= 1
            segment = segments + _SEGMENT_BYTES * index
            tiles = (SEGMENT.num_rows(segment) + rows_per_tile - 1) // rows_per_tile
            if per_part > 0:
                chunks = _segment_chunks(p, segment)
                parts = (chunks + per_part - 1) // per_part
                tile_bytes = chunks * _chunk_bytes(p, SEGMENT.num_rows(segment) * group)
            units = tiles * kv_heads * parts
        unit -= passed
        part, kv_head = unit % parts, unit // parts % kv_heads
        first_row = (tiles - 1 - unit // (parts * kv_heads)) * rows_per_tile
        set_unit(p, memory, segment, first_row, min(rows_per_tile, SEGMENT.num_rows(segment) - first_row), kv_head)
        is_last, partials = True, first_partial
        if parts > 1:
            partials += kv_head * tile_bytes
            begin, end = part * per_part, min(part * per_part + per_part, chunks)
            first = _first_chunk(p, SEGMENT.position(segment))
            _attend_part(p, memory, partials + tile_bytes // chunks * begin, first + begin, first + end)
            counter = counters + 8 * (index * kv_heads + kv_head)
            is_last = atomic_add(counter, 1) == parts - 1
            if is_last:
                store_i64(counter, 0)
        if is_last:
            _finish_tile(p, memory, partials, parts > 1)


@inline
def _score_pages(p: int, memory: int, first_query: int, count: int, work: int) -> None:
    """Maximum of the scores of each page, and the sum of exp(score - maximum), per query."""
    group, kv_head = ATTENTION.group(p), load_i64(memory + scratch.KV_HEAD)
    softcap, slopes = ATTENTION.softcap(p), ATTENTION.slopes(p)
    position, row_bytes = load_i64(memory + scratch.POSITION), 4 * ATTENTION_SUMS.sums_pages(p)
    low = lowest_position(p, position)
    set_queries(p, memory, first_query, count)
    for chunk in range(low // CHUNK, position // CHUNK + 1):
        start = chunk * CHUNK
        set_pages(p, memory, chunk, position + 1)
        first = max(0, low - start) // PAGE_TOKENS
        last = min(CHUNK - 1, position - start) // PAGE_TOKENS
        call_op(ATTENTION.score_keys(p), p, memory, 2 * first, 2 * last + 2)
        for q in range(count):
            slope = np.float32(0)
            if slopes != 0:
                slope = load_f32(slopes + 4 * (kv_head * group + first_query + q))
            for page in range(first, last + 1):
                place = work + 2 * q * row_bytes + 4 * (start // PAGE_TOKENS + page)
                softmax_chunk(
                    memory + scratch.SCORES + SCORE_STRIDE * q,
                    page * PAGE_TOKENS,
                    page * PAGE_TOKENS + PAGE_TOKENS,
                    low - start,
                    position + 1 - start,
                    softcap,
                    slope,
                    start - position,
                    place,
                    place + row_bytes,
                )


@inline
def _add_shares(p: int, first: int, last: int, count: int, work: int, out: int) -> None:
    """Add each page's share of every query's softmax."""
    row_bytes = 4 * ATTENTION_SUMS.sums_pages(p)
    for q in range(count):
        maxima = work + 2 * q * row_bytes
        sums = maxima + row_bytes
        largest = np.float32(-np.inf)
        for page in range(first, last):
            largest = max(largest, load_f32(maxima + 4 * page))
        total = np.float32(0)
        for page in range(first, last):
            share = load_f32(sums + 4 * page) * exp_of(load_f32(maxima + 4 * page) - largest)
            store_f32(sums + 4 * page, share)
            total += share
        for page in range(first, last):
            store_f32(out + 4 * page, load_f32(out + 4 * page) + load_f32(sums + 4 * page) / total)


@op
def attention_sums(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Add to float32[segments][KV heads][pages] what the last rows of each segment attend to; one unit each."""
    p, memory, control = parameters, scratch_of(batch, thread), BATCH.control(batch)
    kv_heads, group, pages = ATTENTION.kv_heads(p), ATTENTION.group(p), ATTENTION_SUMS.sums_pages(p)
    work = ATTENTION_SUMS.work(p) + thread * 64 * pages
    while True:
        unit = take_units(control, 1)
        index, kv_head = unit // kv_heads, unit % kv_heads
        if index >= BATCH.num_segments(batch):
            return
        segment = BATCH.segments(batch) + _SEGMENT_BYTES * index
        out = ATTENTION_SUMS.sums(p) + 4 * pages * (index * ATTENTION_SUMS.sums_heads(p) + kv_head)
        rows = SEGMENT.num_rows(segment)
        for row in range(max(0, rows - SUMMED_ROWS), rows):
            set_unit(p, memory, segment, row, 1, kv_head)
            position = load_i64(memory + scratch.POSITION)
            first, last = lowest_position(p, position) // PAGE_TOKENS, position // PAGE_TOKENS + 1
            for query in range(0, group, 8):
                count = min(8, group - query)
                _score_pages(p, memory, query, count, work)
                _add_shares(p, first, last, count, work, out)
