"""The state-space recurrence of Mamba 1 and 2, row by row, sixteen channels of a head at a time.

A part is a panel: sixteen channels with all their states, [states][16] float32, which stays in the cache while the rows
of a segment pass.

One product and two fused ones per state and row fill the multipliers: 512 rows took as long with four rows to each
state that is loaded (AMD Zen 4, 48 heads of 64 channels and 128 states, 24 us a row on one thread).
"""

from typing import Any

from numba import types

from localinfer.kernels.cpu.compiled import lanes
from localinfer.kernels.cpu.compiled.elementwise import exp_of
from localinfer.kernels.cpu.compiled.emit import ADDRESS, F32, LITERAL, Emitter, Value, emitted
from localinfer.kernels.cpu.compiled.lanes import FLOATS, LANE_BYTES
from localinfer.kernels.cpu.compiled.memory import load_f32, store_f32
from localinfer.kernels.cpu.compiled.pool import scratch
from localinfer.kernels.cpu.compiled.recurrent import (
    copy_vectors,
    logged_row,
    new_log_row,
    segment_op,
    source_of,
    target_place,
    target_rows,
)
from localinfer.kernels.cpu.parameters import SEGMENT, SELECTIVE_SCAN
from localinfer.kernels.jit.numba import Source, compose, inline

_SUMS = 4
"""Partial sums over states, so that one addition need not wait for the one before."""


@emitted(FLOATS, LITERAL, *[ADDRESS] * 4, FLOATS, FLOATS, types.int64)
def _advance(
    emit: Emitter,
    has_rate_per_state: int,
    panel: Value,
    b: Value,
    c: Value,
    rates: Value,
    step: Value,
    scaled: Value,
    count: Value,
) -> Value:
    """Make every state n of a panel decay * state + b[n] * scaled; returns the sum of c[n] * state.

    has_rate_per_state: decay is exp(step * rates[n]), of [states][16] rates, and else `step` itself.
    """
    builder = emit.builder

    def take_state(index: Value, total: Value) -> Value:
        offset, scalar = builder.mul(index, emit.i64(LANE_BYTES)), builder.mul(index, emit.i64(4))
        place = builder.add(panel, offset)
        decay = step
        if has_rate_per_state:
            decay = emit.exp(emit.mul(step, emit.load_floats(builder.add(rates, offset))))
        b_lanes, c_lanes = (emit.splat(emit.load(builder.add(start, scalar), F32, align=4)) for start in (b, c))
        state = emit.fma(b_lanes, scaled, emit.mul(decay, emit.load_floats(place)))
        emit.store(state, place, align=4)
        return emit.fma(c_lanes, state, total)

    def several(index: Value, totals: list[Value]) -> list[Value]:
        return [take_state(builder.add(index, emit.i64(part)), total) for part, total in enumerate(totals)]

    whole = builder.and_(count, emit.i64(-_SUMS))
    totals = emit.loop(emit.i64(0), whole, _SUMS, [emit.zeros(F32)] * _SUMS, several)
    (first,) = emit.loop(whole, count, 1, totals[:1], lambda index, carried: [take_state(index, carried[0])])
    return emit.add(emit.add(first, totals[1]), emit.add(totals[2], totals[3]))


@inline
def _copy_floats(target: int, source: int, count: int) -> None:
    for index in range(count):
        store_f32(target + 4 * index, load_f32(source + 4 * index))


@inline
def _panels(p: Any) -> int:
    return (p.head_size + 15) // 16


def _scan(is_by_channel: bool) -> Source:
    """The kernel of one step size per channel and rates per state, or of one step size and rate per head."""

    @compose
    def advance(p: Any, panel: int, head: int, first: int, count: int, x: int, dt: int, b: int, c: int) -> Any:
        """Take a row into the panel of channels `first` to first + count of a head; returns its output."""
        values = lanes.load_first(x + 4 * (head * p.head_size + first), count)
        if is_by_channel:
            step = lanes.load_first(dt + 4 * first, count)
            rates = p.rates + 4 * p.states * first
            total = _advance(1, panel, b, c, rates, step, step * values, p.states)
            return total + lanes.load_first(p.skip + 4 * first, count) * values
        size = load_f32(dt + 4 * head)
        decay = lanes.splat(exp_of(size * load_f32(p.rates + 4 * head)))
        total = _advance(0, panel, b, c, p.rates, decay, lanes.splat(size) * values, p.states)
        return total + lanes.splat(load_f32(p.skip + 4 * head)) * values

    @segment_op(SELECTIVE_SCAN, lambda p: p.heads * ((p.head_size + 15) // 16))
    def scan(p: Any, batch: int, thread: int, segment: int, part: int) -> None:
        panel, panels, group_heads = scratch(batch, thread), _panels(p), p.heads // p.groups
        head, first = part // panels, part % panels * 16
        count, group = min(16, p.head_size - first), head // group_heads
        column, group_column = 4 * (head * p.head_size + first), 4 * group * p.states
        # A logged row has x, dt and b.
        dt_column = 4 * p.heads * p.head_size
        b_column = dt_column + 4 * (p.head_size if is_by_channel else p.heads)
        row_bytes = b_column + 4 * p.groups * p.states
        size, place = 16 * p.states, p.state + LANE_BYTES * p.states * part
        copy_vectors(panel, source_of(segment, place), size)
        for row in range(SEGMENT.num_logged(segment)):
            entry = logged_row(segment, p.log, row_bytes, row)
            b = entry + b_column + group_column
            advance(p, panel, head, first, count, entry, entry + dt_column, b, b)
        target = 0
        if target_rows(segment, target) == 0:
            copy_vectors(target_place(segment, target, place), panel, size)
            target += 1
        for row in range(SEGMENT.num_rows(segment)):
            index = SEGMENT.first_row(segment) + row
            x, dt = p.x + index * p.x_stride, p.dt + index * p.dt_stride
            b, c = p.b + index * p.b_stride + group_column, p.c + index * p.c_stride + group_column
            result = advance(p, panel, head, first, count, x, dt, b, c)
            lanes.store_first(p.out + index * p.out_stride + column, result, count)
            if target_rows(segment, target) == row + 1:
                copy_vectors(target_place(segment, target, place), panel, size)
                target += 1
            entry = new_log_row(segment, p.log, row_bytes, row)
            if entry != 0:
                _copy_floats(entry + column, x + column, count)
                if is_by_channel:
                    _copy_floats(entry + dt_column + 4 * first, dt + 4 * first, count)
                elif first == 0:
                    _copy_floats(entry + dt_column + 4 * head, dt + 4 * head, 1)
                if first == 0 and head % group_heads == 0:
                    _copy_floats(entry + b_column + group_column, b, p.states)

    return scan


KERNELS = {"scan_heads": _scan(False), "scan_channels": _scan(True)}
