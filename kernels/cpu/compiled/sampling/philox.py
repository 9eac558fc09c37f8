"""Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011) as vector code: key = seed,
counter = (pair, position low, position high, 0).

One output serves two tokens, half a block apart: of each block of 64, the pair of counter 32 * block + i are its tokens
i and 32 + i. The first takes the low 64 bits and the second the high ones; without their last 12 these are a token's
random word, and its u = (word + 1/2) * 2^-52.
"""

from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled.simd.emit import F64, I32, I64, LANES, Emitter, Value, vector
from localinfer.kernels.cpu.compiled.simd.intrinsics import VOID, emitted
from localinfer.kernels.cpu.kernel_abi import SAMPLING_BLOCK

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
