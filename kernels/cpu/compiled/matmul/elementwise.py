"""Tape ops that work on each row by itself: norms, activations, sums, RoPE, and copies of rows.

Threads take units (a row, a group of a row, or a stretch of columns) as they get free.
"""

import math
from typing import Any

import numpy as np

from localinfer.kernels.cpu.compiled.matmul.rows import (
    FORMULAS,
    add_scaled_row,
    elementwise_row,
    gaussian_top_k_row,
    layer_norm_row,
    magnitude_of,
    rms_norm_row,
    scale_part,
    scale_row,
    sigmoid_of,
    xielu_row,
)
from localinfer.kernels.cpu.compiled.simd.memory import load_f32, load_f64, load_i64, store_f32
from localinfer.kernels.cpu.compiled.simd.pool import row_op
from localinfer.kernels.cpu.parameters import (
    BATCH,
    COPY_HEADS,
    ELEMENTWISE,
    GATE_PARTS,
    GATHER,
    MAGNITUDE,
    MIX_SLOTS,
    NORM,
    ROPE,
    ROPE_ANGLES,
    SCALE_BY_POSITION,
    SEGMENT,
    SELECT_OUTPUT,
    XIELU,
)
from localinfer.kernels.jit.numba import Source, inline

COLUMNS_PER_UNIT = 1024
_ADD = list(FORMULAS).index("add")
_SEGMENT_BYTES = SEGMENT.num_bytes


@inline
def _optional(address: int, offset: int) -> int:
    return 0 if address == 0 else address + offset


@row_op(NORM, lambda p: p.groups, in_runs=True)
def rms_norm(p: Any, batch: int, thread: int, row: int, group: int) -> None:
    """Root-mean-square norm of a group."""
    target = p.out + row * p.out_stride + 4 * group * p.size
    source = p.x + row * p.x_stride + 4 * group * p.size
    rms_norm_row(target, source, _optional(p.weight, group * p.weight_stride), p.size, p.epsilon)


@row_op(NORM, lambda p: p.groups, in_runs=True)
def layer_norm(p: Any, batch: int, thread: int, row: int, group: int) -> None:
    """Layer norm of a group."""
    target = p.out + row * p.out_stride + 4 * group * p.size
    source = p.x + row * p.x_stride + 4 * group * p.size
    weight, bias = _optional(p.weight, group * p.weight_stride), _optional(p.bias, group * p.weight_stride)
    layer_norm_row(target, source, weight, bias, p.size, p.epsilon)


def _elementwise(code: int) -> Source:
    """A formula over every stretch of every row."""

    @row_op(ELEMENTWISE, lambda p: (p.columns + COLUMNS_PER_UNIT - 1) // COLUMNS_PER_UNIT)
    def stretch(p: Any, batch: int, thread: int, row: int, part: int) -> None:
        first = part * COLUMNS_PER_UNIT
        count = min(COLUMNS_PER_UNIT, p.columns - first)
        target, left = p.out + row * p.out_stride + 4 * first, p.a + row * p.a_stride + 4 * first
        elementwise_row(code, target, left, p.b + row * p.b_stride + 4 * first, p.scalar, count)

    return stretch


KERNELS = {name: _elementwise(code) for code, name in enumerate(FORMULAS)}


@row_op(GATE_PARTS, lambda p: p.parts, in_runs=True)
def multiply_sigmoid_by_part(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """out = x * sigmoid(gate), one gate per part of a row."""
    gate = sigmoid_of(load_f32(p.gate + row * p.gate_stride + 4 * part))
    offset = 4 * part * p.size
    scale_part(p.out + row * p.out_stride + offset, p.x + row * p.x_stride + offset, gate, p.size)


@row_op(GATE_PARTS, lambda p: p.parts, in_runs=True)
def multiply_by_part(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """out = x * gate, one factor per part of a row."""
    offset = 4 * part * p.size
    gate = load_f32(p.gate + row * p.gate_stride + 4 * part)
    scale_part(p.out + row * p.out_stride + offset, p.x + row * p.x_stride + offset, gate, p.size)


@row_op(XIELU)
def xielu(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """out = xIELU(x)."""
    target, source = p.out + row * p.out_stride, p.x + row * p.x_stride
    xielu_row(target, source, p.columns, p.positive, p.negative, p.beta, p.epsilon)


@row_op(ELEMENTWISE)
def multiply_by_row(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """out = a * b[0], one factor per row."""
    factor = load_f32(p.b + row * p.b_stride)
    scale_row(p.out + row * p.out_stride, p.a + row * p.a_stride, factor, p.columns)


@row_op(ELEMENTWISE)
def gaussian_top_k(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """What exceeds the mean by so many standard deviations, and 0 elsewhere."""
    gaussian_top_k_row(p.out + row * p.out_stride, p.a + row * p.a_stride, p.scalar, p.columns)


@row_op(MAGNITUDE, in_runs=True)
def magnitude(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """The root mean square of a row."""
    store_f32(p.out + row * p.out_stride, magnitude_of(p.x + row * p.x_stride, p.columns))


@row_op(MIX_SLOTS, lambda p: p.num_out, in_runs=True)
def mix_slots(p: Any, batch: int, thread: int, row: int, slot: int) -> None:
    """One slot of a row: the residual's and a weighted sum of slots."""
    start = 4 * p.columns * slot
    target, source = p.out + row * p.out_stride + start, p.x + row * p.x_stride
    has_sum = p.residual != 0
    if has_sum:
        scale_row(target, p.residual + row * p.residual_stride + start, np.float32(1), p.columns)
    if slot < p.first:
        return
    for other in range(p.slots):
        weight = np.float32(1)
        if p.weights != 0:
            weight = load_f32(p.weights + row * p.weights_stride + 4 * (slot * p.slots + other))
        if has_sum:
            add_scaled_row(target, target, source + 4 * p.columns * other, weight, p.columns)
        else:
            scale_row(target, source + 4 * p.columns * other, weight, p.columns)
            has_sum = True


@row_op(ROPE_ANGLES)
def rope_angles(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """Cosines, then sines, of every row's angles."""
    magnitude = np.float64(p.magnitude)
    position = np.float64(load_i64(BATCH.positions(batch) + 8 * row))
    target = p.out + row * p.out_stride
    for i in range(p.count):
        angle = position * load_f64(p.frequencies + 8 * i)
        store_f32(target + 4 * i, np.float32(math.cos(angle) * magnitude))
        store_f32(target + 4 * (p.count + i), np.float32(math.sin(angle) * magnitude))


@row_op(ROPE, lambda p: p.heads, in_runs=True)
def rope(p: Any, batch: int, thread: int, row: int, head: int) -> None:
    """Rotate in place."""
    step = 4 if p.is_halves == 1 else 8
    distance = 4 * p.pairs if p.is_halves == 1 else 4
    first = p.x + row * p.x_stride + 4 * head * p.head_size
    cosines = p.angles + row * p.angles_stride
    for i in range(p.pairs):
        cosine, sine = load_f32(cosines + 4 * i), load_f32(cosines + 4 * (p.pairs + i))
        place = first + step * i
        a, b = load_f32(place), load_f32(place + distance)
        store_f32(place, a * cosine - b * sine)
        store_f32(place + distance, a * sine + b * cosine)


@row_op(SELECT_OUTPUT, of_output=True)
def select_output(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """Copy the rows that want logits."""
    source = p.x + load_i64(BATCH.output_rows(batch) + 8 * row) * p.x_stride
    scale_row(p.out + row * p.out_stride, source, np.float32(1), p.columns)


@row_op(SELECT_OUTPUT, of_output=True)
def mean_rows(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """The mean of the rows of the segment that an output row lies in, summed from its first row."""
    place, segment = load_i64(BATCH.output_rows(batch) + 8 * row), BATCH.segments(batch)
    while SEGMENT.first_row(segment) + SEGMENT.num_rows(segment) <= place:
        segment += _SEGMENT_BYTES
    count, target = SEGMENT.num_rows(segment), p.out + row * p.out_stride
    source = p.x + SEGMENT.first_row(segment) * p.x_stride
    scale_row(target, source, np.float32(1), p.columns)
    for index in range(1, count):
        elementwise_row(_ADD, target, target, source + index * p.x_stride, np.float32(1), p.columns)
    scale_row(target, target, np.float32(1) / np.float32(count), p.columns)


@row_op(SCALE_BY_POSITION)
def scale_by_position(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """x *= 1 + slope * ln(1 + floor((position + offset) / period))."""
    periods = (load_i64(BATCH.positions(batch) + 8 * row) + p.first_position) // p.period
    factor = np.float32(1.0 + np.float64(p.slope) * math.log(1.0 + periods))
    place = p.x + row * p.x_stride
    scale_row(place, place, factor, p.columns)


@row_op(COPY_HEADS)
def copy_heads(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """Copy part of every head."""
    for head in range(p.heads):
        target = p.out + row * p.out_stride + head * p.out_head_bytes
        source = p.x + row * p.x_stride + head * p.x_head_bytes
        for column in range(p.width):
            store_f32(target + 4 * column, load_f32(source + 4 * column))


_GATHERED_COLUMNS = 1024


@row_op(GATHER, lambda p: (p.columns + _GATHERED_COLUMNS - 1) // _GATHERED_COLUMNS)
def gather_columns(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """out[r, j] = x[r, offsets[j] / 4]: the order of weights whose columns were sorted by group."""
    target, source = p.out + row * p.out_stride, p.x + row * p.x_stride
    for column in range(part * _GATHERED_COLUMNS, min(part * _GATHERED_COLUMNS + _GATHERED_COLUMNS, p.columns)):
        store_f32(target + 4 * column, load_f32(source + load_i64(p.offsets + 8 * column)))
