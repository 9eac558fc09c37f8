"""Attention sums by page: the softmax of the last rows of each segment, summed by page.

It follows an `attention` op whose parameters it shares, and computes the scores of those rows again, which is cheap
relative to the batch.
"""

import numpy as np

from localinfer.kernels.cpu.compiled.attention import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention.attention import lowest_position, set_pages, set_queries, set_unit
from localinfer.kernels.cpu.compiled.attention.attention_scratch import SCORE_STRIDE
from localinfer.kernels.cpu.compiled.attention.attention_tiles import softmax_chunk
from localinfer.kernels.cpu.compiled.matmul.rows import exp_of
from localinfer.kernels.cpu.compiled.simd.memory import call_op, load_f32, load_i64, store_f32
from localinfer.kernels.cpu.compiled.simd.pool import scratch as scratch_of
from localinfer.kernels.cpu.compiled.simd.pool import take_units
from localinfer.kernels.cpu.kernel_abi import CHUNK, SUMMED_ROWS
from localinfer.kernels.cpu.parameters import ATTENTION, ATTENTION_SUMS, BATCH, SEGMENT
from localinfer.kernels.jit.numba import inline, op
from localinfer.kernels.kv_layout import PAGE_TOKENS

_SEGMENT_BYTES = SEGMENT.num_bytes


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
