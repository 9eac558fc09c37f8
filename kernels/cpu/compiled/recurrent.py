"""Recurrent ops: sharing out segments, reading, logging and writing their states; short convolutions.

An op splits its state into parts that do not need each other (heads, columns of a head, channels). A thread takes one
part of one segment through all of its rows, with the part in fast memory.
"""

from collections.abc import Callable
from typing import Any

from numba import types

from localinfer.kernels.cpu.compiled.elementwise import FORMULAS, each_vector
from localinfer.kernels.cpu.compiled.emit import ADDRESS, F32, LANES, LITERAL, VOID, Emitter, Value, emitted
from localinfer.kernels.cpu.compiled.memory import load_i64
from localinfer.kernels.cpu.compiled.pool import scratch, take_units
from localinfer.kernels.cpu.kernel_abi import CONVOLUTION_CHANNELS
from localinfer.kernels.cpu.parameters import BATCH, PREVIOUS_ROW, SEGMENT, SHORT_CONVOLUTION, Block
from localinfer.kernels.jit.numba import Source, compose, inline, op

_SEGMENT_BYTES = SEGMENT.num_bytes


def segment_op(block: Block, parts: Callable[[Any], int]) -> Callable[[Callable[..., None]], Source]:
    """Make a tape op of a function of (p, batch, thread, segment, part), called once for every part of every segment.

    p: the words of the block. parts: how many a segment has, a function of p. segment: address of its SEGMENT block.
    """
    parts_of = inline(parts)

    def decorate(function: Callable[..., None]) -> Source:
        body = compose(function)

        @op
        def kernel(parameters: int, batch: int, thread: int, num_threads: int) -> None:
            p = block.load(parameters)
            control = BATCH.control(batch)
            count = parts_of(p)
            units = BATCH.num_segments(batch) * count
            while True:
                unit = take_units(control, 1)
                if unit >= units:
                    return
                segment = BATCH.segments(batch) + _SEGMENT_BYTES * (unit // count)
                body(p, batch, thread, segment, unit % count)

        return kernel

    return decorate


@inline
def source_of(segment: int, offset: int) -> int:
    """Address of an op's part of the states before the segment's first row, 0 for zeros."""
    source = SEGMENT.state(segment)
    return 0 if source == 0 else source + offset


@inline
def logged_row(segment: int, offset: int, row_bytes: int, index: int) -> int:
    """Address of a row of an op's log that comes before the segment's rows; there are SEGMENT.num_logged of them."""
    return SEGMENT.log(segment) + offset + index * row_bytes


@inline
def new_log_row(segment: int, offset: int, row_bytes: int, row: int) -> int:
    """Address where an op logs one of the segment's rows, 0 where none are logged."""
    log = SEGMENT.new_log(segment)
    return 0 if log == 0 else log + offset + row * row_bytes


@inline
def target_rows(segment: int, target: int) -> int:
    """After how many of the segment's rows the states go to a target; -1 past the last target."""
    if target >= SEGMENT.num_targets(segment):
        return -1
    return load_i64(SEGMENT.targets(segment) + 16 * target)


@inline
def target_place(segment: int, target: int, offset: int) -> int:
    """Address where a target has an op's part of the states."""
    return load_i64(SEGMENT.targets(segment) + 16 * target + 8) + offset


@emitted(VOID, ADDRESS, ADDRESS, types.int64)
def copy_vectors(emit: Emitter, target: Value, source: Value, count: Value) -> None:
    """Copy `count` float32, rounded up to whole vectors; from address 0 zeros."""
    b = emit.builder

    def copy(offset: Value) -> None:
        emit.store(emit.load_floats(b.add(source, offset)), b.add(target, offset), align=4)

    def clear(offset: Value) -> None:
        emit.store(emit.zeros(F32), b.add(target, offset), align=4)

    with b.if_else(b.icmp_signed("!=", source, emit.i64(0))) as (is_there, is_zero):
        with is_there:
            each_vector(emit, count, copy)
        with is_zero:
            each_vector(emit, count, clear)


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


_COLUMNS = 1024


@segment_op(PREVIOUS_ROW, lambda p: (p.columns + _COLUMNS - 1) // _COLUMNS)
def previous_row(p: Any, batch: int, thread: int, segment: int, part: int) -> None:
    """A stretch of columns of all rows of a segment."""
    offset, count = 4 * part * _COLUMNS, min(_COLUMNS, p.columns - part * _COLUMNS)
    first, num_rows = SEGMENT.first_row(segment), SEGMENT.num_rows(segment)
    out, x = p.out + first * p.out_stride + offset, p.x + first * p.x_stride + offset
    carried, following = SEGMENT.carried(segment), SEGMENT.next_carried(segment)
    copy_vectors(out, 0 if carried == 0 else carried + offset, count)
    if p.x == 0:
        return
    for row in range(1, num_rows):
        copy_vectors(out + row * p.out_stride, x + (row - 1) * p.x_stride, count)
    if following != 0:
        copy_vectors(following + offset, x + (num_rows - 1) * p.x_stride, count)


_ROW_BYTES = 4 * CONVOLUTION_CHANNELS


@emitted(VOID, LITERAL, *[ADDRESS] * 2, types.int64, ADDRESS, *[types.int64] * 2, ADDRESS, types.int64)
def _convolve(
    emit: Emitter, has_silu: int, out: Value, x: Value, x_stride: Value, weight: Value, weight_stride: Value,
    taps: Value, bias: Value, count: Value,
) -> None:  # fmt: skip
    """out = bias + sum over taps of weight * x, oldest row first, which is at x."""
    b = emit.builder

    def channels(offset: Value) -> None:
        def tap(index: Value, total: list[Value]) -> list[Value]:
            row = emit.load_floats(b.add(b.add(x, offset), b.mul(index, x_stride)))
            factor = emit.load_floats(b.add(b.add(weight, offset), b.mul(index, weight_stride)))
            return [emit.fma(factor, row, total[0])]

        (total,) = emit.loop(emit.i64(0), taps, 1, [emit.load_floats(b.add(bias, offset))], tap)
        if has_silu:
            total = FORMULAS["silu"](emit, total, total, total)
        emit.store(total, b.add(out, offset), align=4)

    each_vector(emit, count, channels)


@inline
def _row_before(segment: int, p: Any, index: int, offset: int) -> int:
    """The rows before the segment: those of the state, then the logged ones; address of the one at index."""
    if index >= p.taps - 1:
        return logged_row(segment, p.log, p.row_bytes, index - p.taps + 1) + offset
    source = source_of(segment, p.state)
    return 0 if source == 0 else source + index * p.row_bytes + offset


def _short_convolution(has_silu: int) -> Source:
    @segment_op(SHORT_CONVOLUTION, lambda p: (p.channels + CONVOLUTION_CHANNELS - 1) // CONVOLUTION_CHANNELS)
    def convolve(p: Any, batch: int, thread: int, segment: int, part: int) -> None:
        first = part * CONVOLUTION_CHANNELS
        count, offset, before = min(CONVOLUTION_CHANNELS, p.channels - first), 4 * first, p.taps - 1
        num_rows = SEGMENT.num_rows(segment)
        rows = p.x + SEGMENT.first_row(segment) * p.x_stride + offset
        out = p.out + SEGMENT.first_row(segment) * p.out_stride + offset
        # The rows before, and as many of the segment's own, so that every window is contiguous.
        window = scratch(batch, thread)
        for i in range(before):
            source = _row_before(segment, p, SEGMENT.num_logged(segment) + i, offset)
            copy_vectors(window + i * _ROW_BYTES, source, count)
        for row in range(min(before, num_rows)):
            copy_vectors(window + (before + row) * _ROW_BYTES, rows + row * p.x_stride, count)
        for row in range(num_rows):
            place, stride = window + row * _ROW_BYTES, _ROW_BYTES
            if row >= before:
                place, stride = rows + (row - before) * p.x_stride, p.x_stride
            _convolve(
                has_silu, out + row * p.out_stride, place, stride, p.weight + offset, p.row_bytes, p.taps,
                p.bias + offset, count,
            )  # fmt: skip
            log = new_log_row(segment, p.log, p.row_bytes, row)
            if log != 0:
                copy_vectors(log + offset, rows + row * p.x_stride, count)
        target = 0
        while target_rows(segment, target) >= 0:
            done, place = target_rows(segment, target), target_place(segment, target, p.state) + offset
            for i in range(before):
                source = window + (done + i) * _ROW_BYTES
                if done + i >= 2 * before:
                    source = rows + (done + i - before) * p.x_stride
                copy_vectors(place + i * p.row_bytes, source, count)
            target += 1

    return convolve


@segment_op(SHORT_CONVOLUTION, lambda p: (p.channels + CONVOLUTION_CHANNELS - 1) // CONVOLUTION_CHANNELS)
def centred_convolution(p: Any, batch: int, thread: int, segment: int, part: int) -> None:
    """All rows of a whole text, each with as many rows before it as behind it."""
    first = part * CONVOLUTION_CHANNELS
    count, offset, side = min(CONVOLUTION_CHANNELS, p.channels - first), 4 * first, p.taps // 2
    num_rows = SEGMENT.num_rows(segment)
    rows = p.x + SEGMENT.first_row(segment) * p.x_stride + offset
    out = p.out + SEGMENT.first_row(segment) * p.out_stride + offset
    window = scratch(batch, thread)
    for row in range(num_rows):
        place, stride = rows + (row - side) * p.x_stride, p.x_stride
        if row < side or row + side >= num_rows:
            for i in range(p.taps):
                index = row - side + i
                source = 0 if index < 0 or index >= num_rows else rows + index * p.x_stride
                copy_vectors(window + i * _ROW_BYTES, source, count)
            place, stride = window, _ROW_BYTES
        _convolve(
            0, out + row * p.out_stride, place, stride, p.weight + offset, p.row_bytes, p.taps, p.bias + offset, count
        )


KERNELS = {
    "short_convolution": _short_convolution(0),
    "short_convolution_silu": _short_convolution(1),
    "centred_convolution": centred_convolution,
}
