"""Merging the chunks of attention, from the first to the last, by the block that was the last to write one."""

from numba import cuda, float32, int64

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.activations import exponential
from localinfer.kernels.cuda.compiled.quantize import store_quantized
from localinfer.kernels.cuda.compiled.reductions import warp_max
from localinfer.kernels.cuda.compiled.rotation import fold, rotation_factor, rotation_stages
from localinfer.kernels.cuda.jit import inline

THREADS = 128
_WARPS = THREADS // 32
_TURN = 32
"""Chunks whose weights are computed at a time, one to each lane."""
_LOADS = 16
"""Values that a thread has under way at a time, if it has fewer sums."""


def merge_of(heads, value_size, is_rotated, quantizes):
    """Make the function that merges chunks of `heads` heads of a row, with all threads of a block.

    is_rotated: values were codes, whose rotation has to be undone.
    """
    stages = rotation_stages(value_size)
    factor = rotation_factor(value_size)
    stride = 4 * value_size + 8
    columns = -(-value_size // THREADS)
    own_heads = -(-heads // _WARPS)
    sums_size = heads * columns
    depth = max(1, _LOADS // sums_size)
    loaded_size = depth * sums_size
    numbers_size = heads * value_size
    weights_size = heads * _TURN

    @inline
    def merge(partials, partial_chunks, first, last, head, last_head, sinks, numbers, out, codes, records):
        """Chunks `first` to `last` at partials [head][chunk][value_size + 2], of the heads from `head` to `last_head`.

        numbers: float32[heads * value_size] of shared memory, for values that are rotated. out, codes, records: of the
        row; 0 for no codes.
        """
        lane = ptx.thread() % 32
        warp = ptx.thread() // 32
        weights = cuda.shared.array(weights_size, float32)
        totals = cuda.shared.array(heads, float32)
        largest = cuda.local.array(own_heads, float32)
        total = cuda.local.array(own_heads, float32)
        for own in range(own_heads):
            h = own * _WARPS + warp
            value = float32(0.0)
            start = float32(0.0)
            if h < heads:
                at = min(head + h, last_head)
                chunk = min(first + lane, last)
                value = ptx.load_f32(partials + (at * partial_chunks + chunk) * stride)
                chunk = chunk + 32
                while chunk <= last:
                    value = ptx.maximum(value, ptx.load_f32(partials + (at * partial_chunks + chunk) * stride))
                    chunk = chunk + 32
                value = warp_max(value)
                if sinks != 0:
                    sink = ptx.load_f32(sinks + 4 * at)
                    value = ptx.maximum(value, sink)
                    start = exponential(sink - value)
            largest[own] = value
            total[own] = start

        sums = cuda.local.array(sums_size, float32)
        loaded = cuda.local.array(loaded_size, float32)
        for i in range(sums_size):
            sums[i] = float32(0.0)
        turn = first
        while turn <= last:
            count = min(last - turn + 1, _TURN)
            for own in range(own_heads):
                h = own * _WARPS + warp
                if h < heads:
                    place = partials + (min(head + h, last_head) * partial_chunks + turn + lane) * stride
                    weight = float32(0.0)
                    part = float32(0.0)
                    if lane < count:
                        weight = exponential(ptx.load_f32(place) - largest[own])
                        part = ptx.load_f32(place + 4)
                    weights[h * _TURN + lane] = weight
                    chunk = 0
                    while chunk < count:
                        for k in range(4):
                            one_weight = ptx.shuffle_from(weight, chunk + k)
                            one_part = ptx.shuffle_from(part, chunk + k)
                            if chunk + k < count:
                                total[own] = total[own] + one_weight * one_part
                        chunk = chunk + 4
            ptx.syncthreads()
            chunk = 0
            while chunk < count:
                # Loads past the end read the last chunk, column or head, and are not used.
                for d in range(depth):
                    for h in range(heads):
                        whole = min(head + h, last_head) * partial_chunks + turn + min(chunk + d, count - 1)
                        for c in range(columns):
                            column = min(c * THREADS + ptx.thread(), value_size - 1)
                            at = (d * heads + h) * columns + c
                            loaded[at] = ptx.load_f32(partials + whole * stride + 8 + 4 * column)
                for d in range(depth):
                    if chunk + d < count:
                        for h in range(heads):
                            weight = weights[h * _TURN + chunk + d]
                            for c in range(columns):
                                at = h * columns + c
                                sums[at] = sums[at] + weight * loaded[d * sums_size + at]
                chunk = chunk + depth
            ptx.syncthreads()
            turn = turn + _TURN

        for own in range(own_heads):
            h = own * _WARPS + warp
            if h < heads and lane == 0:
                totals[h] = total[own]
        ptx.syncthreads()
        for i in range(sums_size):
            sums[i] = ptx.divide(sums[i], totals[i // columns])
        if is_rotated:
            for h in range(heads):
                for c in range(columns):
                    column = c * THREADS + ptx.thread()
                    if column < value_size:
                        numbers[h * value_size + column] = sums[h * columns + c] * float32(factor)
            fold(numbers, numbers_size, stages)
        for h in range(heads):
            for c in range(columns):
                column = c * THREADS + ptx.thread()
                if column < value_size and head + h <= last_head:
                    value = numbers[h * value_size + column] if is_rotated else sums[h * columns + c]
                    whole = (head + h) * value_size + column
                    ptx.store_f32(out + 4 * whole, value)
                    if quantizes:
                        store_quantized(value, lane, codes, records, int64(whole))

    return merge
