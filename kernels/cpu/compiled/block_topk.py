"""Choosing the blocks of positions that a row attends to: scores by cached keys, then the best of them.

A few rows' scores are computed by all threads chunk by chunk, those of many rows by the thread that chooses; each score
is one chain of operations either way. The best are found by counting the leading bits of scores, so that neither their
order nor the number of threads matters, and of equal scores the lower block is taken.
"""

import numpy as np

from localinfer.kernels.cpu.compiled import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention import set_pages, set_queries
from localinfer.kernels.cpu.compiled.attention_scratch import SCORE_STRIDE
from localinfer.kernels.cpu.compiled.elementwise import FORMULAS, add_scaled_row, elementwise_row
from localinfer.kernels.cpu.compiled.memory import call_op, load_f32, load_i64, load_u32_anywhere, store_f32, store_i64
from localinfer.kernels.cpu.compiled.pool import num_rows, scratch as scratch_of, take_units
from localinfer.kernels.cpu.kernel_abi import CHUNK, SPLIT_ROWS
from localinfer.kernels.cpu.parameters import ATTENTION, BATCH, CHOOSE_BLOCKS
from localinfer.kernels.jit.numba import inline, op

_RELU = list(FORMULAS).index("relu")
_BITS = 11
"""Leading bits of scores that are counted at once, three times."""


@inline
def _is_split(batch: int, num_threads: int) -> bool:
    """True if the scores of a batch are computed before, by all threads."""
    return num_threads > 1 and num_rows(batch, 0) <= SPLIT_ROWS


@inline
def _num_blocks(p: int, position: int) -> int:
    """Blocks that a row may choose from."""
    return position // ATTENTION.chosen_block(p) + 1


@inline
def _scores_of(p: int, slot: int) -> int:
    """Address of float32[lists][num_cells]."""
    return CHOOSE_BLOCKS.scores(p) + 4 * slot * ATTENTION.chosen_lists(p) * CHOOSE_BLOCKS.num_cells(p)


@inline
def _store_cells(p: int, source: int, visible: int, target: int) -> None:
    """The largest score of each cell of a chunk, of whose positions `visible` count."""
    size = CHOOSE_BLOCKS.cell(p)
    for first in range(0, visible, size):
        largest = load_f32(source + 4 * first)
        for place in range(first + 1, min(first + size, visible)):
            largest = max(largest, load_f32(source + 4 * place))
        store_f32(target + 4 * (first // size), largest)


@inline
def _score_chunk(p: int, memory: int, batch: int, row: int, chunk: int, scores: int) -> None:
    """Scores of one row with the keys of one chunk."""
    position, heads = load_i64(BATCH.positions(batch) + 8 * row), ATTENTION.group(p)
    visible = min(CHUNK, position + 1 - chunk * CHUNK)
    store_i64(memory + scratch.KV_HEAD, 0)
    store_i64(memory + scratch.QUERY_ROW, ATTENTION.queries(p) + row * ATTENTION.queries_stride(p))
    store_i64(memory + scratch.PAGE_TABLE, load_i64(BATCH.page_tables(batch) + 8 * row))
    set_pages(p, memory, chunk, position + 1)
    target = scores + 4 * (chunk * CHUNK // CHOOSE_BLOCKS.cell(p))
    weights, total = CHOOSE_BLOCKS.head_weights(p), memory + scratch.CHUNK
    for place in range(CHUNK):
        store_f32(total + 4 * place, np.float32(0))
    for first in range(0, heads, 8):
        count = min(8, heads - first)
        set_queries(p, memory, first, count)
        call_op(ATTENTION.score_keys(p), p, memory, 0, (visible + 15) // 16)
        for q in range(count):
            source = memory + scratch.SCORES + SCORE_STRIDE * q
            if weights != 0:
                weight = load_f32(weights + row * CHOOSE_BLOCKS.head_weights_stride(p) + 4 * (first + q))
                elementwise_row(_RELU, source, source, source, np.float32(0), visible)
                add_scaled_row(total, total, source, weight, visible)
            else:
                _store_cells(p, source, visible, target + 4 * (first + q) * CHOOSE_BLOCKS.num_cells(p))
    if weights != 0:
        _store_cells(p, total, visible, target)


@op
def score_blocks(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Scores of a batch of few rows, in units of one row and one chunk."""
    p, memory, control = parameters, scratch_of(batch, thread), BATCH.control(batch)
    if not _is_split(batch, num_threads):
        return
    while True:
        unit, row, rows = take_units(control, 1), 0, num_rows(batch, 0)
        while row < rows:
            position = load_i64(BATCH.positions(batch) + 8 * row)
            chunks = position // CHUNK + 1 if _num_blocks(p, position) > ATTENTION.chosen_count(p) else 0
            if unit < chunks:
                break
            unit -= chunks
            row += 1
        if row == rows:
            return
        _score_chunk(p, memory, batch, row, unit, _scores_of(p, row))


@inline
def _rank(place: int) -> np.int64:
    """A whole number that is larger where the float32 at an address is."""
    bits = np.int64(load_u32_anywhere(place))
    # -0 is 0.
    if bits == 1 << 31:
        bits = np.int64(0)
    return (1 << 32) - 1 - bits if bits >= 1 << 31 else bits + (1 << 31)


@inline
def _choose(p: int, memory: int, position: int, scores: int, out: int) -> None:
    """Write one list: the best blocks of a row, rising."""
    count, num_blocks, chosen = ATTENTION.chosen_count(p), _num_blocks(p, position), 0
    local = num_blocks
    if num_blocks > count:
        local = min(CHOOSE_BLOCKS.num_local(p), count)
        cells, last_cell = ATTENTION.chosen_block(p) // CHOOSE_BLOCKS.cell(p), position // CHOOSE_BLOCKS.cell(p)
        if cells > 1:
            for block in range(num_blocks):
                largest = load_f32(scores + 4 * block * cells)
                for cell in range(block * cells + 1, min(block * cells + cells, last_cell + 1)):
                    largest = max(largest, load_f32(scores + 4 * cell))
                store_f32(scores + 4 * block, largest)
        candidates, left, least = num_blocks - local, count - local, 0
        counts = memory + scratch.CHUNK
        if left > 0:
            # Ranks have 32 bits; doubled, they are three times the bits that are counted at once.
            for shift in (2 * _BITS, _BITS, 0):
                for index in range(1 << _BITS):
                    store_i64(counts + 8 * index, 0)
                for block in range(candidates):
                    rank = 2 * _rank(scores + 4 * block)
                    if rank >> (shift + _BITS) == least:
                        place = counts + 8 * (rank >> shift & (1 << _BITS) - 1)
                        store_i64(place, load_i64(place) + 1)
                index = (1 << _BITS) - 1
                while load_i64(counts + 8 * index) < left:
                    left -= load_i64(counts + 8 * index)
                    index -= 1
                least = least << _BITS | index
            # All that rank higher, and the first `left` of those that rank so.
            for block in range(candidates):
                rank = 2 * _rank(scores + 4 * block)
                if rank > least or (rank == least and left > 0):
                    left -= rank == least
                    store_f32(out + 4 * chosen, np.float32(block))
                    chosen += 1
    for block in range(num_blocks - local, num_blocks):
        store_f32(out + 4 * chosen, np.float32(block))
        chosen += 1
    for entry in range(chosen, count):
        store_f32(out + 4 * entry, np.float32(-1))


@op
def choose_blocks(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Lists of every row, one row at a time, after its scores if they are not there."""
    p, memory, control = parameters, scratch_of(batch, thread), BATCH.control(batch)
    is_split = _is_split(batch, num_threads)
    while True:
        row = take_units(control, 1)
        if row >= num_rows(batch, 0):
            return
        position = load_i64(BATCH.positions(batch) + 8 * row)
        scores = _scores_of(p, row if is_split else thread)
        if not is_split and _num_blocks(p, position) > ATTENTION.chosen_count(p):
            for chunk in range(position // CHUNK + 1):
                _score_chunk(p, memory, batch, row, chunk, scores)
        for index in range(ATTENTION.chosen_lists(p)):
            out = ATTENTION.out(p) + row * ATTENTION.out_stride(p) + 4 * index * ATTENTION.chosen_count(p)
            _choose(p, memory, position, scores + 4 * index * CHOOSE_BLOCKS.num_cells(p), out)
