"""Sums and maxima over the lanes of a warp, for every lane, always in the same order."""

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
