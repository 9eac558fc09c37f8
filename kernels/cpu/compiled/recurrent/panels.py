"""One pass over a panel of a state: columns side by side in one or two vectors, one key channel below the other.

What a row adds to the state is put off until the next one reads it, so that one pass does both.
"""

from numba import types

from localinfer.kernels.cpu.compiled.simd.emit import F32, LANES, Emitter, Value
from localinfer.kernels.cpu.compiled.simd.intrinsics import ADDRESS, LITERAL, VOID, emitted

_SUMS = 2
"""Partial sums of a column over key channels: with two vectors and two products, enough to hide an addition."""
_VECTOR_BYTES = 4 * LANES


@emitted(VOID, *[LITERAL] * 4, *[ADDRESS] * 2, types.int64, *[ADDRESS] * 9)
def pass_panel(
    emit: Emitter, vectors: int, updates: int, multiplies: int, is_final: int, source: Value, target: Value,
    count: Value, decays: Value, key: Value, update: Value, other_key: Value, other_update: Value, keys: Value,
    queries: Value, by_key: Value, by_query: Value,
) -> None:  # fmt: skip
    """Update a panel of `count` channels at source and write it to target, or multiply it by two rows, or both.

    Channel c becomes decays[c] S[c], with updates = 2 + other_key[c] other_update, + key[c] update.
    by_key = sum over c of keys[c] S[c], by_query likewise of queries.
    is_final: target is a multiple of 64, and nothing reads it again in this op. What it held need not be read then: a
    decoded token took a tenth less for 18 layers of 16 x 128 x 128 (AMD Zen 4). The barrier after an op orders it.
    """
    b = emit.builder
    pairs = [(key, update), (other_key, other_update)][:updates]
    added = [[emit.load_floats(one, _VECTOR_BYTES * v) for v in range(vectors)] for _, one in pairs]

    def channel(index: Value, sums: list[Value]) -> list[Value]:
        offset = b.mul(index, emit.i64(_VECTOR_BYTES * vectors))
        place, scalar = b.add(source, offset), b.mul(index, emit.i64(4))

        def of_channel(start: Value) -> Value:
            return emit.splat(emit.load(b.add(start, scalar), F32, align=4))

        state = [emit.load_floats(place, _VECTOR_BYTES * v) for v in range(vectors)]
        if updates:
            decay = of_channel(decays)
            state = [emit.mul(s, decay) for s in state]
            for (start, _), columns in reversed(list(zip(pairs, added, strict=True))):
                one_key = of_channel(start)
                state = [emit.fma(one_key, u, s) for s, u in zip(state, columns, strict=True)]
            for v, value in enumerate(state):
                if is_final:
                    emit.store_past_caches(value, b.add(target, offset), _VECTOR_BYTES * v)
                else:
                    emit.store(value, b.add(target, offset), _VECTOR_BYTES * v, align=4)
        if not multiplies:
            return sums
        one_key, one_query = of_channel(keys), of_channel(queries)
        first = [emit.fma(one_key, s, total) for s, total in zip(state, sums[:vectors], strict=True)]
        return first + [emit.fma(one_query, s, total) for s, total in zip(state, sums[vectors:], strict=True)]

    def several(index: Value, carried: list[Value]) -> list[Value]:
        size = len(carried) // _SUMS
        parts = [
            channel(b.add(index, emit.i64(part)), carried[part * size : (part + 1) * size]) for part in range(_SUMS)
        ]
        return [value for part in parts for value in part]

    zeros = [emit.zeros(F32)] * (2 * vectors * _SUMS) if multiplies else []
    sums = emit.loop(emit.i64(0), count, _SUMS, zeros, several)
    for v in range(2 * vectors if multiplies else 0):
        out = by_key if v < vectors else by_query
        emit.store(emit.add(sums[v], sums[2 * vectors + v]), out, _VECTOR_BYTES * (v % vectors), align=4)
