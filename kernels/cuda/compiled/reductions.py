"""Reductions over the lanes of a warp, for every lane, and over the threads of a block, always in the same order."""

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.jit import inline


@inline
def warp_max(value):
    """The largest float of a warp."""
    for distance in (16, 8, 4, 2, 1):
        value = ptx.maximum(value, ptx.shuffle(value, distance))
    return value


@inline
def warp_sum(value):
    """The sum of a warp's floats."""
    for distance in (16, 8, 4, 2, 1):
        value = value + ptx.shuffle(value, distance)
    return value


@inline
def beats(key, index, other_key, other_index):
    """True if a key is larger than another, or equal with a lower index."""
    return key > other_key or (key == other_key and index < other_index)


@inline
def block_argmax(key, index, keys, indices):
    """The largest key of a block of 128 threads and its index, of equal keys the lowest; through shared memory."""
    thread = ptx.thread()
    keys[thread] = key
    indices[thread] = index
    ptx.syncthreads()
    for distance in (64, 32, 16, 8, 4, 2, 1):
        if thread < distance:
            other_key = keys[thread + distance]
            other_index = indices[thread + distance]
            if beats(other_key, other_index, keys[thread], indices[thread]):
                keys[thread] = other_key
                indices[thread] = other_index
        ptx.syncthreads()
    return keys[0], indices[0]


@inline
def block_sum(value, values):
    """The sum of whole numbers over a block of 128 threads, through shared memory."""
    thread = ptx.thread()
    ptx.syncthreads()
    values[thread] = value
    ptx.syncthreads()
    for distance in (64, 32, 16, 8, 4, 2, 1):
        if thread < distance:
            values[thread] = values[thread] + values[thread + distance]
        ptx.syncthreads()
    return values[0]
