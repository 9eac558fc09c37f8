"""The innermost loops of attention: one to eight queries against one chunk of keys and values.

A chunk is CHUNK absolute positions, wherever a batch begins. Per chunk and query: scores, their maximum, the
exponentials, their sum and the weighted values; then the chunk is merged into the running state. Chunks merge in
order, so the result depends only on the query's own prefix. The method is online softmax (Milakov and Gimelshein,
arXiv 1805.02867) over fixed chunks.
"""

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from localinfer.kernels.cpu.compiled.emit import F16, F32, I32, I64, LANES, Emitter, Value, vector

_MINUS_INFINITY = float("-inf")


def _element(kind: int) -> Any:
    """Kind 0 is float32, kind 1 float16."""
    return (F32, F16)[kind]


@intrinsic
def key_scores(
    typing_context: Any,
    kind: Any,
    num_queries: Any,
    queries: Any,
    keys: Any,
    key_size: Any,
    scale: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[q][0..15] = scale * (query q . each of sixteen keys).

    queries: address of num_queries int64 addresses of float32[key_size]; keys: [key_size][16] elements of `kind`.
    """
    if not isinstance(kind, types.IntegerLiteral) or not isinstance(num_queries, types.IntegerLiteral):
        raise RequireLiteralValue("element kind and query count choose the code that is emitted")
    element, count = _element(kind.literal_value), num_queries.literal_value
    stride = 32 if element is F16 else 64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, b = Emitter(context, builder), builder
        _, _, table, key_block, size, scale_value, target, target_stride = arguments
        rows = [emit.load(table, I64, 8 * q, align=8) for q in range(count)]

        def step(d: Value, totals: list[Value]) -> Sequence[Value]:
            lanes = emit.load_floats(b.add(key_block, b.mul(d, emit.i64(stride))), 0, element)
            return [
                emit.fma(emit.splat(emit.load(b.add(row, b.mul(d, emit.i64(4))), F32, align=4)), lanes, total)
                for row, total in zip(rows, totals, strict=True)
            ]

        totals = emit.loop(emit.i64(0), size, 1, [emit.zeros(F32)] * count, step)
        scales = emit.splat(scale_value)
        for q, total in enumerate(totals):
            emit.store(emit.mul(total, scales), b.add(target, b.mul(target_stride, emit.i64(q))), align=64)
        return context.get_dummy_value()

    signature = types.void(kind, num_queries, *[types.int64] * 3, types.float32, types.int64, types.int64)
    return signature, generate


@intrinsic
def softmax_chunk(
    typing_context: Any,
    scores: Any,
    num_scores: Any,
    first_position: Any,
    low: Any,
    high: Any,
    softcap: Any,
    slope: Any,
    query_position: Any,
    state: Any,
) -> Any:
    """Turn scores into exp(score - maximum) in place; state float32[2] becomes (maximum, sum).

    Score i belongs to position first_position + i and counts if low <= position < high; the others become 0.
    num_scores is a multiple of 16.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, b = Emitter(context, builder), builder
        address, count, first, lowest, highest, cap, alibi, query, state_address = arguments
        lane_index = ir.Constant(vector(I32), list(range(LANES)))
        bounds = [emit.splat(b.trunc(b.sub(bound, first), I32)) for bound in (lowest, highest)]
        has_cap = b.fcmp_ordered(">", cap, ir.Constant(F32, 0.0))
        slopes = emit.splat(alibi)
        offset = emit.splat(b.trunc(b.sub(first, query), I32))
        minus_infinity = emit.splat_constant(F32, _MINUS_INFINITY)

        def transformed(i: Value, lanes: Value) -> Value:
            with b.if_else(has_cap) as (then, otherwise):
                with then:
                    caps = emit.splat(cap)
                    doubled = emit.mul(b.fdiv(lanes, caps), emit.splat_constant(F32, 2.0))
                    one = emit.splat_constant(F32, 1.0)
                    ratio = b.fdiv(emit.splat_constant(F32, 2.0), emit.add(emit.exp(doubled), one))
                    capped = emit.mul(emit.sub(one, ratio), caps)
                    then_block = b.block
                with otherwise:
                    otherwise_block = b.block
            merged = b.phi(vector(F32))
            merged.add_incoming(capped, then_block)
            merged.add_incoming(lanes, otherwise_block)
            index = b.add(emit.splat(b.trunc(i, I32)), lane_index)
            distance = emit.to_float(b.add(index, offset))
            value = emit.add(merged, emit.mul(slopes, distance))
            inside = b.and_(b.icmp_signed(">=", index, bounds[0]), b.icmp_signed("<", index, bounds[1]))
            return b.select(inside, value, minus_infinity)

        def find_maximum(i: Value, carried: list[Value]) -> Sequence[Value]:
            place = b.add(address, b.mul(i, emit.i64(4)))
            value = transformed(i, emit.load_floats(place))
            emit.store(value, place, align=64)
            return [emit.maximum(value, carried[0])]

        maximum = emit.reduce_max(emit.loop(emit.i64(0), count, LANES, [minus_infinity], find_maximum)[0])
        maxima = emit.splat(maximum)

        def exponentiate(i: Value, carried: list[Value]) -> Sequence[Value]:
            place = b.add(address, b.mul(i, emit.i64(4)))
            value = emit.exp(emit.sub(emit.load_floats(place), maxima))
            emit.store(value, place, align=64)
            return [emit.add(carried[0], value)]

        total = emit.reduce_add(emit.loop(emit.i64(0), count, LANES, [emit.zeros(F32)], exponentiate)[0])
        emit.store(maximum, state_address, 0, align=4)
        emit.store(total, state_address, 4, align=4)
        return context.get_dummy_value()

    integers, floats = [types.int64] * 5, [types.float32] * 2
    return types.void(*integers, *floats, types.int64, types.int64), generate


@intrinsic
def weigh_values(
    typing_context: Any,
    kind: Any,
    num_queries: Any,
    weights: Any,
    weights_stride: Any,
    values: Any,
    num_values: Any,
    value_stride: Any,
    num_vectors: Any,
    out: Any,
    out_stride: Any,
) -> Any:
    """out[q] += sum over positions of weights[q][position] * values[position], position after position.

    values: [num_values] rows of `value_stride` bytes; out: rows of num_vectors * 16 float32, `out_stride` bytes apart.
    """
    if not isinstance(kind, types.IntegerLiteral) or not isinstance(num_queries, types.IntegerLiteral):
        raise RequireLiteralValue("element kind and query count choose the code that is emitted")
    element, count = _element(kind.literal_value), num_queries.literal_value
    lane_bytes = 32 if element is F16 else 64

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, b = Emitter(context, builder), builder
        _, _, weight, weight_stride, value, positions, stride, vectors, target, target_stride = arguments
        weight_rows = [b.add(weight, b.mul(weight_stride, emit.i64(q))) for q in range(count)]
        target_rows = [b.add(target, b.mul(target_stride, emit.i64(q))) for q in range(count)]

        def per_vector(v: Value, carried: list[Value]) -> Sequence[Value]:
            places = [b.add(row, b.mul(v, emit.i64(64))) for row in target_rows]
            column = b.add(value, b.mul(v, emit.i64(lane_bytes)))

            def per_position(position: Value, totals: list[Value]) -> Sequence[Value]:
                lanes = emit.load_floats(b.add(column, b.mul(position, stride)), 0, element)
                offset = b.mul(position, emit.i64(4))
                return [
                    emit.fma(emit.splat(emit.load(b.add(row, offset), F32, align=4)), lanes, total)
                    for row, total in zip(weight_rows, totals, strict=True)
                ]

            start = [emit.load_floats(place) for place in places]
            for total, place in zip(emit.loop(emit.i64(0), positions, 1, start, per_position), places, strict=True):
                emit.store(total, place, align=4)
            return carried

        emit.loop(emit.i64(0), vectors, 1, [], per_vector)
        return context.get_dummy_value()

    return types.void(kind, num_queries, *[types.int64] * 8), generate


@intrinsic
def merge_chunk(typing_context: Any, state: Any, out: Any, chunk_state: Any, chunk_out: Any, size: Any) -> Any:
    """Merge a chunk's (maximum, sum) and weighted values into the running ones; a chunk of maximum -inf changes
    nothing."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, b = Emitter(context, builder), builder
        running, target, chunk, source, columns = arguments
        chunk_maximum = emit.load(chunk, F32, align=4)
        is_empty = b.fcmp_ordered("==", chunk_maximum, ir.Constant(F32, _MINUS_INFINITY))
        with b.if_then(b.not_(is_empty)):
            maximum = emit.load(running, F32, align=4)
            larger = b.select(b.fcmp_ordered(">", chunk_maximum, maximum), chunk_maximum, maximum)
            old, new = (emit.exp(emit.splat(b.fsub(value, larger))) for value in (maximum, chunk_maximum))
            first = emit.i32(0)
            kept = b.fmul(emit.load(running, F32, 4, align=4), b.extract_element(old, first))
            added = b.fmul(emit.load(chunk, F32, 4, align=4), b.extract_element(new, first))
            emit.store(larger, running, 0, align=4)
            emit.store(b.fadd(kept, added), running, 4, align=4)

            def step(column: Value, carried: list[Value]) -> Sequence[Value]:
                offset = b.mul(column, emit.i64(4))
                place = b.add(target, offset)
                fresh = emit.mul(emit.load_floats(b.add(source, offset)), new)
                merged = emit.add(emit.mul(emit.load_floats(place), old), fresh)
                left = b.sub(columns, column)
                with b.if_else(b.icmp_signed(">=", left, emit.i64(LANES))) as (whole, part):
                    with whole:
                        emit.store(merged, place, align=4)
                    with part:
                        emit.store_first(merged, place, left)
                return carried

            emit.loop(emit.i64(0), columns, LANES, [], step)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@intrinsic
def divide_row(typing_context: Any, out: Any, divisor: Any, size: Any) -> Any:
    """out /= divisor over `size` columns."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, b = Emitter(context, builder), builder
        target, value, columns = arguments
        lanes = emit.splat(b.fdiv(ir.Constant(F32, 1.0), value))

        def step(column: Value, carried: list[Value]) -> Sequence[Value]:
            place = b.add(target, b.mul(column, emit.i64(4)))
            result = emit.mul(emit.load_floats(place), lanes)
            emit.store_first(result, place, _at_most(emit, b.sub(columns, column)))
            return carried

        emit.loop(emit.i64(0), columns, LANES, [], step)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32, types.int64), generate


def _at_most(emit: Emitter, count: Value) -> Value:
    limit = emit.i64(LANES)
    return emit.builder.select(emit.builder.icmp_signed("<", count, limit), count, limit)
