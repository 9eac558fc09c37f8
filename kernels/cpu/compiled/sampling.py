"""Choose a token from one row of logits: filters that never sort, and noise that depends on nothing but its place.

Logits are compared as int32 keys whose order is that of the floats, so maxima vectorise and radix selection is exact.
The maxima of 64-wide blocks give a threshold that at least k elements reach, so a filter looks at few blocks beyond one
pass. Weights exp((logit - best) / temperature) are whole numbers of 2^-43: their sums are exact in any order, so
selecting by a histogram gives the very set that sorting gives.

Noise: Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), key = seed, counter =
(token, position low, position high, 0). 52 bits of its output make u in (0, 1), and the choice is the largest of
(logit - best) / temperature - log(-log u): the Gumbel-max way of drawing from softmax(logits / temperature).

Each step is its own small compiled function, called from Python at about 1 us each: nested ones took 5 s to compile.
The entries at the end take addresses and sizes, and wrap them in arrays.
"""

import math
from typing import Any

import numpy as np
from numba import carray

from localinfer.kernels.cpu.compiled.memory import (
    float32_pointer,
    float64_pointer,
    int32_pointer,
    int64_pointer,
    store_i64,
)
from localinfer.kernels.cpu.protocol import NOT_FINITE, NOTHING_LEFT, SAMPLING_BLOCK
from localinfer.kernels.jit import entry, inline

_LOWEST_KEY = np.int32(-(2**31))
_HIGHEST_KEY = np.int32(2**31 - 1)
_INFINITY_KEY = np.int32(0x7F800000)
_NEGATIVE_INFINITY_KEY = np.int32(~0x7F800000)
_ONE = float(2**43)
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10
_ROUNDING = float(3 << 51)
"""Added to a small float64 it leaves the nearest whole number in the low bits of the sum."""
_ROUNDING_BITS = np.int64(0x4338000000000000)

_LOW_HALF = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_PHILOX_M0 = np.uint64(0xD2511F53)
_PHILOX_M1 = np.uint64(0xCD9E8D57)
_PHILOX_W0 = np.uint64(0x9E3779B9)
_PHILOX_W1 = np.uint64(0xBB67AE85)


@inline
def _key(bits: Any) -> Any:
    """Order of a float32 given as bits; its own inverse but for -0.0, which takes the key of 0.0."""
    key = np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return np.int32(0) if key == np.int32(-1) else key


@inline
def _logit(key: Any) -> Any:
    return np.float64(np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32))


@inline
def _weight(x: Any) -> Any:
    """exp(x) for x <= 0 in units of 2^-43, to the nearest, as int64.

    Argument reduction to |r| <= ln(2) / 2 and the Taylor polynomial of degree 12, whose remainder is below 2^-52.
    """
    x = max(x, -64.0)
    shifted = x * _LOG2_E + _ROUNDING
    exponent = shifted - _ROUNDING
    r = (x - exponent * _LN2_HIGH) - exponent * _LN2_LOW
    p = 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = p * r + 1.0
    p = p * r + 1.0
    scale = np.int64((np.float64(shifted).view(np.int64) + np.int64(1023 + 43)) << np.int64(52)).view(np.float64)
    return np.float64(p * scale + _ROUNDING).view(np.int64) - _ROUNDING_BITS


@inline
def _scan(logits: Any, block_keys: Any) -> int:
    """Fill the block maxima int32[ceil(V / 64)]; return the lowest id of the largest logit, or what is wrong."""
    bits = logits.view(np.int32)
    lowest = _HIGHEST_KEY
    highest = _LOWEST_KEY
    num_full = bits.size // SAMPLING_BLOCK
    for block in range(num_full):
        best = _LOWEST_KEY
        for offset in range(SAMPLING_BLOCK):
            key = _key(bits[np.uint64(block * SAMPLING_BLOCK + offset)])
            best = max(best, key)
            lowest = min(lowest, key)
        block_keys[block] = best
        highest = max(highest, best)
    if num_full * SAMPLING_BLOCK < bits.size:
        best = _LOWEST_KEY
        for index in range(num_full * SAMPLING_BLOCK, bits.size):
            key = _key(bits[index])
            best = max(best, key)
            lowest = min(lowest, key)
        block_keys[num_full] = best
        highest = max(highest, best)
    if highest >= _INFINITY_KEY or lowest < _NEGATIVE_INFINITY_KEY:
        return NOT_FINITE
    if highest == _NEGATIVE_INFINITY_KEY:
        return NOTHING_LEFT
    block = 0
    while block_keys[block] != highest:
        block += 1
    index = block * SAMPLING_BLOCK
    while _key(bits[index]) != highest:
        index += 1
    return index


@inline
def _gather(logits: Any, block_keys: Any, threshold: int, ids: Any, keys: Any) -> int:
    """List by ascending id every token whose key reaches `threshold` and whose logit is not -inf; return how many."""
    bits = logits.view(np.int32)
    least = np.int32(max(np.int64(threshold), np.int64(_NEGATIVE_INFINITY_KEY) + 1))
    count = 0
    for block in range(block_keys.size):
        if block_keys[block] >= least:
            for index in range(block * SAMPLING_BLOCK, min(block * SAMPLING_BLOCK + SAMPLING_BLOCK, bits.size)):
                key = _key(bits[index])
                if key >= least:
                    ids[count] = index
                    keys[count] = key
                    count += 1
    return count


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


@inline
def _keep(ids: Any, keys: Any, count: int, threshold: int, ties: int) -> int:
    """Compact the lists to the keys above `threshold` and the first `ties` of those at it; return how many."""
    kept = 0
    for index in range(count):
        key = np.int64(keys[index])
        if key > threshold or (key == threshold and ties > 0):
            if key == threshold:
                ties -= 1
            ids[kept] = ids[index]
            keys[kept] = keys[index]
            kept += 1
    return kept


@inline
def _weigh(keys: Any, weights: Any, count: int, best: float, inverse_temperature: float) -> Any:
    """Write the weight of every listed key; return their sum."""
    total = np.int64(0)
    for index in range(count):
        weight = _weight((_logit(keys[index]) - best) * inverse_temperature)
        weights[index] = weight
        total += weight
    return total


@inline
def _mass(logits: Any, best: float, inverse_temperature: float) -> Any:
    """Sum of the weights of a whole row."""
    total = np.int64(0)
    for index in range(logits.size):
        total += _weight((np.float64(logits[index]) - best) * inverse_temperature)
    return total


@inline
def _uniforms(out: Any, seed: Any, position: int, tokens: Any, count: int) -> None:
    """Write the u in (0, 1) that each of the first `count` tokens has at a position: (k + 1/2) * 2^-52, k of 52 bits.

    The rounds stand here and not in a function of their own: inlined after its own optimisation it does not vectorise.
    """
    position_low = np.uint64(position) & _LOW_HALF
    position_high = np.uint64(position) >> _HALF
    for index in range(count):
        c0 = np.uint64(tokens[index]) & _LOW_HALF
        c1 = position_low
        c2 = position_high
        c3 = np.uint64(0)
        k0 = seed & _LOW_HALF
        k1 = seed >> _HALF
        for _ in range(10):
            product0 = c0 * _PHILOX_M0
            product1 = c2 * _PHILOX_M1
            c0 = (product1 >> _HALF) ^ c1 ^ k0
            c1 = product1 & _LOW_HALF
            c2 = (product0 >> _HALF) ^ c3 ^ k1
            c3 = product0 & _LOW_HALF
            k0 = (k0 + _PHILOX_W0) & _LOW_HALF
            k1 = (k1 + _PHILOX_W1) & _LOW_HALF
        out[index] = (np.float64(np.int64(((c1 << _HALF) | c0) >> np.uint64(12))) + 0.5) * 2.0**-52


@inline
def _race(
    ids: Any,
    keys: Any,
    weights: Any,
    count: int,
    threshold: int,
    mass_at_threshold: int,
    least: int,
    best: float,
    inverse_temperature: float,
    uniform: Any,
) -> Any:
    """Return the candidate of the largest noisy logit, the lowest id on ties.

    Candidates weigh at least `least` and have keys above `threshold`, or at it while `mass_at_threshold` is not used
    up. -log u >= 1 - u, so most losers are known before a logarithm is taken.
    """
    winner = np.int64(ids[0])
    winning_score = -math.inf
    bound = math.inf
    for index in range(count):
        weight = weights[index]
        key = np.int64(keys[index])
        if weight < least or key < threshold:
            continue
        if key == threshold:
            if mass_at_threshold <= 0:
                continue
            mass_at_threshold -= weight
        u = uniform[index]
        if 1.0 - u <= np.float64(weight + 1) * bound:
            score = (_logit(keys[index]) - best) * inverse_temperature - math.log(-math.log(u))
            if score > winning_score:
                winning_score = score
                winner = np.int64(ids[index])
                bound = math.exp(-score) * (1.0 + 1e-9) / _ONE
    return winner


@inline
def _adjust(
    out: Any,
    logits: Any,
    bias_ids: Any,
    bias_values: Any,
    history: Any,
    start: int,
    stop: int,
    repetition_penalty: float,
    frequency_penalty: float,
    presence_penalty: float,
    counts: Any,
) -> None:
    """Copy a row of logits, add the bias, then penalise every token that occurs in history[start:stop].

    A positive logit is divided by the repetition penalty and another multiplied (Keskar et al., CTRL, arXiv 1909.05858,
    section 4.1); then occurrences * frequency_penalty + presence_penalty is subtracted. In float64, rounded once.

    Shapes: out and logits float32[V]; bias_ids int32[B], distinct, bias_values float64[B]; history int32[>= stop];
        counts
        int32[V], all zero, and zero again afterwards.
    """
    for index in range(logits.size):
        out[index] = logits[index]
    for index in range(bias_ids.size):
        out[bias_ids[index]] = np.float32(np.float64(out[bias_ids[index]]) + bias_values[index])
    for index in range(start, stop):
        counts[history[index]] += 1
    for index in range(start, stop):
        token = history[index]
        if counts[token] > 0:
            value = np.float64(out[token])
            value = value / repetition_penalty if value > 0.0 else value * repetition_penalty
            out[token] = np.float32(value - counts[token] * frequency_penalty - presence_penalty)
            counts[token] = 0


@entry("q", "qqqq")
def scan(logits: int, vocab_size: int, block_keys: int, num_blocks: int) -> int:
    """`_scan` of float32[vocab_size] into int32[num_blocks]."""
    return _scan(carray(float32_pointer(logits), vocab_size), carray(int32_pointer(block_keys), num_blocks))


@entry("q", "qqqqqqq")
def gather(logits: int, vocab_size: int, block_keys: int, num_blocks: int, threshold: int, ids: int, keys: int) -> int:
    """`_gather`; ids and keys int32[vocab_size]."""
    return _gather(
        carray(float32_pointer(logits), vocab_size),
        carray(int32_pointer(block_keys), num_blocks),
        threshold,
        carray(int32_pointer(ids), vocab_size),
        carray(int32_pointer(keys), vocab_size),
    )


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
    """`_keep` in int32[count] twice."""
    return _keep(carray(int32_pointer(ids), count), carray(int32_pointer(keys), count), count, threshold, ties)


@entry("q", "qqqdd")
def weigh(keys: int, weights: int, count: int, best: float, inverse_temperature: float) -> int:
    """`_weigh` of int32[count] into int64[count]."""
    key_array, weight_array = carray(int32_pointer(keys), count), carray(int64_pointer(weights), count)
    return _weigh(key_array, weight_array, count, best, inverse_temperature)


@entry("q", "qqdd")
def mass(logits: int, vocab_size: int, best: float, inverse_temperature: float) -> int:
    """`_mass` of float32[vocab_size]."""
    return _mass(carray(float32_pointer(logits), vocab_size), best, inverse_temperature)


@entry("q", "qqqqq")
def uniforms(out: int, seed: int, position: int, tokens: int, count: int) -> int:
    """`_uniforms` of int32[count] into float64[count]."""
    out_array, token_array = carray(float64_pointer(out), count), carray(int32_pointer(tokens), count)
    _uniforms(out_array, np.uint64(seed), position, token_array, count)
    return 0


@entry("q", "qqqqqqqddq")
def race(
    ids: int,
    keys: int,
    weights: int,
    count: int,
    threshold: int,
    mass_at_threshold: int,
    least: int,
    best: float,
    inverse_temperature: float,
    uniform: int,
) -> int:
    """`_race` among int32[count] ids and keys, int64[count] weights and float64[count] uniforms."""
    return _race(
        carray(int32_pointer(ids), count),
        carray(int32_pointer(keys), count),
        carray(int64_pointer(weights), count),
        count,
        threshold,
        mass_at_threshold,
        least,
        best,
        inverse_temperature,
        carray(float64_pointer(uniform), count),
    )


@entry("q", "qqqqqqqqqdddq")
def adjust(
    out: int,
    logits: int,
    vocab_size: int,
    bias_ids: int,
    bias_values: int,
    num_biases: int,
    history: int,
    start: int,
    stop: int,
    repetition_penalty: float,
    frequency_penalty: float,
    presence_penalty: float,
    counts: int,
) -> int:
    """`_adjust` of float32[vocab_size]; bias_ids int32 and bias_values float64[num_biases]; history int32[stop]."""
    _adjust(
        carray(float32_pointer(out), vocab_size),
        carray(float32_pointer(logits), vocab_size),
        carray(int32_pointer(bias_ids), num_biases),
        carray(float64_pointer(bias_values), num_biases),
        carray(int32_pointer(history), stop),
        start,
        stop,
        repetition_penalty,
        frequency_penalty,
        presence_penalty,
        carray(int32_pointer(counts), vocab_size),
    )
    return 0
