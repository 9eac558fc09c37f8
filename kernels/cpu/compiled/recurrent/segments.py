"""What every recurrent op does with the states of a batch: sharing out segments, reading, logging and writing states.

An op splits its state into parts that do not need each other (heads, columns of a head, channels). A thread takes one
part of one segment through all of its rows, with the part in fast memory.
"""

from collections.abc import Callable
from typing import Any

from numba import types

from localinfer.kernels.cpu.compiled.simd.emit import F32, LANES, Emitter, Value
from localinfer.kernels.cpu.compiled.simd.intrinsics import ADDRESS, VOID, emitted
from localinfer.kernels.cpu.compiled.simd.memory import load_i64
from localinfer.kernels.cpu.compiled.simd.pool import take_units
from localinfer.kernels.cpu.parameters import BATCH, SEGMENT, Block
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

    def copy(column: Value, carried: list[Value]) -> list[Value]:
        offset = b.mul(column, emit.i64(4))
        emit.store(emit.load_floats(b.add(source, offset)), b.add(target, offset), align=4)
        return carried

    def clear(column: Value, carried: list[Value]) -> list[Value]:
        emit.store(emit.zeros(F32), b.add(target, b.mul(column, emit.i64(4))), align=4)
        return carried

    with b.if_else(b.icmp_signed("!=", source, emit.i64(0))) as (is_there, is_zero):
        with is_there:
            emit.loop(emit.i64(0), count, LANES, [], copy)
        with is_zero:
            emit.loop(emit.i64(0), count, LANES, [], clear)
