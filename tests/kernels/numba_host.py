"""What a host program of a model may do beside it: parallel code of its own, compiled by Numba."""

import numba


@numba.njit(parallel=True)
def total(values):
    result = 0.0
    for index in numba.prange(values.size):
        result += values[index]
    return result
