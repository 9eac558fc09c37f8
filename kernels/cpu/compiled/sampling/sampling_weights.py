"""The weight of a logit: exp((logit - best) / temperature), exactly as an integer, or roughly and four times as fast.

Logits are compared as int32 keys whose order is that of the floats. Weights are whole numbers of 2^-43, so their sums
are exact in any order. A token is *ahead* of a place (key, id) if its key is larger, or equal and its id lower: the
order in which every filter keeps a head.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, types

from localinfer.kernels.cpu.compiled.simd.emit import F32, F64, I32, LANES, Emitter, Value, vector
from localinfer.kernels.cpu.compiled.simd.intrinsics import ADDRESS, FLOAT, VOID, emitted
from localinfer.kernels.cpu.compiled.simd.memory import float32_pointer, float64_pointer, int32_pointer, int64_pointer
from localinfer.kernels.cpu.kernel_abi import NEGATIVE_INFINITY_KEY, SAMPLING_BLOCK
from localinfer.kernels.jit.numba import entry, inline, outline

_LOWEST_KEY = -(2**31)
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
    of logits from `start` on; and that of logits from `least` on, or from `above` on at the place `limit` and behind.
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
    """Sum of the weights of a row's tokens from a block on that are ahead of the place (`threshold`, `limit`).

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
    sums[0] = _mass_ahead(row, bits, keys, num_full, _LOWEST_KEY, 0, best, inverse_temperature) * 2.0**-43
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
