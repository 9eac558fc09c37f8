"""The recurrence of RWKV-7, row by row: as the delta rule's, a panel of a head's state stays in fast memory."""

from typing import Any

from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled.matmul.rows import FORMULAS
from localinfer.kernels.cpu.compiled.recurrent.segments import (
    copy_vectors,
    logged_row,
    new_log_row,
    pass_panel,
    segment_op,
    source_of,
    target_place,
    target_rows,
)
from localinfer.kernels.cpu.compiled.simd.emit import F32, LANES, Emitter, Value
from localinfer.kernels.cpu.compiled.simd.intrinsics import ADDRESS, LITERAL, VOID, emitted
from localinfer.kernels.cpu.compiled.simd.pool import scratch
from localinfer.kernels.cpu.kernel_abi import MAX_KEY_SIZE, PANEL_COLUMNS
from localinfer.kernels.cpu.parameters import SEGMENT, WKV
from localinfer.kernels.jit.numba import compose

_VECTOR_BYTES = 4 * LANES
_DECAY_SCALE = -0.6065306597126334
"""-e^-1/2: no channel decays faster than by e to this power."""

# A thread's scratch memory: the panel, then vectors over key channels, and over the panel's columns.
_BYTES = 4 * MAX_KEY_SIZE
_REMOVED = PANEL_COLUMNS * _BYTES
_QUERIES = _REMOVED + _BYTES
_ROWS = _QUERIES + _BYTES
"""Decays, keys and replaced keys of this row and of the one before."""
_UPDATE = _ROWS + 6 * _BYTES
_BY_REMOVED = _UPDATE + 4 * PANEL_COLUMNS
_BY_QUERY = _BY_REMOVED + 4 * PANEL_COLUMNS
_PRODUCTS = _BY_QUERY + 4 * PANEL_COLUMNS


@emitted(VOID, *[ADDRESS] * 12, types.int64)
def _prepare(
    emit: Emitter, receptance: Value, decay: Value, key: Value, rate: Value, key_scale: Value, rate_scale: Value,
    bonus_scale: Value, removed: Value, queries: Value, row: Value, products: Value, stride: Value, count: Value,
) -> None:  # fmt: skip
    """What a head's row does to its state.

    removed: the scaled key at unit length. queries: decay * receptance. row: decays, keys, and minus rate * removed,
    `stride` bytes apart. products: of receptance with keys, with the last, and with bonus_scale * keys.
    """
    b, one = emit.builder, emit.splat_constant(F32, 1.0)

    def at(start: Value, column: Value) -> Value:
        return emit.load_floats(b.add(start, b.mul(column, emit.i64(4))))

    def squares(column: Value, carried: list[Value]) -> list[Value]:
        scaled = emit.mul(at(key, column), at(key_scale, column))
        return [emit.fma(scaled, scaled, carried[0])]

    total = emit.reduce_add(emit.loop(emit.i64(0), count, LANES, [emit.zeros(F32)], squares)[0])
    length = emit.call("llvm.sqrt.f32", F32, [total])
    least = ir.Constant(F32, 1e-12)
    length = b.select(b.fcmp_ordered(">", length, least), length, least)
    inverse = emit.splat(b.fdiv(ir.Constant(F32, 1.0), length))

    def columns(column: Value, carried: list[Value]) -> list[Value]:
        offset = b.mul(column, emit.i64(4))
        r, k = at(receptance, column), at(key, column)
        gate, rates = (FORMULAS["sigmoid"](emit, x, x, x) for x in (at(decay, column), at(rate, column)))
        decays = emit.exp(emit.mul(gate, emit.splat_constant(F32, _DECAY_SCALE)))
        unit = emit.mul(emit.mul(k, at(key_scale, column)), inverse)
        replaced = b.fneg(emit.mul(unit, rates))
        kept = emit.mul(emit.sub(rates, one), at(rate_scale, column))
        keys = emit.fma(kept, k, k)
        emit.store(unit, b.add(removed, offset), align=4)
        emit.store(emit.mul(decays, r), b.add(queries, offset), align=4)
        for index, value in enumerate((decays, keys, replaced)):
            place = b.add(b.add(row, b.mul(stride, emit.i64(index))), offset)
            emit.store(value, place, align=4)
        weighed = emit.mul(at(bonus_scale, column), keys)
        return [emit.fma(r, x, sum_) for x, sum_ in zip((keys, replaced, weighed), carried, strict=True)]

    sums = emit.loop(emit.i64(0), count, LANES, [emit.zeros(F32)] * 3, columns)
    for index, value in enumerate(sums):
        emit.store(emit.reduce_add(value), products, 4 * index, align=4)


@emitted(VOID, LITERAL, *[ADDRESS] * 7)
def _finish(
    emit: Emitter, vectors: int, out: Value, bonus: Value, update: Value, value: Value, by_removed: Value,
    by_query: Value, products: Value,
) -> None:  # fmt: skip
    """update = by_removed; out = by_query and what this row adds, times receptance; bonus = a product * value."""
    of_keys, of_replaced, of_bonus = (emit.splat(emit.load(products, F32, 4 * i, align=4)) for i in range(3))
    for v in range(vectors):
        offset = _VECTOR_BYTES * v
        values, known = emit.load_floats(value, offset), emit.load_floats(by_removed, offset)
        emit.store(known, update, offset, align=4)
        result = emit.fma(of_replaced, known, emit.load_floats(by_query, offset))
        emit.store(emit.fma(of_keys, values, result), out, offset, align=4)
        emit.store(emit.mul(of_bonus, values), bonus, offset, align=4)


@compose
def _advance(vectors: int, p: Any, batch: int, thread: int, segment: int, head: int, first: int) -> None:
    """Take a panel through a segment: `vectors` vectors of columns from `first` of a head."""
    memory, size, width = scratch(batch, thread), p.head_size, p.width_bytes
    removed, queries, update = memory + _REMOVED, memory + _QUERIES, memory + _UPDATE
    by_removed, by_query, products = memory + _BY_REMOVED, memory + _BY_QUERY, memory + _PRODUCTS
    key_column, column = 4 * head * size, 4 * (head * size + first)
    place = p.state + size * column
    current, pending = source_of(segment, place), False
    if current == 0:
        copy_vectors(memory, 0, size * LANES * vectors)
        current = memory
    # Of the row whose update is pending: decays, keys and replaced keys, their distance, values and what they replace.
    row, stride, value, known, turn = memory + _ROWS, _BYTES, update, update, 0
    for index in range(SEGMENT.num_logged(segment)):
        if pending:
            pass_panel(
                vectors, 2, 0, 0, current, memory, size, row, row + stride, value, row + 2 * stride, known, removed,
                queries, by_removed, by_query,
            )  # fmt: skip
            current = memory
        entry = logged_row(segment, p.log, 5 * width, index)
        row, stride, pending = entry + key_column, width, True
        value, known = entry + 3 * width + column, entry + 4 * width + column
    target, num_rows, first_row = 0, SEGMENT.num_rows(segment), SEGMENT.first_row(segment)
    for number in range(num_rows + 1):
        while target_rows(segment, target) == number:
            goal = target_place(segment, target, place)
            if pending:
                pass_panel(
                    vectors, 2, 0, 1, current, goal, size, row, row + stride, value, row + 2 * stride, known, removed,
                    queries, by_removed, by_query,
                )  # fmt: skip
            else:
                copy_vectors(goal, current, size * LANES * vectors)
            target += 1
        if number == num_rows:
            break
        index = first_row + number
        turn = 1 - turn
        now = memory + _ROWS + 3 * _BYTES * turn
        _prepare(
            p.receptance + index * p.receptance_stride + key_column, p.decay + index * p.decay_stride + key_column,
            p.keys + index * p.keys_stride + key_column, p.rate + index * p.rate_stride + key_column,
            p.key_scale + key_column, p.rate_scale + key_column, p.bonus_scale + key_column, removed, queries, now,
            products, _BYTES, size,
        )  # fmt: skip
        if pending:
            pass_panel(
                vectors, 2, 1, 0, current, memory, size, row, row + stride, value, row + 2 * stride, known, removed,
                queries, by_removed, by_query,
            )  # fmt: skip
            current = memory
        else:
            pass_panel(
                vectors, 0, 1, 0, current, memory, size, row, row + stride, value, row + 2 * stride, known, removed,
                queries, by_removed, by_query,
            )  # fmt: skip
        row, stride, pending = now, _BYTES, True
        value, known = p.values + index * p.values_stride + column, update
        out, bonus = p.out + index * p.out_stride + column, p.bonus + index * p.bonus_stride + column
        _finish(vectors, out, bonus, update, value, by_removed, by_query, products)
        entry = new_log_row(segment, p.log, 5 * width, number)
        if entry != 0:
            if first == 0:
                for part in range(3):
                    copy_vectors(entry + part * width + key_column, now + part * _BYTES, size)
            copy_vectors(entry + 3 * width + column, value, LANES * vectors)
            copy_vectors(entry + 4 * width + column, update, LANES * vectors)


@segment_op(WKV, lambda p: p.heads * ((p.head_size + PANEL_COLUMNS - 1) // PANEL_COLUMNS))
def wkv(p: Any, batch: int, thread: int, segment: int, part: int) -> None:
    """The recurrence over a panel of a head."""
    panels = (p.head_size + PANEL_COLUMNS - 1) // PANEL_COLUMNS
    head, first = part // panels, part % panels * PANEL_COLUMNS
    if p.head_size - first >= PANEL_COLUMNS:
        _advance(2, p, batch, thread, segment, head, first)
    else:
        _advance(1, p, batch, thread, segment, head, first)
