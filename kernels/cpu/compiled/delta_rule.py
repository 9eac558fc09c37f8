"""The gated delta rule and RWKV-7's recurrence, row by row: a panel of 32 columns of a head's state in fast memory.

A row reads its panel once: what the row before adds to the state is put off until this one reads it, so that one pass
updates the state and multiplies it by this row's key and query. Columns do not need each other, and every sum over key
channels has one order, so bits depend neither on panels nor on how rows are cut or repeated.

A pass over a panel of 128 x 32 takes 0.4 us on one thread (AMD Zen 4): one product and three fused ones per vector.
"""

from typing import Any

from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled.elementwise import FORMULAS, each_vector
from localinfer.kernels.cpu.compiled.emit import ADDRESS, F32, FLOAT, LANES, LITERAL, VOID, Emitter, Value, emitted
from localinfer.kernels.cpu.compiled.memory import load_f32, store_f32
from localinfer.kernels.cpu.compiled.pool import row_op, scratch
from localinfer.kernels.cpu.compiled.recurrent import (
    copy_vectors,
    logged_row,
    new_log_row,
    pass_panel,
    segment_op,
    source_of,
    target_place,
    target_rows,
)
from localinfer.kernels.cpu.kernel_abi import MAX_KEY_SIZE, PANEL_COLUMNS
from localinfer.kernels.cpu.parameters import DELTA_RULE, DELTA_RULE_GATES, SEGMENT, WKV
from localinfer.kernels.jit.numba import Source, compose, inline

_VECTOR_BYTES = 4 * LANES

# A thread's scratch memory: the panel, then vectors over key channels, and over the panel's columns.
_KEYS = 4 * PANEL_COLUMNS * MAX_KEY_SIZE
_QUERIES = _KEYS + 4 * MAX_KEY_SIZE
_DECAYS = _QUERIES + 4 * MAX_KEY_SIZE
_UPDATE = _DECAYS + 2 * 4 * MAX_KEY_SIZE
_BY_KEY = _UPDATE + 4 * PANEL_COLUMNS
_BY_QUERY = _BY_KEY + 4 * PANEL_COLUMNS


@emitted(VOID, LITERAL, *[ADDRESS] * 4, FLOAT, types.int64)
def _gates(
    emit: Emitter, is_bounded: int, out: Value, x: Value, factor: Value, bias: Value, lower_bound: Value, count: Value
) -> None:
    """out = e^g, where g = factor * softplus(x + bias), or lower_bound * sigmoid(factor * (x + bias))."""
    b, bound = emit.builder, emit.splat(lower_bound)

    def columns(offset: Value) -> None:
        value, factors, biases = (emit.load_floats(b.add(place, offset)) for place in (x, factor, bias))
        value = emit.add(value, biases)
        if is_bounded:
            value = emit.mul(factors, value)
            logarithm = emit.mul(bound, FORMULAS["sigmoid"](emit, value, value, value))
        else:
            logarithm = emit.mul(factors, FORMULAS["softplus"](emit, value, value, value))
        emit.store(emit.exp(logarithm), b.add(out, offset), align=4)

    each_vector(emit, count, columns)


@emitted(VOID, *[ADDRESS] * 2, types.int64)
def _sigmoids(emit: Emitter, out: Value, x: Value, count: Value) -> None:
    """out = sigmoid(x)."""
    b = emit.builder

    def columns(offset: Value) -> None:
        value = emit.load_floats(b.add(x, offset))
        emit.store(FORMULAS["sigmoid"](emit, value, value, value), b.add(out, offset), align=4)

    each_vector(emit, count, columns)


def _row_gates(is_bounded: int) -> Source:
    @row_op(DELTA_RULE_GATES, in_runs=True)
    def gates(p: Any, batch: int, thread: int, row: int, part: int) -> None:
        decays, x = p.decays + row * p.decays_stride, p.x + row * p.x_stride
        _gates(is_bounded, decays, x, p.factor, p.bias, p.lower_bound, p.columns)
        _sigmoids(p.betas + row * p.betas_stride, p.y + row * p.y_stride, p.heads)

    return gates


@emitted(FLOAT, LITERAL, *[ADDRESS] * 3, FLOAT, *[ADDRESS] * 3, types.int64)
def _prepare(
    emit: Emitter, by_channel: int, key: Value, query: Value, decay: Value, scale: Value, keys: Value, queries: Value,
    decays: Value, count: Value,
) -> Value:  # fmt: skip
    """Key and query times decay, and the decay of every channel; returns query . key. scale: factor of the query."""
    b = emit.builder
    scales = emit.splat(scale)
    single = None if by_channel else emit.splat(emit.load(decay, F32, align=4))

    def columns(column: Value, carried: list[Value]) -> list[Value]:
        offset = b.mul(column, emit.i64(4))
        factors = emit.load_floats(b.add(decay, offset)) if single is None else single
        one_key = emit.load_floats(b.add(key, offset))
        one_query = emit.mul(scales, emit.load_floats(b.add(query, offset)))
        emit.store(emit.mul(factors, one_key), b.add(keys, offset), align=4)
        emit.store(emit.mul(factors, one_query), b.add(queries, offset), align=4)
        emit.store(factors, b.add(decays, offset), align=4)
        return [emit.fma(one_query, one_key, carried[0])]

    return emit.reduce_add(emit.loop(emit.i64(0), count, LANES, [emit.zeros(F32)], columns)[0])


@emitted(VOID, ADDRESS, FLOAT, types.int64)
def _fill(emit: Emitter, out: Value, value: Value, count: Value) -> None:
    """out = value in every column."""
    lanes = emit.splat(value)
    each_vector(emit, count, lambda offset: emit.store(lanes, emit.builder.add(out, offset), align=4))


@emitted(VOID, LITERAL, *[ADDRESS] * 5, FLOAT, FLOAT)
def _finish(
    emit: Emitter, vectors: int, out: Value, update: Value, value: Value, by_key: Value, by_query: Value, beta: Value,
    product: Value,
) -> None:  # fmt: skip
    """update = beta * (value - by_key); out = by_query + product * update."""
    betas, products = emit.splat(beta), emit.splat(product)
    for v in range(vectors):
        offset = _VECTOR_BYTES * v
        values, known = emit.load_floats(value, offset), emit.load_floats(by_key, offset)
        added = emit.mul(betas, emit.sub(values, known))
        emit.store(added, update, offset, align=4)
        emit.store(emit.fma(products, added, emit.load_floats(by_query, offset)), out, offset, align=4)


@compose
def _pass(
    vectors: int, updates: int, multiplies: int, is_final: int, source: int, target: int, memory: int, size: int,
    decays: int, key: int, added: int,
) -> None:  # fmt: skip
    """`pass_panel` with at most one update, and with the vectors of a thread's memory."""
    pass_panel(
        vectors, updates, multiplies, is_final, source, target, size, decays, key, added, key, added, memory + _KEYS,
        memory + _QUERIES, memory + _BY_KEY, memory + _BY_QUERY,
    )  # fmt: skip


@inline
def _key_head(p: Any, head: int) -> int:
    """The head whose keys and queries a head of values uses."""
    return head % p.key_heads if p.is_tiled != 0 else head // (p.heads // p.key_heads)


@inline
def _is_first_of(p: Any, head: int) -> bool:
    """True for the first head with its keys."""
    return head < p.key_heads if p.is_tiled != 0 else head % (p.heads // p.key_heads) == 0


def _delta_rule(by_channel: int) -> Source:
    """The kernel for one decay per head, or one per key channel."""

    @compose
    def advance(vectors: int, p: Any, batch: int, thread: int, segment: int, head: int, first: int) -> None:
        """Take a panel through a segment: `vectors` vectors of columns from `first` of a head."""
        memory, size, row_bytes = scratch(batch, thread), p.key_size, p.row_bytes
        keys, queries, update = memory + _KEYS, memory + _QUERIES, memory + _UPDATE
        by_key, by_query = memory + _BY_KEY, memory + _BY_QUERY
        key_column, column = 4 * _key_head(p, head) * size, 4 * (head * p.value_size + first)
        decay_column = 4 * head * size if by_channel == 1 else 4 * head
        place = p.state + 4 * size * (head * p.value_size + first)
        current, pending = source_of(segment, place), False
        if current == 0:
            copy_vectors(memory, 0, size * LANES * vectors)
            current = memory
        key, decays, added, turn = keys, memory + _DECAYS, update, 0
        for index in range(SEGMENT.num_logged(segment)):
            if pending:
                _pass(vectors, 1, 0, 0, current, memory, memory, size, decays, key, added)
                current = memory
            entry = logged_row(segment, p.log, row_bytes, index)
            key, added = entry + key_column, entry + p.log_values + column
            decays = entry + p.log_decays + decay_column
            if by_channel == 0:
                _fill(memory + _DECAYS, load_f32(decays), size)
                decays = memory + _DECAYS
            pending = True
        target, num_rows, first_row = 0, SEGMENT.num_rows(segment), SEGMENT.first_row(segment)
        for row in range(num_rows + 1):
            while target_rows(segment, target) == row:
                goal = target_place(segment, target, place)
                if pending:
                    _pass(vectors, 1, 0, 1, current, goal, memory, size, decays, key, added)
                else:
                    copy_vectors(goal, current, size * LANES * vectors)
                target += 1
            if row == num_rows:
                break
            index = first_row + row
            # The row before still needs its decays.
            turn = 1 - turn
            now = memory + _DECAYS + 4 * MAX_KEY_SIZE * turn
            this_key = p.keys + index * p.keys_stride + key_column
            query = p.queries + index * p.queries_stride + key_column
            decay = p.decays + index * p.decays_stride + decay_column
            product = _prepare(by_channel, this_key, query, decay, p.scale, keys, queries, now, size)
            if pending:
                _pass(vectors, 1, 1, 0, current, memory, memory, size, decays, key, added)
                current = memory
            else:
                _pass(vectors, 0, 1, 0, current, memory, memory, size, decays, key, added)
            beta = load_f32(p.betas + index * p.betas_stride + 4 * head)
            out, value = p.out + index * p.out_stride + column, p.values + index * p.values_stride + column
            _finish(vectors, out, update, value, by_key, by_query, beta, product)
            key, decays, added, pending = this_key, now, update, True
            entry = new_log_row(segment, p.log, row_bytes, row)
            if entry != 0:
                copy_vectors(entry + p.log_values + column, update, LANES * vectors)
                if first == 0:
                    if by_channel == 1:
                        copy_vectors(entry + p.log_decays + decay_column, decay, size)
                    else:
                        store_f32(entry + p.log_decays + decay_column, load_f32(decay))
                    if _is_first_of(p, head):
                        copy_vectors(entry + key_column, this_key, size)

    @segment_op(DELTA_RULE, lambda p: p.heads * ((p.value_size + PANEL_COLUMNS - 1) // PANEL_COLUMNS))
    def kernel(p: Any, batch: int, thread: int, segment: int, part: int) -> None:
        panels = (p.value_size + PANEL_COLUMNS - 1) // PANEL_COLUMNS
        head, first = part // panels, part % panels * PANEL_COLUMNS
        if p.value_size - first >= PANEL_COLUMNS:
            advance(2, p, batch, thread, segment, head, first)
        else:
            advance(1, p, batch, thread, segment, head, first)

    return kernel


KERNELS = {
    "gates": _row_gates(0),
    "bounded_gates": _row_gates(1),
    "by_head": _delta_rule(0),
    "by_channel": _delta_rule(1),
}


_DECAY_SCALE = -0.6065306597126334
"""-e^-1/2: no channel decays faster than by e to this power."""

# A thread's scratch memory: the panel, then vectors over key channels, and over the panel's columns.
_WKV_BYTES = 4 * MAX_KEY_SIZE
_WKV_REMOVED = PANEL_COLUMNS * _WKV_BYTES
_WKV_QUERIES = _WKV_REMOVED + _WKV_BYTES
_WKV_ROWS = _WKV_QUERIES + _WKV_BYTES
"""Decays, keys and replaced keys of this row and of the one before."""
_WKV_UPDATE = _WKV_ROWS + 6 * _WKV_BYTES
_WKV_BY_REMOVED = _WKV_UPDATE + 4 * PANEL_COLUMNS
_WKV_BY_QUERY = _WKV_BY_REMOVED + 4 * PANEL_COLUMNS
_WKV_PRODUCTS = _WKV_BY_QUERY + 4 * PANEL_COLUMNS


@emitted(VOID, *[ADDRESS] * 12, types.int64)
def _prepare_wkv(
    emit: Emitter, receptance: Value, decay: Value, key: Value, rate: Value, key_scale: Value, rate_scale: Value,
    bonus_scale: Value, removed: Value, queries: Value, row: Value, products: Value, stride: Value, count: Value,
) -> None:  # fmt: skip
    """Vectors with which a head's row changes its state.

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
def _finish_wkv(
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
def _pass_wkv(
    vectors: int, updates: int, multiplies: int, is_final: int, source: int, target: int, memory: int, size: int,
    row: int, stride: int, value: int, known: int,
) -> None:  # fmt: skip
    """`pass_panel` with the vectors of a thread's memory. row: decays, keys and replaced keys, `stride` bytes apart."""
    pass_panel(
        vectors, updates, multiplies, is_final, source, target, size, row, row + stride, value, row + 2 * stride, known,
        memory + _WKV_REMOVED, memory + _WKV_QUERIES, memory + _WKV_BY_REMOVED, memory + _WKV_BY_QUERY,
    )  # fmt: skip


@compose
def _advance_wkv(vectors: int, p: Any, batch: int, thread: int, segment: int, head: int, first: int) -> None:
    """Take a panel through a segment: `vectors` vectors of columns from `first` of a head."""
    memory, size, width = scratch(batch, thread), p.head_size, p.width_bytes
    removed, queries, update = memory + _WKV_REMOVED, memory + _WKV_QUERIES, memory + _WKV_UPDATE
    by_removed, by_query, products = memory + _WKV_BY_REMOVED, memory + _WKV_BY_QUERY, memory + _WKV_PRODUCTS
    key_column, column = 4 * head * size, 4 * (head * size + first)
    place = p.state + size * column
    current, pending = source_of(segment, place), False
    if current == 0:
        copy_vectors(memory, 0, size * LANES * vectors)
        current = memory
    # Of the row whose update is pending: decays, keys and replaced keys, their distance, values and what they replace.
    row, stride, value, known, turn = memory + _WKV_ROWS, _WKV_BYTES, update, update, 0
    for index in range(SEGMENT.num_logged(segment)):
        if pending:
            _pass_wkv(vectors, 2, 0, 0, current, memory, memory, size, row, stride, value, known)
            current = memory
        entry = logged_row(segment, p.log, 5 * width, index)
        row, stride, pending = entry + key_column, width, True
        value, known = entry + 3 * width + column, entry + 4 * width + column
    target, num_rows, first_row = 0, SEGMENT.num_rows(segment), SEGMENT.first_row(segment)
    for number in range(num_rows + 1):
        while target_rows(segment, target) == number:
            goal = target_place(segment, target, place)
            if pending:
                _pass_wkv(vectors, 2, 0, 1, current, goal, memory, size, row, stride, value, known)
            else:
                copy_vectors(goal, current, size * LANES * vectors)
            target += 1
        if number == num_rows:
            break
        index = first_row + number
        turn = 1 - turn
        now = memory + _WKV_ROWS + 3 * _WKV_BYTES * turn
        _prepare_wkv(
            p.receptance + index * p.receptance_stride + key_column, p.decay + index * p.decay_stride + key_column,
            p.keys + index * p.keys_stride + key_column, p.rate + index * p.rate_stride + key_column,
            p.key_scale + key_column, p.rate_scale + key_column, p.bonus_scale + key_column, removed, queries, now,
            products, _WKV_BYTES, size,
        )  # fmt: skip
        if pending:
            _pass_wkv(vectors, 2, 1, 0, current, memory, memory, size, row, stride, value, known)
            current = memory
        else:
            _pass_wkv(vectors, 0, 1, 0, current, memory, memory, size, row, stride, value, known)
        row, stride, pending = now, _WKV_BYTES, True
        value, known = p.values + index * p.values_stride + column, update
        out, bonus = p.out + index * p.out_stride + column, p.bonus + index * p.bonus_stride + column
        _finish_wkv(vectors, out, bonus, update, value, by_removed, by_query, products)
        entry = new_log_row(segment, p.log, 5 * width, number)
        if entry != 0:
            if first == 0:
                for part in range(3):
                    copy_vectors(entry + part * width + key_column, now + part * _WKV_BYTES, size)
            copy_vectors(entry + 3 * width + column, value, LANES * vectors)
            copy_vectors(entry + 4 * width + column, update, LANES * vectors)


@segment_op(WKV, lambda p: p.heads * ((p.head_size + PANEL_COLUMNS - 1) // PANEL_COLUMNS))
def wkv(p: Any, batch: int, thread: int, segment: int, part: int) -> None:
    """The recurrence over a panel of a head."""
    panels = (p.head_size + PANEL_COLUMNS - 1) // PANEL_COLUMNS
    head, first = part // panels, part % panels * PANEL_COLUMNS
    if p.head_size - first >= PANEL_COLUMNS:
        _advance_wkv(2, p, batch, thread, segment, head, first)
    else:
        _advance_wkv(1, p, batch, thread, segment, head, first)
