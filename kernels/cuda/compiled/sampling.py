"""The likeliest token of a row of logits, so that a step brings four bytes back to the host instead of a row."""

from numba import int64

from localinfer.kernels.cpu.kernel_abi import NOT_FINITE, NOTHING_LEFT
from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.jit import inline, template

THREADS = 128
_LOWEST = -(2**31)
_HIGHEST = 2**31 - 1


@inline
def order_key(value):
    """A whole number that grows with a float, from its bits: the highest for NaN and infinity, the lowest for -inf.

    Those of 0.0 and -0.0 are the same.
    """
    bits = ptx.float_bits(value)
    magnitude = bits & 0x7FFFFFFF
    key = magnitude
    if bits > 0x80000000:
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
        other_key = ptx.shuffle_int(key, distance)
        other_token = ptx.shuffle_int(token, distance)
        if other_key > key or (other_key == key and other_token < token):
            key = other_key
            token = other_token
    return key, token


@template("qqqq")
def best_of_warps(slices):
    """The best key and token of every warp's share of a row, int64[rows][4 * slices][2], of [slices, rows].

    Tokens are dealt out in turn, so that those which are often likely, the lowest, are spread over all warps. A warp
    without any leaves the lowest key.
    """
    step = THREADS * slices

    def kernel(logits, stride, vocab_size, bests):
        token = ptx.block_x() * THREADS + ptx.thread()
        key = int64(_LOWEST)
        best = int64(_HIGHEST)
        while token < vocab_size:
            other = order_key(ptx.load_f32(logits + ptx.block_y() * stride + 4 * token))
            if other > key:
                key = other
                best = token
            token = token + step
        key, best = best_of_warp(key, best)
        if ptx.thread() % 32 == 0:
            place = bests + ((ptx.block_y() * slices + ptx.block_x()) * 4 + ptx.thread() // 32) * 16
            ptx.store_i64(place, key)
            ptx.store_i64(place + 8, best)

    return kernel


@template("qq")
def best_of_row(slices):
    """The best token of every row, int32[rows], or NOT_FINITE or NOTHING_LEFT, of [1, rows]; 32 threads."""
    warps = 4 * slices

    def kernel(bests, chosen):
        key = int64(_LOWEST)
        token = int64(_HIGHEST)
        index = ptx.thread()
        while index < warps:
            place = bests + (ptx.block_y() * warps + index) * 16
            other_key = ptx.load_i64(place)
            other_token = ptx.load_i64(place + 8)
            if other_key > key or (other_key == key and other_token < token):
                key = other_key
                token = other_token
            index = index + 32
        key, token = best_of_warp(key, token)
        if ptx.thread() == 0:
            if key == _HIGHEST:
                token = int64(NOT_FINITE)
            elif key == _LOWEST:
                token = int64(NOTHING_LEFT)
            ptx.store_u32(chosen + 4 * ptx.block_y(), token)

    return kernel
