"""The likeliest token of a row of logits, so that a step brings four bytes back to the host instead of a row."""

from numba import cuda, int64

from localinfer.kernels.cpu.protocol import NOT_FINITE, NOTHING_LEFT
from localinfer.kernels.cuda.compiled.ptx import (
    block_x,
    block_y,
    float_bits,
    load_f32,
    load_i64,
    meet,
    shuffle_int,
    store_i64,
    store_u32,
    thread,
)
from localinfer.kernels.cuda.jit import inline, template

THREADS = 128
SLICES = 64
"""Blocks that share a row."""
_LOWEST = -(2**31)
_HIGHEST = 2**31 - 1


@inline
def order_key(value):
    """A whole number that grows with a float, from its bits: the highest for NaN and infinity, the lowest for -inf."""
    bits = float_bits(value)
    magnitude = bits & 0x7FFFFFFF
    key = magnitude
    if bits >= 0x80000000:
        key = -1 - magnitude
    if magnitude >= 0x7F800000:
        key = int64(_HIGHEST)
        if bits == 0xFF800000:
            key = int64(_LOWEST)
    return key


@inline
def best_of_warp(key, token):
    """The largest key of a warp and its token, of equal keys the lowest token."""
    for distance in (16, 8, 4, 2, 1):
        other_key = shuffle_int(key, distance)
        other_token = shuffle_int(token, distance)
        if other_key > key or (other_key == key and other_token < token):
            key = other_key
            token = other_token
    return key, token


@inline
def best_of_block(key, token, keys, tokens):
    """As `best_of_warp`, for the four warps of a block."""
    key, token = best_of_warp(key, token)
    keys[thread() // 32] = key
    tokens[thread() // 32] = token
    meet()
    key = keys[0]
    token = tokens[0]
    for warp in range(1, 4):
        if keys[warp] > key or (keys[warp] == key and tokens[warp] < token):
            key = keys[warp]
            token = tokens[warp]
    return key, token


@template("qqqq")
def best_of_slices():
    """The best key and token of every slice of a row, int64[rows][SLICES][2], of [SLICES, rows]."""

    def kernel(logits, stride, vocab_size, bests):
        keys = cuda.shared.array(4, int64)
        tokens = cuda.shared.array(4, int64)
        size = (vocab_size + SLICES - 1) // SLICES
        token = block_x() * size + thread()
        end = min(block_x() * size + size, vocab_size)
        key = int64(_LOWEST)
        best = int64(_HIGHEST)
        while token < end:
            other = order_key(load_f32(logits + block_y() * stride + 4 * token))
            if other > key:
                key = other
                best = token
            token = token + THREADS
        key, best = best_of_block(key, best, keys, tokens)
        if thread() == 0:
            place = bests + (block_y() * SLICES + block_x()) * 16
            store_i64(place, key)
            store_i64(place + 8, best)

    return kernel


@template("qq")
def best_of_row():
    """The best token of every row, int32[rows], or NOT_FINITE or NOTHING_LEFT, of [1, rows]; 128 threads."""

    def kernel(bests, chosen):
        keys = cuda.shared.array(4, int64)
        tokens = cuda.shared.array(4, int64)
        key = int64(_LOWEST)
        token = int64(_HIGHEST)
        if thread() < SLICES:
            key = load_i64(bests + (block_y() * SLICES + thread()) * 16)
            token = load_i64(bests + (block_y() * SLICES + thread()) * 16 + 8)
        key, token = best_of_block(key, token, keys, tokens)
        if thread() == 0:
            if key == _HIGHEST:
                token = int64(NOT_FINITE)
            elif key == _LOWEST:
                token = int64(NOTHING_LEFT)
            store_u32(chosen + 4 * block_y(), token)

    return kernel
