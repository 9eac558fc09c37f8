"""From a row of logits to a token: filters without a sort, exact weights, penalties, and the draw with its noise.

The maxima of 64-wide blocks of keys give a threshold that at least k elements reach, so a filter looks at few blocks
beyond one pass. Logits are compared as int32 keys whose order is that of the floats. The weight of a logit is
exp((logit - best) / temperature), exactly as a whole number of 2^-43, so sums are exact in any order and selecting by a
histogram gives the very set that sorting gives; or roughly, four times as fast. A token is *ahead* of a position (key,
id) if its key is larger, or equal and its id lower: the order in which every filter keeps a head.

Each step is its own small compiled function, called from Python at about 1 us each: nested ones took 5 s to compile.
They take addresses and sizes, and wrap them in arrays.

The draw: every candidate's logit gets noise that depends on nothing but its position and id, and the largest wins. With
x = (logit - best) / temperature and a random u, the choice is the largest score x - log(-log u): the Gumbel-max way of
drawing from softmax(logits / temperature). Most losers are known before a logarithm is taken. A token beats a score s
only if -log u < exp(x - s), and 1 - u <= -log u. In a whole row the largest x of a block gives a whole number that the
first bits of a winner must reach, so that its losers need no exponential either.

u is of Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011): key = seed, counter =
(pair, position low, position high, 0). One output serves two tokens, half a block apart: of each block of 64, the pair
of counter 32 * block + i are its tokens i and 32 + i. The first takes the low 64 bits and the second the high ones;
without their last 12 these are a token's random word, and its u = (word + 1/2) * 2^-52.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from localinfer.kernels.cpu.compiled.emit import (
    ADDRESS,
    F32,
    F64,
    FLOAT,
    I32,
    I64,
    LANES,
    VOID,
    Emitter,
    Value,
    emitted,
    vector,
)
from localinfer.kernels.cpu.compiled.memory import (
    float32_pointer,
    float64_pointer,
    int32_pointer,
    int64_pointer,
    store_i64,
)
from localinfer.kernels.cpu.kernel_abi import NEGATIVE_INFINITY_KEY, NOT_FINITE, NOTHING_LEFT, SAMPLING_BLOCK
from localinfer.kernels.jit.numba import entry, inline, outline

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
_PAIRS = SAMPLING_BLOCK // 2
"""Pairs of a block; side by side they fill four AVX-512 registers, since each round waits for the one before."""


def _output(emit: Emitter, pairs: Value, seed: Value, position: Value) -> list[Value]:
    """The four words of the output for every pair of an i64 vector, each in the low half of a lane."""
    builder, lanes = emit.builder, pairs.type.count
    low, half = emit.i64(0xFFFFFFFF), emit.i64(32)
    low_halves, halves = emit.splat(low, lanes), emit.splat(half, lanes)
    c0 = pairs
    c1 = emit.splat(builder.and_(position, low), lanes)
    c2 = emit.splat(builder.lshr(position, half), lanes)
    c3 = emit.zeros(I64, lanes)
    keys = [builder.and_(seed, low), builder.lshr(seed, half)]
    for _ in range(_NUM_ROUNDS):
        # A 32-bit multiplication reads low halves only, so that clearing the high ones here costs nothing.
        product0 = builder.mul(builder.and_(c0, low_halves), emit.splat_constant(I64, _MULTIPLIERS[0], lanes))
        product1 = builder.mul(builder.and_(c2, low_halves), emit.splat_constant(I64, _MULTIPLIERS[1], lanes))
        c0 = builder.xor(builder.xor(builder.lshr(product1, halves), c1), emit.splat(keys[0], lanes))
        c1 = product1
        c2 = builder.xor(builder.xor(builder.lshr(product0, halves), c3), emit.splat(keys[1], lanes))
        c3 = product0
        keys = [builder.and_(builder.add(key, emit.i64(step)), low) for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return [builder.and_(word, low_halves) for word in (c0, c1, c2, c3)]


def _uniforms(emit: Emitter, tokens: Value, seed: Value, position: Value) -> Value:
    builder, lanes = emit.builder, tokens.type.count

    def every(value: int) -> Value:
        return emit.splat_constant(I64, value, lanes)

    blocks = builder.lshr(tokens, every(SAMPLING_BLOCK.bit_length() - 1))
    pairs = builder.or_(builder.mul(blocks, every(_PAIRS)), builder.and_(tokens, every(_PAIRS - 1)))
    c0, c1, c2, c3 = _output(emit, pairs, seed, position)
    is_first = builder.icmp_signed("==", builder.and_(tokens, every(_PAIRS)), every(0))
    low, high = builder.select(is_first, c0, c2), builder.select(is_first, c1, c3)
    word = builder.lshr(builder.or_(builder.shl(high, every(32)), low), every(12))
    middle = builder.fadd(builder.sitofp(word, vector(F64, lanes)), emit.splat_constant(F64, 0.5, lanes))
    return builder.fmul(middle, emit.splat_constant(F64, 2.0**-52, lanes))


@emitted(types.float64, types.int64, types.int64, types.int64)
def uniform_of(emit: Emitter, token: Value, seed: Value, position: Value) -> Value:
    """The u in (0, 1) of one token at a position."""
    builder = emit.builder
    u = _uniforms(emit, emit.splat(token, 1), seed, position)
    return builder.extract_element(u, emit.i32(0))


@emitted(VOID, types.int64, types.int64, types.int64, types.int64)
def store_uniforms(emit: Emitter, out: Value, tokens: Value, seed: Value, position: Value) -> None:
    """Write the u of the sixteen tokens whose int32 ids lie at an address, as float64."""
    builder = emit.builder
    ids = emit.load(tokens, vector(I32), align=4)
    emit.store(_uniforms(emit, builder.zext(ids, vector(I64)), seed, position), out, align=8)


STORED_AT_ONCE = LANES


@emitted(types.int64, types.int64, types.int64, types.int64, types.int64)
def tokens_reaching(emit: Emitter, needed: Value, block: Value, seed: Value, position: Value) -> Value:
    """A mask of those of a block's 64 tokens whose random word has at least `needed` as first 32 bits."""
    builder = emit.builder
    first = builder.mul(block, emit.i64(_PAIRS))
    places = ir.Constant(vector(I64, _PAIRS), list(range(_PAIRS)))
    _, c1, _, c3 = _output(emit, builder.add(emit.splat(first, _PAIRS), places), seed, position)
    needed = emit.splat(needed, _PAIRS)
    low, high = (
        builder.zext(builder.bitcast(builder.icmp_signed(">=", word, needed), ir.IntType(_PAIRS)), I64)
        for word in (c1, c3)
    )
    return builder.or_(builder.shl(high, emit.i64(_PAIRS)), low)


_KEY_FLOOR = -(2**31)
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693147180369123816490
_LN2_LOW = 1.90821492927058770002e-10
_ROUNDING = float(3 << 51)
"""Added to a small float64 it leaves the nearest whole number in the low bits of the sum."""
_ROUNDING_BITS = np.int64(0x4338000000000000)


@inline
def key_of(bits: Any) -> Any:
    """Order of a float32 given as bits; its own inverse but for -0.0, which takes the key of 0.0."""
    key = np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))
    return np.int32(0) if key == np.int32(-1) else key


@inline
def logit_of(key: Any) -> Any:
    """The logit of a key, as float64."""
    return np.float64(np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))).view(np.float32))


@inline
def _least_logit(key: Any) -> Any:
    """The float32 that every logit of at least this key reaches."""
    return np.float32(logit_of(np.int32(max(key, NEGATIVE_INFINITY_KEY))))


@inline
def weight_of(x: Any) -> Any:
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


@emitted(VOID, ADDRESS, ADDRESS, FLOAT, FLOAT, FLOAT, types.int32, FLOAT, FLOAT)
def _add_rough_masses(
    emit: Emitter, masses: Value, address: Value, start: Value, least: Value, above: Value, limit: Value, best: Value,
    inverse_temperature: Value,
) -> None:  # fmt: skip
    """Add to float64[3] at `masses` about the weights of 64 logits, in float32, sixteen at a time: the sum of all; that
    of logits from `start` on; and that of logits from `least` on, or from `above` on at the position `limit` and
    behind.
    """
    builder = emit.builder
    start, least, above = emit.splat(start), emit.splat(least), emit.splat(above)
    limit, best, scale = emit.splat(limit), emit.splat(best), emit.splat(inverse_temperature)
    sums, nothing = [emit.zeros(F32)] * 3, emit.zeros(F32)
    for first in range(0, SAMPLING_BLOCK, LANES):
        logits = emit.load_floats(address, 4 * first)
        weights = emit.exp(emit.mul(emit.sub(logits, best), scale))
        places = ir.Constant(vector(I32), list(range(first, first + LANES)))
        needed = builder.select(builder.icmp_signed("<", places, limit), least, above)
        counted = [
            weights,
            builder.select(builder.fcmp_ordered(">=", logits, start), weights, nothing),
            builder.select(builder.fcmp_ordered(">=", logits, needed), weights, nothing),
        ]
        sums = [emit.add(total, part) for total, part in zip(sums, counted, strict=True)]
    for index, total in enumerate(sums):
        before = emit.load(masses, F64, 8 * index, align=8)
        after = builder.fadd(before, builder.fpext(emit.reduce_add(total), F64))
        emit.store(after, masses, 8 * index, align=8)


@inline
def _weigh(keys: Any, weights: Any, count: int, best: float, inverse_temperature: float) -> Any:
    """Write the weight of every listed key; return their sum."""
    total = np.int64(0)
    for index in range(count):
        weight = weight_of((logit_of(keys[index]) - best) * inverse_temperature)
        weights[index] = weight
        total += weight
    return total


@outline
def _mass_ahead(
    logits: Any, bits: Any, block_keys: Any, first_block: int, threshold: int, limit: int, best: float,
    inverse_temperature: float,
) -> Any:  # fmt: skip
    """Sum of the weights of a row's tokens from a block on that are ahead of the position (`threshold`, `limit`).

    logits, bits: the same memory as float32 and as int32.
    """
    total = np.int64(0)
    for block in range(first_block, block_keys.size):
        if block_keys[block] >= threshold:
            for index in range(block * SAMPLING_BLOCK, min(block * SAMPLING_BLOCK + SAMPLING_BLOCK, bits.size)):
                is_ahead = key_of(bits[np.uint64(index)]) >= threshold + np.int64(index >= limit)
                weight = weight_of((np.float64(logits[np.uint64(index)]) - best) * inverse_temperature)
                total += weight if is_ahead else np.int64(0)
    return total


@entry("q", "qqqdd")
def weigh(keys: int, weights: int, count: int, best: float, inverse_temperature: float) -> int:
    """`_weigh` of int32[count] into int64[count]."""
    key_array, weight_array = carray(int32_pointer(keys), count), carray(int64_pointer(weights), count)
    return _weigh(key_array, weight_array, count, best, inverse_temperature)


@entry("q", "qqqqqqdd")
def mass_ahead(
    logits: int, vocab_size: int, block_keys: int, num_blocks: int, threshold: int, limit: int, best: float,
    inverse_temperature: float,
) -> int:  # fmt: skip
    """`_mass_ahead` of float32[vocab_size] with int32[num_blocks]."""
    row, keys = carray(float32_pointer(logits), vocab_size), carray(int32_pointer(block_keys), num_blocks)
    return _mass_ahead(
        row, carray(int32_pointer(logits), vocab_size), keys, 0, threshold, limit, best, inverse_temperature
    )


@entry("q", "qqqqqqqqdd")
def rough_masses(
    masses: int, logits: int, vocab_size: int, block_keys: int, num_blocks: int, start: int, threshold: int,
    limit: int, best: float, inverse_temperature: float,
) -> int:  # fmt: skip
    """Write float64[3]: about the weights of all tokens, of those ahead of (`start`, 0), and of those ahead of
    (`threshold`, `limit`), in units of the best token's weight; three times as fast as `mass_ahead`.

    Error: relative 1e-5, most of it from exponents that are rounded three times at up to 31, and 2^-44 per token.
    """
    row, keys = carray(float32_pointer(logits), vocab_size), carray(int32_pointer(block_keys), num_blocks)
    bits, sums = carray(int32_pointer(logits), vocab_size), carray(float64_pointer(masses), 3)
    num_full = vocab_size // SAMPLING_BLOCK
    sums[0] = _mass_ahead(row, bits, keys, num_full, _KEY_FLOOR, 0, best, inverse_temperature) * 2.0**-43
    sums[1] = _mass_ahead(row, bits, keys, num_full, start, 0, best, inverse_temperature) * 2.0**-43
    sums[2] = _mass_ahead(row, bits, keys, num_full, threshold, limit, best, inverse_temperature) * 2.0**-43
    for block in range(num_full):
        first = block * SAMPLING_BLOCK
        _add_rough_masses(
            masses,
            logits + 4 * first,
            _least_logit(start + 1),
            _least_logit(threshold),
            _least_logit(threshold + 1),
            np.int32(min(max(limit - first, 0), SAMPLING_BLOCK)),
            np.float32(best),
            np.float32(inverse_temperature),
        )
    return 0


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
    """Copy a row of logits, add the bias, then penalise every token that occurs in history[start:stop]; entries below 0
    are none.

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
        if history_array[index] >= 0:
            counts_array[history_array[index]] += 1
    for index in range(start, stop):
        token = history_array[index]
        if token >= 0 and counts_array[token] > 0:
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

    Candidates are the best token, and those ahead of the position (`threshold`, `limit`) that weigh at least `least`.
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
