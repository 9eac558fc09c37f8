"""The causal short convolution: every channel by itself, over its last few rows."""

from typing import Any

from numba import types

from localinfer.kernels.cpu.compiled.matmul.rows import FORMULAS
from localinfer.kernels.cpu.compiled.recurrent.segments import (
    copy_vectors,
    logged_row,
    new_log_row,
    segment_op,
    source_of,
    target_place,
    target_rows,
)
from localinfer.kernels.cpu.compiled.simd.emit import LANES, Emitter, Value
from localinfer.kernels.cpu.compiled.simd.intrinsics import ADDRESS, LITERAL, VOID, emitted
from localinfer.kernels.cpu.compiled.simd.pool import scratch
from localinfer.kernels.cpu.kernel_abi import CONVOLUTION_CHANNELS
from localinfer.kernels.cpu.parameters import SEGMENT, SHORT_CONVOLUTION
from localinfer.kernels.jit.numba import Source, inline

_ROW_BYTES = 4 * CONVOLUTION_CHANNELS


@emitted(VOID, LITERAL, *[ADDRESS] * 2, types.int64, ADDRESS, *[types.int64] * 2, ADDRESS, types.int64)
def _convolve(
    emit: Emitter, has_silu: int, out: Value, x: Value, x_stride: Value, weight: Value, weight_stride: Value,
    taps: Value, bias: Value, count: Value,
) -> None:  # fmt: skip
    """out = bias + sum over taps of weight * x, oldest row first, which is at x."""
    b = emit.builder

    def channels(column: Value, carried: list[Value]) -> list[Value]:
        offset = b.mul(column, emit.i64(4))

        def tap(index: Value, total: list[Value]) -> list[Value]:
            row = emit.load_floats(b.add(b.add(x, offset), b.mul(index, x_stride)))
            factor = emit.load_floats(b.add(b.add(weight, offset), b.mul(index, weight_stride)))
            return [emit.fma(factor, row, total[0])]

        (total,) = emit.loop(emit.i64(0), taps, 1, [emit.load_floats(b.add(bias, offset))], tap)
        if has_silu:
            total = FORMULAS["silu"](emit, total, total, total)
        emit.store(total, b.add(out, offset), align=4)
        return carried

    emit.loop(emit.i64(0), count, LANES, [], channels)


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
        # The rows before, and as many of the segment's own, so that every window is in one place.
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


KERNELS = {"short_convolution": _short_convolution(0), "short_convolution_silu": _short_convolution(1)}
