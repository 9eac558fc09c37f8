"""Tape ops that work on each row by itself: norms, activations, sums, RoPE, and copies of rows.

Threads take units (a row, a group of a row, or a stretch of columns) as they get free.
"""

import math

import numpy as np

from localinfer.kernels.cpu.compiled.matmul.rows import (
    FORMULAS,
    elementwise_row,
    layer_norm_row,
    rms_norm_row,
    scale_row,
    sigmoid_of,
)
from localinfer.kernels.cpu.compiled.simd.batch import num_rows
from localinfer.kernels.cpu.compiled.simd.memory import load_f32, load_f64, load_i64, store_f32
from localinfer.kernels.cpu.compiled.simd.pool import take_units
from localinfer.kernels.cpu.parameters import (
    BATCH,
    COPY_HEADS,
    ELEMENTWISE,
    NORM,
    ROPE,
    ROPE_ANGLES,
    SCALE_BY_POSITION,
    SELECT_OUTPUT,
)
from localinfer.kernels.jit.numba import compose, inline, op, stamp

COLUMNS_PER_UNIT = 1024


@inline
def _optional(address: int, offset: int) -> int:
    return 0 if address == 0 else address + offset


@compose
def _norm(is_rms: int, parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Root-mean-square norm or layer norm of every group of every row."""
    p = NORM.load(parameters)
    control = BATCH.control(batch)
    units = num_rows(batch, p.is_output) * p.groups
    claim = max(1, units // (4 * num_threads))
    while True:
        start = take_units(control, claim)
        if start >= units:
            return
        for unit in range(start, min(start + claim, units)):
            row, group = unit // p.groups, unit % p.groups
            target = p.out + row * p.out_stride + 4 * group * p.size
            source = p.x + row * p.x_stride + 4 * group * p.size
            group_weight = _optional(p.weight, group * p.weight_stride)
            if is_rms == 1:
                rms_norm_row(target, source, group_weight, p.size, p.epsilon)
            else:
                group_bias = _optional(p.bias, group * p.weight_stride)
                layer_norm_row(target, source, group_weight, group_bias, p.size, p.epsilon)


@compose
def _elementwise(code: int, parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """A formula over every stretch of every row."""
    p = ELEMENTWISE.load(parameters)
    control = BATCH.control(batch)
    per_row = (p.columns + COLUMNS_PER_UNIT - 1) // COLUMNS_PER_UNIT
    units = num_rows(batch, p.is_output) * per_row
    while True:
        unit = take_units(control, 1)
        if unit >= units:
            return
        row, first = unit // per_row, unit % per_row * COLUMNS_PER_UNIT
        count = min(COLUMNS_PER_UNIT, p.columns - first)
        target, left = p.out + row * p.out_stride + 4 * first, p.a + row * p.a_stride + 4 * first
        right = p.b + row * p.b_stride + 4 * first
        elementwise_row(code, target, left, right, p.scalar, count)


KERNELS = {
    "rms_norm": stamp(_norm, 1),
    "layer_norm": stamp(_norm, 0),
    **{name: stamp(_elementwise, code) for code, name in enumerate(FORMULAS)},
}


@op
def multiply_sigmoid_by_row(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = a * sigmoid(b[0]), one gate per row."""
    p = ELEMENTWISE.load(parameters)
    control = BATCH.control(batch)
    rows = num_rows(batch, p.is_output)
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        source = p.a + row * p.a_stride
        scale_row(p.out + row * p.out_stride, source, sigmoid_of(load_f32(p.b + row * p.b_stride)), p.columns)


@op
def rope_angles(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Cosines, then sines, of every row's angles."""
    p = ROPE_ANGLES.load(parameters)
    magnitude = np.float64(p.magnitude)
    control, positions = BATCH.control(batch), BATCH.positions(batch)
    rows = num_rows(batch, 0)
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        position = np.float64(load_i64(positions + 8 * row))
        target = p.out + row * p.out_stride
        for i in range(p.count):
            angle = position * load_f64(p.frequencies + 8 * i)
            store_f32(target + 4 * i, np.float32(math.cos(angle) * magnitude))
            store_f32(target + 4 * (p.count + i), np.float32(math.sin(angle) * magnitude))


@op
def rope(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Rotate in place."""
    p = ROPE.load(parameters)
    step = 4 if p.is_halves == 1 else 8
    distance = 4 * p.pairs if p.is_halves == 1 else 4
    control = BATCH.control(batch)
    units = num_rows(batch, 0) * p.heads
    claim = max(1, units // (4 * num_threads))
    while True:
        start = take_units(control, claim)
        if start >= units:
            return
        for unit in range(start, min(start + claim, units)):
            row = unit // p.heads
            first = p.x + row * p.x_stride + 4 * (unit % p.heads) * p.head_size
            cosines = p.angles + row * p.angles_stride
            for i in range(p.pairs):
                cosine, sine = load_f32(cosines + 4 * i), load_f32(cosines + 4 * (p.pairs + i))
                place = first + step * i
                a, b = load_f32(place), load_f32(place + distance)
                store_f32(place, a * cosine - b * sine)
                store_f32(place + distance, a * sine + b * cosine)


@op
def select_output(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Copy the rows that want logits."""
    p = SELECT_OUTPUT.load(parameters)
    control, chosen = BATCH.control(batch), BATCH.output_rows(batch)
    rows = num_rows(batch, 1)
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        source = p.x + load_i64(chosen + 8 * row) * p.x_stride
        scale_row(p.out + row * p.out_stride, source, np.float32(1), p.columns)


@op
def scale_by_position(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """x *= 1 + slope * ln(1 + floor((position + offset) / period))."""
    p = SCALE_BY_POSITION.load(parameters)
    slope = np.float64(p.slope)
    control, positions = BATCH.control(batch), BATCH.positions(batch)
    rows = num_rows(batch, 0)
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        periods = (load_i64(positions + 8 * row) + p.first_position) // p.period
        factor = np.float32(1.0 + slope * math.log(1.0 + periods))
        place = p.x + row * p.x_stride
        scale_row(place, place, factor, p.columns)


@op
def copy_heads(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Copy part of every head."""
    p = COPY_HEADS.load(parameters)
    control = BATCH.control(batch)
    rows = num_rows(batch, p.is_output)
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        for head in range(p.heads):
            target = p.out + row * p.out_stride + head * p.out_head_bytes
            source = p.x + row * p.x_stride + head * p.x_head_bytes
            for column in range(p.width):
                store_f32(target + 4 * column, load_f32(source + 4 * column))
