"""Attention to chosen positions: of a chunk only the blocks of sixteen positions that hold one are read.

Neighbouring blocks are computed together, as all of a chunk are where every position is attended to, so that choosing
every position gives the bits of attention without a choice.
"""

import numpy as np

from localinfer.kernels.cpu.compiled.attention import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention.attention_scratch import MARKS, SCORE_STRIDE
from localinfer.kernels.cpu.compiled.matmul.rows import add_scaled_row
from localinfer.kernels.cpu.compiled.simd.memory import (
    call_op,
    load_f32,
    load_i64,
    load_u8,
    store_f32,
    store_i64,
    store_u8,
)
from localinfer.kernels.cpu.kernel_abi import CHUNK
from localinfer.kernels.cpu.parameters import ATTENTION
from localinfer.kernels.jit.numba import inline


@inline
def mark_chosen(p: int, memory: int, start: int, high: int) -> int:
    """Mark the chosen ones of the positions start .. start + high of a unit's row; returns how many there are."""
    size, entries = ATTENTION.chosen_block(p), load_i64(memory + scratch.CHOSEN)
    count = min(ATTENTION.chosen_count(p), load_i64(memory + scratch.POSITION) // size + 1)
    first, end, wanted = 0, count, np.float32(start // size)
    while first < end:
        middle = (first + end) // 2
        if load_f32(entries + 4 * middle) < wanted:
            first = middle + 1
        else:
            end = middle
    for word in range(CHUNK // 8):
        store_i64(memory + MARKS + 8 * word, 0)
    found = 0
    for entry in range(first, count):
        begin = np.int64(load_f32(entries + 4 * entry)) * size - start
        if begin >= high:
            break
        for place in range(max(0, begin), min(high, begin + size)):
            store_u8(memory + MARKS + place, np.uint8(1))
            found += 1
    return found


@inline
def _is_marked(memory: int, block: int) -> bool:
    """Whether one of sixteen positions is marked."""
    place = memory + MARKS + 16 * block
    return load_i64(place) | load_i64(place + 8) != 0


@inline
def _run_end(memory: int, block: int, last_block: int) -> int:
    """The end of the run of marked blocks that begins with this one."""
    while block < last_block and _is_marked(memory, block):
        block += 1
    return block


@inline
def score_marked(p: int, memory: int, first_block: int, last_block: int, count: int) -> None:
    """Scores of `count` queries with the marked positions of some blocks, and -inf for the others."""
    block = first_block
    while block < last_block:
        end = _run_end(memory, block, last_block)
        if end > block:
            call_op(ATTENTION.score_keys(p), p, memory, block, end)
        block = max(end, block + 1)
    for q in range(count):
        scores = memory + scratch.SCORES + SCORE_STRIDE * q
        for place in range(16 * first_block, 16 * last_block):
            if load_u8(memory + MARKS + place) == 0:
                store_f32(scores + 4 * place, np.float32(-np.inf))


@inline
def weigh_marked(p: int, memory: int, first_block: int, last_block: int, high: int) -> None:
    """Weighted values of the marked blocks: the sum over runs of them, in order."""
    target, is_first = load_i64(memory + scratch.CHUNK_VALUES), True
    block = first_block
    while block < last_block:
        end = _run_end(memory, block, last_block)
        if end > block:
            store_i64(memory + scratch.CHUNK_VALUES, target if is_first else memory + scratch.RUN)
            call_op(ATTENTION.weigh_values(p), p, memory, 16 * block, min(high, 16 * end))
            if not is_first:
                columns = load_i64(memory + scratch.COUNT) * ATTENTION.value_columns(p)
                add_scaled_row(target, target, memory + scratch.RUN, np.float32(1), columns)
            is_first = False
        block = max(end, block + 1)
    store_i64(memory + scratch.CHUNK_VALUES, target)
