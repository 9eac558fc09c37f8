"""Tape ops that work on each row by itself: norms, activations, sums, RoPE, and copies of rows.

Parameters are int64 words at one address, listed with each op; a float travels as its bits. Threads take units (a row,
a group of a row, or a stretch of columns) as they get free.
"""

import math
from collections.abc import Callable

import numpy as np

from localinfer.kernels.cpu.compiled.matmul.rows import (
    activate_row,
    add_scaled_row,
    gate_row,
    layer_norm_row,
    multiply_sigmoid_row,
    rms_norm_row,
    scale_row,
    sigmoid_of,
    softcap_row,
)
from localinfer.kernels.cpu.compiled.simd.batch import num_rows
from localinfer.kernels.cpu.compiled.simd.memory import float_bits, load_f32, load_f64, load_i64, store_f32
from localinfer.kernels.cpu.compiled.simd.pool import take_units
from localinfer.kernels.cpu.kernel_abi import CONTROL, OUTPUT_ROWS, POSITIONS
from localinfer.kernels.jit.numba import compose, inline, op

COLUMNS_PER_UNIT = 1024


@inline
def _optional(address: int, offset: int) -> int:
    return 0 if address == 0 else address + offset


@compose
def _norm(p: int, batch: int, num_threads: int, is_rms: bool) -> None:
    """Parameters: out, out stride, x, x stride, weight, bias, weight stride per group, groups, group size, epsilon
    bits, is output.
    """
    out, out_stride, x, x_stride = load_i64(p), load_i64(p + 8), load_i64(p + 16), load_i64(p + 24)
    weight, bias, group_stride = load_i64(p + 32), load_i64(p + 40), load_i64(p + 48)
    groups, size, epsilon = load_i64(p + 56), load_i64(p + 64), float_bits(load_i64(p + 72))
    control = load_i64(batch + CONTROL)
    units = num_rows(batch, load_i64(p + 80)) * groups
    claim = max(1, units // (4 * num_threads))
    while True:
        start = take_units(control, claim)
        if start >= units:
            return
        for unit in range(start, min(start + claim, units)):
            row, group = unit // groups, unit % groups
            target = out + row * out_stride + 4 * group * size
            source = x + row * x_stride + 4 * group * size
            group_weight = _optional(weight, group * group_stride)
            if is_rms:
                rms_norm_row(target, source, group_weight, size, epsilon)
            else:
                layer_norm_row(target, source, group_weight, _optional(bias, group * group_stride), size, epsilon)


@op
def rms_norm(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Root-mean-square norm; parameters as `_norm`."""
    _norm(parameters, batch, num_threads, True)


@op
def layer_norm(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Layer norm; parameters as `_norm`."""
    _norm(parameters, batch, num_threads, False)


# The elementwise ops share one frame: out, out stride, a, a stride, b, b stride, scalar bits, columns, is output.
_OUT, _A, _B, _SCALAR, _COLUMNS, _IS_OUTPUT = 0, 16, 32, 48, 56, 64


@compose
def _stretches(apply: Callable[..., None], code: int, p: int, batch: int) -> None:
    """Run a row function over every stretch of every row."""
    out, out_stride, a, a_stride = load_i64(p + _OUT), load_i64(p + _OUT + 8), load_i64(p + _A), load_i64(p + _A + 8)
    b, b_stride, scalar = load_i64(p + _B), load_i64(p + _B + 8), float_bits(load_i64(p + _SCALAR))
    columns = load_i64(p + _COLUMNS)
    control = load_i64(batch + CONTROL)
    per_row = (columns + COLUMNS_PER_UNIT - 1) // COLUMNS_PER_UNIT
    units = num_rows(batch, load_i64(p + _IS_OUTPUT)) * per_row
    while True:
        unit = take_units(control, 1)
        if unit >= units:
            return
        row, first = unit // per_row, unit % per_row * COLUMNS_PER_UNIT
        count = min(COLUMNS_PER_UNIT, columns - first)
        target, left = out + row * out_stride + 4 * first, a + row * a_stride + 4 * first
        right = b + row * b_stride + 4 * first
        apply(code, target, left, right, scalar, count)


@compose
def _activate(code: int, out: int, a: int, b: int, scalar: float, count: int) -> None:
    activate_row(code, out, a, count)


@compose
def _gate(code: int, out: int, a: int, b: int, scalar: float, count: int) -> None:
    gate_row(code, out, a, b, count)


@inline
def _add(code: int, out: int, a: int, b: int, scalar: float, count: int) -> None:
    add_scaled_row(out, a, b, scalar, count)


@inline
def _multiply_sigmoid(code: int, out: int, a: int, b: int, scalar: float, count: int) -> None:
    multiply_sigmoid_row(out, a, b, scalar, count)


@inline
def _scale(code: int, out: int, a: int, b: int, scalar: float, count: int) -> None:
    scale_row(out, a, a, scalar, count)


@inline
def _softcap(code: int, out: int, a: int, b: int, scalar: float, count: int) -> None:
    softcap_row(out, a, a, scalar, count)


@op
def add(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = a + scalar * b."""
    _stretches(_add, 0, parameters, batch)


@op
def multiply_sigmoid(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = a * sigmoid(b)."""
    _stretches(_multiply_sigmoid, 0, parameters, batch)


@op
def scale(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = scalar * a."""
    _stretches(_scale, 0, parameters, batch)


@op
def softcap(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = scalar * tanh(a / scalar)."""
    _stretches(_softcap, 0, parameters, batch)


@op
def multiply_sigmoid_by_row(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = a * sigmoid(b[0]), one gate per row."""
    p = parameters
    out, out_stride, a, a_stride = load_i64(p + _OUT), load_i64(p + _OUT + 8), load_i64(p + _A), load_i64(p + _A + 8)
    b, b_stride, columns = load_i64(p + _B), load_i64(p + _B + 8), load_i64(p + _COLUMNS)
    control = load_i64(batch + CONTROL)
    rows = num_rows(batch, load_i64(p + _IS_OUTPUT))
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        source = a + row * a_stride
        scale_row(out + row * out_stride, source, source, sigmoid_of(load_f32(b + row * b_stride)), columns)


@op
def silu(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = silu(a)."""
    _stretches(_activate, 0, parameters, batch)


@op
def gated_silu(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = silu(a) * b."""
    _stretches(_gate, 0, parameters, batch)


@op
def gelu_tanh(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = gelu_tanh(a)."""
    _stretches(_activate, 1, parameters, batch)


@op
def gated_gelu_tanh(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = gelu_tanh(a) * b."""
    _stretches(_gate, 1, parameters, batch)


@op
def gelu_erf(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = gelu_erf(a)."""
    _stretches(_activate, 2, parameters, batch)


@op
def gated_gelu_erf(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = gelu_erf(a) * b."""
    _stretches(_gate, 2, parameters, batch)


@op
def gelu_quick(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = gelu_quick(a)."""
    _stretches(_activate, 3, parameters, batch)


@op
def gated_gelu_quick(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = gelu_quick(a) * b."""
    _stretches(_gate, 3, parameters, batch)


@op
def relu(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = relu(a)."""
    _stretches(_activate, 4, parameters, batch)


@op
def gated_relu(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = relu(a) * b."""
    _stretches(_gate, 4, parameters, batch)


@op
def relu_squared(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = relu_squared(a)."""
    _stretches(_activate, 5, parameters, batch)


@op
def gated_relu_squared(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = relu_squared(a) * b."""
    _stretches(_gate, 5, parameters, batch)


@op
def gated_swiglu_clamped(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """out = swiglu_clamped(a) * b."""
    _stretches(_gate, 6, parameters, batch)


@op
def rope_angles(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Cosines, then sines, of every row's angles.

    Parameters: out, out stride, inverse frequencies (float64), count, magnitude bits.
    """
    p = parameters
    out, out_stride, frequencies, count = load_i64(p), load_i64(p + 8), load_i64(p + 16), load_i64(p + 24)
    magnitude = np.float64(float_bits(load_i64(p + 32)))
    control, positions = load_i64(batch + CONTROL), load_i64(batch + POSITIONS)
    rows = num_rows(batch, 0)
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        position = np.float64(load_i64(positions + 8 * row))
        target = out + row * out_stride
        for i in range(count):
            angle = position * load_f64(frequencies + 8 * i)
            store_f32(target + 4 * i, np.float32(math.cos(angle) * magnitude))
            store_f32(target + 4 * (count + i), np.float32(math.sin(angle) * magnitude))


@op
def rope(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Rotate in place.

    Parameters: x (at its first rotated column), x stride, angles, angles stride, heads, head size, pairs, is halves.
    """
    p = parameters
    x, x_stride, angles, angles_stride = load_i64(p), load_i64(p + 8), load_i64(p + 16), load_i64(p + 24)
    heads, head_size, pairs, is_halves = load_i64(p + 32), load_i64(p + 40), load_i64(p + 48), load_i64(p + 56)
    step = 4 if is_halves == 1 else 8
    distance = 4 * pairs if is_halves == 1 else 4
    control = load_i64(batch + CONTROL)
    units = num_rows(batch, 0) * heads
    claim = max(1, units // (4 * num_threads))
    while True:
        start = take_units(control, claim)
        if start >= units:
            return
        for unit in range(start, min(start + claim, units)):
            row = unit // heads
            first = x + row * x_stride + 4 * (unit % heads) * head_size
            cosines = angles + row * angles_stride
            for i in range(pairs):
                cosine, sine = load_f32(cosines + 4 * i), load_f32(cosines + 4 * (pairs + i))
                place = first + step * i
                a, b = load_f32(place), load_f32(place + distance)
                store_f32(place, a * cosine - b * sine)
                store_f32(place + distance, a * sine + b * cosine)


@op
def select_output(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Copy the rows that want logits: out, out stride, x, x stride, columns."""
    p = parameters
    out, out_stride, x, x_stride = load_i64(p), load_i64(p + 8), load_i64(p + 16), load_i64(p + 24)
    columns = load_i64(p + 32)
    control, chosen = load_i64(batch + CONTROL), load_i64(batch + OUTPUT_ROWS)
    rows = num_rows(batch, 1)
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        source = x + load_i64(chosen + 8 * row) * x_stride
        scale_row(out + row * out_stride, source, source, np.float32(1), columns)


@op
def scale_by_position(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """x *= 1 + slope * ln(1 + floor((position + offset) / period)).

    Parameters: x, x stride, columns, period, slope bits, offset.
    """
    p = parameters
    x, x_stride, columns, period = load_i64(p), load_i64(p + 8), load_i64(p + 16), load_i64(p + 24)
    slope, offset = np.float64(float_bits(load_i64(p + 32))), load_i64(p + 40)
    control, positions = load_i64(batch + CONTROL), load_i64(batch + POSITIONS)
    rows = num_rows(batch, 0)
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        periods = (load_i64(positions + 8 * row) + offset) // period
        factor = np.float32(1.0 + slope * math.log(1.0 + periods))
        place = x + row * x_stride
        scale_row(place, place, place, factor, columns)


@op
def copy_heads(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Copy part of every head: out, out stride, x, x stride, heads, width, out head bytes, x head bytes, is output."""
    p = parameters
    out, out_stride, x, x_stride = load_i64(p), load_i64(p + 8), load_i64(p + 16), load_i64(p + 24)
    heads, width, out_head, x_head = load_i64(p + 32), load_i64(p + 40), load_i64(p + 48), load_i64(p + 56)
    control = load_i64(batch + CONTROL)
    rows = num_rows(batch, load_i64(p + 64))
    while True:
        row = take_units(control, 1)
        if row >= rows:
            return
        for head in range(heads):
            target, source = out + row * out_stride + head * out_head, x + row * x_stride + head * x_head
            for column in range(width):
                store_f32(target + 4 * column, load_f32(source + 4 * column))
