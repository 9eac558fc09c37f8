"""Heads on their way into a quantized cache: rotated, then rounded to q8_0's codes, as the CPU does both.

The rotation is the orthonormal Walsh-Hadamard transform (as in QuaRot, arXiv 2404.00456, section 4), in groups of the
largest power of two that divides a head's size; the additions are those of the CPU in the CPU's order, so that the
codes are the same. A block of SCALE_BLOCK elements shares a scale.
"""

import math

from numba import cuda, float32

from localinfer.kernels.cuda.compiled import ptx
from localinfer.kernels.cuda.compiled.reductions import warp_max
from localinfer.kernels.cuda.compiled.rows import ROPE, rotated
from localinfer.kernels.cuda.jit import inline, template
from localinfer.kernels.kv_layout import SCALE_BLOCK

THREADS = 128
_HALF = SCALE_BLOCK // 2


def rotation_stages(size):
    """Number of times that a head of this size is folded: the logarithm of the largest power of two that divides it."""
    return (size & -size).bit_length() - 1


def rotation_factor(size):
    """Factor of every element before it is folded."""
    return 1.0 / math.sqrt(size & -size)


@inline
def fold(numbers, count, stages):
    """Rotate float32[count] of shared memory, multiplied by the factor before, with all threads of a block."""
    stage = 0
    while stage < stages:
        ptx.syncthreads()
        pair = ptx.thread()
        while pair < count // 2:
            first = ((pair >> stage) << (stage + 1)) + (pair & ((1 << stage) - 1))
            second = first + (1 << stage)
            left = numbers[first]
            right = numbers[second]
            numbers[first] = left + right
            numbers[second] = left - right
            pair = pair + THREADS
        stage = stage + 1
    ptx.syncthreads()


@inline
def block_scale(numbers, first, end):
    """The scale of numbers[first:end], at most SCALE_BLOCK of them; all lanes of a warp call it."""
    lane = ptx.thread() % 32
    largest = float32(0.0)
    if first + lane < end:
        largest = ptx.maximum(numbers[first + lane], -numbers[first + lane])
    if first + lane + _HALF < end:
        other = numbers[first + lane + _HALF]
        largest = ptx.maximum(largest, ptx.maximum(other, -other))
    largest = warp_max(largest)
    # That of zeros is -0, as on the CPU.
    return ptx.divide(largest if largest > float32(0.0) else float32(-0.0), float32(127.0))


@inline
def code_of(number, scale):
    """A number as a code, -127 to 127, of a scale that may have been rounded."""
    inverse = float32(0.0)
    if scale >= float32(1e-36):
        inverse = ptx.divide(float32(1.0), scale)
    return ptx.to_int(ptx.maximum(ptx.minimum(number * inverse, float32(127.0)), float32(-127.0)))


@template(tuples=ROPE)
def rotate_heads(size):
    """out = every head of x after RoPE, rotated, of [heads, rows]; out may be x."""
    stages = rotation_stages(size)
    factor = rotation_factor(size)

    def kernel(out, out_stride, x, x_stride, rope):
        head = ptx.block_x()
        row = ptx.block_y()
        numbers = cuda.shared.array(size, float32)
        source = x + row * x_stride + 4 * head * size
        column = ptx.thread()
        while column < size:
            value = ptx.load_f32(source + 4 * column)
            if rope[1] > 0:
                value = rotated(source, column, rope, row)
            numbers[column] = value * float32(factor)
            column = column + THREADS
        fold(numbers, size, stages)
        column = ptx.thread()
        while column < size:
            ptx.store_f32(out + row * out_stride + 4 * (head * size + column), numbers[column])
            column = column + THREADS

    return kernel
