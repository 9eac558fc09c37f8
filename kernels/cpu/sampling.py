"""Choose a token from one row of logits: filters that never sort, and noise that depends on nothing but its place.

Logits are compared as int32 keys whose order is that of the floats, so maxima vectorise and radix selection is exact. The
maxima of 64-wide blocks give a threshold that at least k elements reach, so a filter looks at few blocks beyond one pass.
Weights exp((logit - best) / temperature) are whole numbers of 2^-43: their sums are exact in any order, so selecting by a
histogram gives the very set that sorting gives.

Noise: Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011), key = seed, counter = (token,
position low, position high, 0). 52 bits of its output make u in (0, 1), and the choice is the largest of
(logit - best) / temperature - log(-log u): the Gumbel-max way of drawing from softmax(logits / temperature).
"""

import math
from typing import Any

import numpy as np

from localinfer.kernels.jit import inline, jit

NOT_FINITE = -1
"""`choose` found a NaN or +inf."""
NOTHING_LEFT = -2
"""`choose` found every logit at -inf."""

BLOCK = 64
HISTOGRAM_BINS = 2048

_INT32_LOWEST = np.int32(-(2**31))
_KEY_INFINITY = np.int32(0x7F800000)
_KEY_NEGATIVE_INFINITY = np.int32(0x7F800000 ^ -1)
_ONE = float(2**43)
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10
_ROUNDING = float(3 << 51)
"""Adding it to a small float64 leaves the nearest whole number in the low bits of the sum."""
_NUCLEUS_BLOCKS = 512
"""Blocks that top-p looks at first; a real distribution's nucleus nearly always lies in them."""


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

    Argument reduction to |r| <= ln(2) / 2 and the Taylor polynomial of degree 12, whose remainder is below 2^-53.
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
    return np.float64(p * scale + _ROUNDING).view(np.int64) - np.int64(0x4338000000000000)


@inline
def _scan(bits: Any, block_keys: Any) -> Any:
    """Fill the block maxima; return the lowest and the highest key."""
    lowest = np.int32(0x7FFFFFFF)
    highest = _INT32_LOWEST
    num_full = bits.size // BLOCK
    for block in range(num_full):
        best = _INT32_LOWEST
        for offset in range(BLOCK):
            key = _key(bits[np.uint64(block * BLOCK + offset)])
            best = max(best, key)
            lowest = min(lowest, key)
        block_keys[block] = best
        highest = max(highest, best)
    if num_full * BLOCK < bits.size:
        best = _INT32_LOWEST
        for index in range(num_full * BLOCK, bits.size):
            key = _key(bits[index])
            best = max(best, key)
            lowest = min(lowest, key)
        block_keys[num_full] = best
        highest = max(highest, best)
    return lowest, highest


@inline
def _cut(keys: Any, weights: Any, count: Any, by_weight: Any, target: Any, histogram: Any) -> Any:
    """Find where the largest keys together reach `target` (of weight, or of count): radix selection, no sort.

    Returns that key and the sum of everything above it.
    """
    prefix = np.int64(0)
    above = np.int64(0)
    shift = 32
    for width in (11, 11, 10):
        mask = np.int64((1 << width) - 1)
        shift -= width
        for index in range(1 << width):
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
    return np.int32(prefix - np.int64(2**31)), above


@inline
def _keep(ids: Any, keys: Any, weights: Any, count: Any, by_weight: Any, target: Any, histogram: Any) -> Any:
    """Compact the lists to the smallest set that reaches `target`, lower ids first among equals; return its size."""
    threshold, reached = _cut(keys, weights, count, by_weight, target, histogram)
    kept = 0
    for index in range(count):
        key = keys[index]
        if key > threshold or (key == threshold and reached < target):
            if key == threshold:
                reached += weights[index] if by_weight else np.int64(1)
            ids[kept] = ids[index]
            keys[kept] = key
            weights[kept] = weights[index]
            kept += 1
    return kept


@inline
def _gather(bits: Any, block_keys: Any, threshold: Any, ids: Any, keys: Any) -> Any:
    """List every token whose key is at least `threshold` and whose logit is not -inf; return how many."""
    threshold = max(threshold, np.int32(_KEY_NEGATIVE_INFINITY + 1))
    count = 0
    for block in range((bits.size + BLOCK - 1) // BLOCK):
        if block_keys[block] >= threshold:
            for index in range(block * BLOCK, min(block * BLOCK + BLOCK, bits.size)):
                key = _key(bits[index])
                if key >= threshold:
                    ids[count] = index
                    keys[count] = key
                    count += 1
    return count


@inline
def _gather_largest(bits: Any, block_keys: Any, wanted: Any, ids: Any, keys: Any, weights: Any, histogram: Any) -> Any:
    """List a set that holds the `wanted` largest logits: all that reach the `wanted`-th largest block maximum."""
    num_blocks = (bits.size + BLOCK - 1) // BLOCK
    threshold = _INT32_LOWEST
    if wanted < num_blocks:
        threshold, _ = _cut(block_keys, weights, num_blocks, False, wanted, histogram)
    return _gather(bits, block_keys, threshold, ids, keys)


@inline
def _weigh(keys: Any, weights: Any, count: Any, best: Any, inverse_temperature: Any) -> Any:
    total = np.int64(0)
    for index in range(count):
        weight = _weight((_logit(keys[index]) - best) * inverse_temperature)
        weights[index] = weight
        total += weight
    return total


@inline
def _uniform(seed: Any, position: Any, token: Any) -> Any:
    """u in (0, 1) of one candidate: (k + 1/2) * 2^-52."""
    low = np.uint64(0xFFFFFFFF)
    half = np.uint64(32)
    c0 = np.uint64(token)
    c1 = np.uint64(position) & low
    c2 = np.uint64(position) >> half
    c3 = np.uint64(0)
    k0 = np.uint64(seed) & low
    k1 = np.uint64(seed) >> half
    for _ in range(10):
        product0 = c0 * np.uint64(0xD2511F53)
        product1 = c2 * np.uint64(0xCD9E8D57)
        c0 = (product1 >> half) ^ c1 ^ k0
        c1 = product1 & low
        c2 = (product0 >> half) ^ c3 ^ k1
        c3 = product0 & low
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return (np.float64(np.int64(((c1 << half) | c0) >> np.uint64(12))) + 0.5) * 2.0**-52


@inline
def _race(
    ids: Any,
    keys: Any,
    weights: Any,
    count: Any,
    best: Any,
    inverse_temperature: Any,
    seed: Any,
    position: Any,
    noise: Any,
) -> Any:
    """Return the candidate of the largest noisy logit, the lowest id on ties.

    -log u >= 1 - u, so most losers are known before a logarithm is taken.
    """
    winner = np.int64(ids[0])
    winning_score = -math.inf
    bound = math.inf
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        for offset in range(size):
            noise[offset] = _uniform(seed, position, ids[np.uint64(start + offset)])
        for offset in range(size):
            index = start + offset
            u = noise[offset]
            if 1.0 - u <= np.float64(weights[index] + 1) * bound:
                score = (_logit(keys[index]) - best) * inverse_temperature - math.log(-math.log(u))
                if score > winning_score:
                    winning_score = score
                    winner = np.int64(ids[index])
                    bound = math.exp(-score) * (1.0 + 1e-9) / _ONE
    return winner


@jit
def choose(
    logits: Any,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: Any,
    position: int,
    block_keys: Any,
    ids: Any,
    keys: Any,
    weights: Any,
    histogram: Any,
    noise: Any,
) -> int:
    """Filter one row by top-k, then top-p, then min-p, and draw a token; temperature 0 takes the largest logit.

    Each filter keeps a run of the order (logit descending, id ascending): top_k of them (0: all); the fewest whose
    probability, among what top-k kept, reaches top_p (1: all; at least one); those of at least min_p times the best's.

    Shapes: logits float32[V], contiguous, V < 2^20; scratch block_keys int32[ceil(V / BLOCK)], ids and keys int32[V],
        weights int64[V], histogram int64[HISTOGRAM_BINS], noise float64[BLOCK]. seed is uint64.
    Returns: the token id, or NOT_FINITE, or NOTHING_LEFT.
    """
    bits = logits.view(np.int32)
    lowest, highest = _scan(bits, block_keys)
    if highest >= _KEY_INFINITY or lowest < _KEY_NEGATIVE_INFINITY:
        return NOT_FINITE
    if highest == _KEY_NEGATIVE_INFINITY:
        return NOTHING_LEFT
    if temperature == 0.0:
        block = 0
        while block_keys[block] != highest:
            block += 1
        index = block * BLOCK
        while _key(bits[index]) != highest:
            index += 1
        return index

    best = _logit(highest)
    inverse_temperature = min(1.0 / temperature, 1e300)
    total = np.int64(0)
    if 0 < top_k < logits.size:
        count = _gather_largest(bits, block_keys, top_k, ids, keys, weights, histogram)
        if count > top_k:
            count = _keep(ids, keys, weights, count, False, top_k, histogram)
        total = _weigh(keys, weights, count, best, inverse_temperature)
        gathered = total
    elif top_p < 1.0:
        for index in range(logits.size):
            total += _weight((np.float64(logits[index]) - best) * inverse_temperature)
        count = _gather_largest(bits, block_keys, _NUCLEUS_BLOCKS, ids, keys, weights, histogram)
        gathered = _weigh(keys, weights, count, best, inverse_temperature)
    else:
        threshold = _INT32_LOWEST
        if min_p > 0.0:
            reach = best + math.log(min_p) * temperature
            threshold = _key(np.float32(reach - 1e-3 - 1e-6 * abs(reach)).view(np.int32))
        count = _gather(bits, block_keys, threshold, ids, keys)
        gathered = _weigh(keys, weights, count, best, inverse_temperature)

    if top_p < 1.0:
        target = max(np.int64(1), min(total, np.int64(math.ceil(top_p * np.float64(total)))))
        if gathered < target:
            count = _gather(bits, block_keys, _INT32_LOWEST, ids, keys)
            _weigh(keys, weights, count, best, inverse_temperature)
        count = _keep(ids, keys, weights, count, True, target, histogram)
    if min_p > 0.0:
        least = np.int64(math.ceil(min_p * _ONE))
        kept = 0
        for index in range(count):
            if weights[index] >= least:
                ids[kept] = ids[index]
                keys[kept] = keys[index]
                weights[kept] = weights[index]
                kept += 1
        count = kept
    return _race(ids, keys, weights, count, best, inverse_temperature, seed, position, noise)


@jit
def adjust(
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

    Shapes: out and logits float32[V]; bias_ids int32[B], distinct, bias_values float64[B]; history int32[>= stop]; counts
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


@jit
def uniforms(out: Any, seed: Any, position: int, tokens: Any) -> None:
    """Write the u of each token, as `choose` uses it (for verification of drafts, and for tests)."""
    for index in range(tokens.size):
        out[index] = _uniform(seed, position, tokens[index])
