"""The draw: every candidate's logit gets noise that depends on nothing but its place, and the largest wins.

With x = (logit - best) / temperature and the u of `philox`, the choice is the largest score x - log(-log u): the
Gumbel-max way of drawing from softmax(logits / temperature).

Most losers are known before a logarithm is taken. A token beats a score s only if -log u < exp(x - s), and 1 - u <=
-log u. In a whole row the largest x of a block gives a whole number that the first bits of a winner must reach, so
that its losers need no exponential either.
"""

import math
from typing import Any

import numpy as np
from numba import carray

from localinfer.kernels.cpu.compiled.sampling.philox import STORED_AT_ONCE, store_uniforms, tokens_reaching, uniform_of
from localinfer.kernels.cpu.compiled.sampling.sampling_weights import key_of, logit_of, weight_of
from localinfer.kernels.cpu.compiled.simd.memory import float32_pointer, float64_pointer, int32_pointer, int64_pointer
from localinfer.kernels.cpu.kernel_abi import NEGATIVE_INFINITY_KEY, SAMPLING_BLOCK
from localinfer.kernels.jit.numba import entry

_ONE = float(2**43)
_MARGIN = 1.0 + 1e-9
"""Covers the rounding of a bound's exponential, so that no winner is passed over."""
_LEAST_REACH = 2.0**-53
"""The least 1 - u."""


@entry("q", "qqqqq")
def uniforms(out: int, seed: int, position: int, tokens: int, count: int) -> int:
    """Write to float64[count] the u in (0, 1) that each of int32[count] tokens has at a position."""
    num_stored = count // STORED_AT_ONCE * STORED_AT_ONCE
    for index in range(0, num_stored, STORED_AT_ONCE):
        store_uniforms(out + 8 * index, tokens + 4 * index, seed, position)
    out_array, token_array = carray(float64_pointer(out), count), carray(int32_pointer(tokens), count)
    for index in range(num_stored, count):
        out_array[index] = uniform_of(np.int64(token_array[index]), seed, position)
    return 0


@entry("q", "qqqqqqqddq")
def race(
    ids: int, keys: int, weights: int, count: int, threshold: int, mass_at_threshold: int, least: int, best: float,
    inverse_temperature: float, uniform: int,
) -> int:  # fmt: skip
    """Return the candidate of the largest noisy logit, the lowest id on ties.

    Candidates weigh at least `least` and have keys above `threshold`, or at it while `mass_at_threshold` is not used
    up.
    """
    ids_array = carray(int32_pointer(ids), count)
    keys_array = carray(int32_pointer(keys), count)
    weights_array = carray(int64_pointer(weights), count)
    uniform_array = carray(float64_pointer(uniform), count)
    winner: Any = np.int64(ids_array[0])
    winning_score = -math.inf
    bound = math.inf
    for index in range(count):
        weight = weights_array[index]
        key = np.int64(keys_array[index])
        if weight < least or key < threshold:
            continue
        if key == threshold:
            if mass_at_threshold <= 0:
                continue
            mass_at_threshold -= weight
        u = uniform_array[index]
        if 1.0 - u <= np.float64(weight + 1) * bound:
            score = (logit_of(keys_array[index]) - best) * inverse_temperature - math.log(-math.log(u))
            if score > winning_score:
                winning_score = score
                winner = np.int64(ids_array[index])
                bound = math.exp(-score) * (1.0 + 1e-9) / _ONE
    return winner


@entry("q", "qqqqqqqqqdqq")
def race_row(
    logits: int, vocab_size: int, block_keys: int, num_blocks: int, block_weights: int, threshold: int, limit: int,
    least: int, best_token: int, inverse_temperature: float, seed: int, position: int,
) -> int:  # fmt: skip
    """Return the token of the largest noisy logit of a row, the lowest id on ties.

    Candidates are the best token, and those ahead of the place (`threshold`, `limit`) that weigh at least `least`.
    Shapes: logits float32[V]; block_keys int32 and block_weights int64[ceil(V / 64)], the largest of each block.
    """
    logits_array = carray(float32_pointer(logits), vocab_size)
    block_keys_array = carray(int32_pointer(block_keys), num_blocks)
    block_weights_array = carray(int64_pointer(block_weights), num_blocks)
    bits = logits_array.view(np.int32)
    best = np.float64(logits_array[best_token])
    winner: Any = np.int64(best_token)
    winning_score = -math.log(-math.log(uniform_of(best_token, seed, position)))
    bound = math.exp(-winning_score) * _MARGIN / _ONE
    for block in range(block_keys_array.size):
        reach = np.float64(block_weights_array[block] + 1) * bound
        if block_keys_array[block] < threshold or reach < _LEAST_REACH:
            continue
        first = block * SAMPLING_BLOCK
        needed = np.int64(max(1.0 - reach, 0.0) * 2.0**32) - 1
        chances = tokens_reaching(needed, block, seed, position)
        if chances == 0:
            continue
        for index in range(first, min(first + SAMPLING_BLOCK, bits.size)):
            key = np.int64(key_of(bits[index]))
            if (chances >> (index - first)) & 1 == 0 or key < threshold + np.int64(index >= limit):
                continue
            x = (logit_of(np.int32(key)) - best) * inverse_temperature
            if key <= NEGATIVE_INFINITY_KEY or weight_of(x) < least:
                continue
            score = x - math.log(-math.log(uniform_of(index, seed, position)))
            if score > winning_score or (score == winning_score and index < winner):
                winning_score = score
                winner = np.int64(index)
                bound = math.exp(-score) * _MARGIN / _ONE
    return winner
