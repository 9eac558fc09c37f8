"""Attention to chosen positions: they are brought together, and then attended to as if they were all there are.

The n-th chosen position takes the place of position n, so whole chunks of them are computed at once, and choosing every
position gives the bits of attention without a choice. A page whose positions are all chosen in a row is read where it
lies; of others single positions are copied, to pages of this thread.
"""

import numpy as np

from localinfer.kernels.cpu.compiled.attention import attention_scratch as scratch
from localinfer.kernels.cpu.compiled.attention.attention_scratch import PAGES_PER_CHUNK
from localinfer.kernels.cpu.compiled.simd.memory import (
    load_f32,
    load_i64,
    load_u8,
    load_u16_anywhere,
    load_u32_anywhere,
    store_i64,
    store_u8,
    store_u16,
    store_u32,
)
from localinfer.kernels.cpu.kernel_abi import CHUNK
from localinfer.kernels.cpu.parameters import ATTENTION
from localinfer.kernels.jit.numba import inline
from localinfer.kernels.kv_layout import PAGE_TOKENS


@inline
def most_chosen(p: int, position: int) -> int:
    """How many positions a row at `position` attends to at most."""
    return min(ATTENTION.chosen_count(p) * ATTENTION.chosen_block(p), position + 1)


@inline
def num_chosen(p: int, entries: int, position: int) -> int:
    """How many positions the list of a row holds; only its last block may end behind the row's own."""
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
    """Where the first byte of a position's codes is, of pairs of positions or of fours in the order 0, 2, 1, 3."""
    if share == 2:
        return values + slot // 2 * 2 * columns + slot % 2
    return values + slot // 4 * 2 * columns + slot % 2 * 2 + slot % 4 // 2
