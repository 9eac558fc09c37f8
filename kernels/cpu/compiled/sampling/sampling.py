"""Which tokens of a row of logits stay, without ever sorting, the penalties before, and the draw among them.

The maxima of 64-wide blocks of keys give a threshold that at least k elements reach, so a filter looks at few blocks
beyond one pass. Keys are whole numbers and the sums of weights exact (`sampling_weights`), so selecting by a histogram
gives the very set that sorting gives.

Each step is its own small compiled function, called from Python at about 1 us each: nested ones took 5 s to compile.
They take addresses and sizes, and wrap them in arrays.

The draw: every candidate's logit gets noise that depends on nothing but its place, and the largest wins. With
x = (logit - best) / temperature and the u of `philox`, the choice is the largest score x - log(-log u): the Gumbel-max
way of drawing from softmax(logits / temperature). Most losers are known before a logarithm is taken. A token beats a
score s only if -log u < exp(x - s), and 1 - u <= -log u. In a whole row the largest x of a block gives a whole number
that the first bits of a winner must reach, so that its losers need no exponential either.
"""

import math
from typing import Any

import numpy as np
from numba import carray

from localinfer.kernels.cpu.compiled.sampling.philox import STORED_AT_ONCE, store_uniforms, tokens_reaching, uniform_of
from localinfer.kernels.cpu.compiled.sampling.sampling_weights import key_of, logit_of, weight_of
from localinfer.kernels.cpu.compiled.simd.memory import (
    float32_pointer,
    float64_pointer,
    int32_pointer,
    int64_pointer,
    store_i64,
)
from localinfer.kernels.cpu.kernel_abi import NEGATIVE_INFINITY_KEY, NOT_FINITE, NOTHING_LEFT, SAMPLING_BLOCK
from localinfer.kernels.jit.numba import entry, inline

_LOWEST_KEY = np.int32(-(2**31))
_HIGHEST_KEY = np.int32(2**31 - 1)
_INFINITY_KEY = np.int32(0x7F800000)
_ONE = float(2**43)
_MARGIN = 1.0 + 1e-9
"""Covers the rounding of a bound's exponential, so that no winner is passed over."""
_LEAST_REACH = 2.0**-53
"""The least 1 - u."""


@inline
def _cut(keys: Any, weights: Any, count: int, by_weight: bool, target: int, histogram: Any) -> Any:
    """Find where the largest keys together reach `target` of weight, or of count: radix selection, no sort.

    Shapes: keys int32[count], weights int64[count] (not read unless by_weight), histogram int64[2048].
    Returns: that key, and the sum of everything above it.
    """
    prefix = np.int64(0)
    above = np.int64(0)
    shift = 32
    for width in (11, 11, 10):
        mask = np.int64((1 << width) - 1)
        shift -= width
        for index in range(mask + 1):
            histogram[index] = 0
        for index in range(count):
            digits = (np.int64(keys[index]) + np.int64(2**31)) >> shift
            if digits >> width == prefix:
                histogram[digits & mask] += weights[index] if by_weight else np.int64(1)
        digit = mask
        while digit > 0 and above + histogram[digit] < target:
            above += histogram[digit]
            digit -= 1
        prefix = (prefix << width) | digit
    return prefix - np.int64(2**31), above


@entry("q", "qqqqq")
def scan(logits: int, vocab_size: int, block_keys: int, num_blocks: int, sample_keys: int) -> int:
    """Find the lowest id of the largest logit, or what is wrong.

    Writes: of each block of 64, the largest key and the first, int32[ceil(V / 64)] each.
    """
    block_keys_array = carray(int32_pointer(block_keys), num_blocks)
    sample_keys_array = carray(int32_pointer(sample_keys), num_blocks)
    bits = carray(int32_pointer(logits), vocab_size)
    lowest = _HIGHEST_KEY
    highest = _LOWEST_KEY
    num_full = bits.size // SAMPLING_BLOCK
    for block in range(num_full):
        best = _LOWEST_KEY
        for offset in range(SAMPLING_BLOCK):
            key = key_of(bits[np.uint64(block * SAMPLING_BLOCK + offset)])
            best = max(best, key)
            lowest = min(lowest, key)
        block_keys_array[block] = best
        highest = max(highest, best)
    if num_full * SAMPLING_BLOCK < bits.size:
        best = _LOWEST_KEY
        for index in range(num_full * SAMPLING_BLOCK, bits.size):
            key = key_of(bits[index])
            best = max(best, key)
            lowest = min(lowest, key)
        block_keys_array[num_full] = best
        highest = max(highest, best)
    for block in range(block_keys_array.size):
        sample_keys_array[block] = key_of(bits[block * SAMPLING_BLOCK])
    if highest >= _INFINITY_KEY or lowest < NEGATIVE_INFINITY_KEY:
        return NOT_FINITE
    if highest == NEGATIVE_INFINITY_KEY:
        return NOTHING_LEFT
    block = 0
    while block_keys_array[block] != highest:
        block += 1
    index = block * SAMPLING_BLOCK
    while key_of(bits[index]) != highest:
        index += 1
    return index


@entry("q", "qqqqqqq")
def gather(logits: int, vocab_size: int, block_keys: int, num_blocks: int, threshold: int, ids: int, keys: int) -> int:
    """List by ascending id every token whose key reaches `threshold` and whose logit is not -inf; return how many."""
    block_keys_array = carray(int32_pointer(block_keys), num_blocks)
    ids_array = carray(int32_pointer(ids), vocab_size)
    keys_array = carray(int32_pointer(keys), vocab_size)
    bits = carray(int32_pointer(logits), vocab_size)
    least = np.int32(max(np.int64(threshold), np.int64(NEGATIVE_INFINITY_KEY) + 1))
    count: Any = 0
    for block in range(block_keys_array.size):
        if block_keys_array[block] >= least:
            for index in range(block * SAMPLING_BLOCK, min(block * SAMPLING_BLOCK + SAMPLING_BLOCK, bits.size)):
                # Without a branch, which would be taken at random: what does not stay is overwritten by the next.
                key = key_of(bits[index])
                ids_array[count] = index
                keys_array[count] = key
                count += np.int64(key >= least)
    return count


@entry("q", "qqqqqqq")
def cut(keys: int, weights: int, count: int, by_weight: int, target: int, histogram: int, above: int) -> int:
    """`_cut`; returns the key and stores the sum above it at `above`."""
    threshold, sum_above = _cut(
        carray(int32_pointer(keys), count),
        carray(int64_pointer(weights), count),
        count,
        by_weight != 0,
        target,
        carray(int64_pointer(histogram), 2048),
    )
    store_i64(above, sum_above)
    return threshold


@entry("q", "qqqqq")
def keep(ids: int, keys: int, count: int, threshold: int, ties: int) -> int:
    """Compact the lists to the keys above `threshold` and the first `ties` of those at it; return how many."""
    ids_array = carray(int32_pointer(ids), count)
    keys_array = carray(int32_pointer(keys), count)
    kept = 0
    for index in range(count):
        key = np.int64(keys_array[index])
        if key > threshold or (key == threshold and ties > 0):
            if key == threshold:
                ties -= 1
            ids_array[kept] = ids_array[index]
            keys_array[kept] = keys_array[index]
            kept += 1
    return kept


@entry("q", "qqqqqqqqqdddq")
def adjust(
    out: int, logits: int, vocab_size: int, bias_ids: int, bias_values: int, num_biases: int, history: int, start: int,
    stop: int, repetition_penalty: float, frequency_penalty: float, presence_penalty: float, counts: int,
) -> int:  # fmt: skip
    """Copy a row of logits, add the bias, then penalise every token that occurs in history[start:stop].

    A positive logit is divided by the repetition penalty and another multiplied (Keskar et al., CTRL, arXiv 1909.05858,
    section 4.1); then occurrences * frequency_penalty + presence_penalty is subtracted. In float64, rounded once.

    Shapes: out and logits float32[V]; bias_ids int32[B], distinct, bias_values float64[B]; history int32[>= stop];
        counts int32[V], all zero, and zero again afterwards.
    """
    out_array = carray(float32_pointer(out), vocab_size)
    logits_array = carray(float32_pointer(logits), vocab_size)
    bias_ids_array = carray(int32_pointer(bias_ids), num_biases)
    bias_values_array = carray(float64_pointer(bias_values), num_biases)
    history_array = carray(int32_pointer(history), stop)
    counts_array = carray(int32_pointer(counts), vocab_size)
    for index in range(logits_array.size):
        out_array[index] = logits_array[index]
    for index in range(bias_ids_array.size):
        out_array[bias_ids_array[index]] = np.float32(
            np.float64(out_array[bias_ids_array[index]]) + bias_values_array[index]
        )
    for index in range(start, stop):
        counts_array[history_array[index]] += 1
    for index in range(start, stop):
        token = history_array[index]
        if counts_array[token] > 0:
            value = np.float64(out_array[token])
            value = value / repetition_penalty if value > 0.0 else value * repetition_penalty
            out_array[token] = np.float32(value - counts_array[token] * frequency_penalty - presence_penalty)
            counts_array[token] = 0
    return 0


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
    bits = carray(int32_pointer(logits), vocab_size)
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
