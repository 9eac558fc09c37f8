"""Ops on each row by itself: norms, activations, sums, RoPE, and copies of rows.

Threads take units (a row, a group of a row, or a stretch of columns) as they get free. An intrinsic works on one
stretch of one row, in sixteen lanes. Stretches are whole vectors: buffers are padded to sixteen columns, and lanes
beyond a row's width are never read by anything that reduces. Reductions take whole vectors in order, one fixed tree
over the lanes, then the remaining columns one by one.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled.emit import (
    ADDRESS,
    F32,
    FLOAT,
    LANES,
    LITERAL,
    VOID,
    Emitter,
    Value,
    emitted,
    vector,
)
from localinfer.kernels.cpu.compiled.memory import load_f32, load_f64, load_i64, store_f32
from localinfer.kernels.cpu.compiled.pool import row_op
from localinfer.kernels.cpu.parameters import (
    BATCH,
    COPY_HEADS,
    ELEMENTWISE,
    EMBED_MEDIA,
    GATE_PARTS,
    GATHER,
    MAGNITUDE,
    MIX_SLOTS,
    NORM,
    ROPE,
    ROPE_ANGLES,
    ROPE_ANGLES_BY_AXIS,
    SCALE_BY_POSITION,
    SEGMENT,
    SELECT_OUTPUT,
    XIELU,
)
from localinfer.kernels.jit.numba import Source, inline
from localinfer.kernels.ops import NUM_AXES, Activation

Formula = Callable[[Emitter, Value, Value, Value], Value]
"""From lanes of two inputs and a scalar in every lane to lanes of the result."""


def each_vector(emit: Emitter, count: Value, body: Callable[[Value], None]) -> None:
    """Run body(byte offset) for every vector that covers `count` columns."""

    def step(column: Value, carried: list[Value]) -> list[Value]:
        body(emit.builder.mul(column, emit.i64(4)))
        return carried

    emit.loop(emit.i64(0), count, LANES, [], step)


def _row_sum(emit: Emitter, address: Value, count: Value, term: Callable[[Value], Value]) -> Value:
    """Sum of term(x) over a row: lanes over whole vectors, their tree, then the tail."""
    b = emit.builder
    whole = b.and_(count, emit.i64(-LANES))

    def lanes(column: Value, carried: list[Value]) -> list[Value]:
        x = emit.load_floats(b.add(address, b.mul(column, emit.i64(4))))
        return [emit.add(carried[0], term(x))]

    def tail(column: Value, carried: list[Value]) -> list[Value]:
        x = emit.splat(emit.load(b.add(address, b.mul(column, emit.i64(4))), F32, align=4))
        return [b.fadd(carried[0], b.extract_element(term(x), emit.i32(0)))]

    total = emit.loop(emit.i64(0), whole, LANES, [emit.zeros(F32)], lanes)[0]
    return emit.loop(whole, count, 1, [emit.reduce_add(total)], tail)[0]


def _square_root(emit: Emitter, value: Value) -> Value:
    return emit.call("llvm.sqrt.f32", F32, [value])


@emitted(VOID, *[ADDRESS] * 3, types.int64, FLOAT)
def rms_norm_row(emit: Emitter, out: Value, x: Value, weight: Value, count: Value, epsilon: Value) -> None:
    """out = x / sqrt(mean(x * x) + epsilon) * weight; weight 0 means 1."""
    b = emit.builder
    mean = b.fdiv(_row_sum(emit, x, count, lambda v: emit.mul(v, v)), b.sitofp(count, F32))
    scale = emit.splat(b.fdiv(ir.Constant(F32, 1.0), _square_root(emit, b.fadd(mean, epsilon))))
    _normalised(emit, out, x, weight, count, lambda v: emit.mul(v, scale), None)


@emitted(VOID, *[ADDRESS] * 4, types.int64, FLOAT)
def layer_norm_row(
    emit: Emitter, out: Value, x: Value, weight: Value, bias: Value, count: Value, epsilon: Value
) -> None:
    """out = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias; address 0 means 1 or 0."""
    b = emit.builder
    size = b.sitofp(count, F32)
    mean = emit.splat(b.fdiv(_row_sum(emit, x, count, lambda v: v), size))

    def squared(v: Value) -> Value:
        difference = emit.sub(v, mean)
        return emit.mul(difference, difference)

    variance = b.fdiv(_row_sum(emit, x, count, squared), size)
    scale = emit.splat(b.fdiv(ir.Constant(F32, 1.0), _square_root(emit, b.fadd(variance, epsilon))))
    _normalised(emit, out, x, weight, count, lambda v: emit.mul(emit.sub(v, mean), scale), bias)


def _normalised(
    emit: Emitter, out: Value, x: Value, weight: Value, count: Value, scaled: Callable[[Value], Value], bias: Any
) -> None:
    """Write scaled(x) * weight + bias. Groups may not be whole vectors, so lanes past the end are not stored."""
    b = emit.builder

    def optional(address: Value, offset: Value, otherwise: float) -> Value:
        present = b.icmp_signed("!=", address, emit.i64(0))
        safe = b.select(present, b.add(address, offset), x)
        return b.select(emit.splat(present), emit.load_floats(safe), emit.splat_constant(F32, otherwise))

    def body(offset: Value) -> None:
        value = emit.mul(scaled(emit.load_floats(b.add(x, offset))), optional(weight, offset, 1.0))
        if bias is not None:
            value = emit.add(value, optional(bias, offset, 0.0))
        left = b.sub(count, b.udiv(offset, emit.i64(4)))
        with b.if_else(b.icmp_signed(">=", left, emit.i64(LANES))) as (whole, part):
            with whole:
                emit.store(value, b.add(out, offset), align=4)
            with part:
                emit.store_first(value, b.add(out, offset), left)

    each_vector(emit, count, body)


def _tanh(emit: Emitter, x: Value) -> Value:
    """1 - 2 / (exp(2x) + 1)."""
    two, one = emit.splat_constant(F32, 2.0), emit.splat_constant(F32, 1.0)
    return emit.sub(one, emit.builder.fdiv(two, emit.add(emit.exp(emit.mul(x, two)), one)))


def _sigmoid(emit: Emitter, x: Value) -> Value:
    one = emit.splat_constant(F32, 1.0)
    return emit.builder.fdiv(one, emit.add(one, emit.exp(emit.builder.fneg(x))))


def _error_function(emit: Emitter, x: Value) -> Value:
    """erf(x), Abramowitz and Stegun 7.1.26, absolute error below 1.5e-7."""
    b, one = emit.builder, emit.splat_constant(F32, 1.0)
    magnitude = emit.call("llvm.fabs.v16f32", vector(F32), [x])
    t = b.fdiv(one, emit.fma(magnitude, emit.splat_constant(F32, 0.3275911), one))
    polynomial = emit.splat_constant(F32, 1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        polynomial = emit.fma(polynomial, t, emit.splat_constant(F32, coefficient))
    decay = emit.exp(b.fneg(emit.mul(magnitude, magnitude)))
    value = emit.sub(one, emit.mul(emit.mul(polynomial, t), decay))
    return b.select(b.fcmp_ordered("<", x, emit.zeros(F32)), b.fneg(value), value)


def _clamp(emit: Emitter, x: Value, low: float, high: float) -> Value:
    lowest, highest = emit.splat_constant(F32, low), emit.splat_constant(F32, high)
    x = emit.builder.select(emit.builder.fcmp_ordered("<", x, lowest), lowest, x)
    return emit.builder.select(emit.builder.fcmp_ordered(">", x, highest), highest, x)


def _gelu(emit: Emitter, x: Value, weight: Value) -> Value:
    return emit.mul(emit.mul(x, emit.splat_constant(F32, 0.5)), emit.add(weight, emit.splat_constant(F32, 1.0)))


def _gelu_tanh(emit: Emitter, x: Value) -> Value:
    cubic = emit.mul(emit.mul(x, x), x)
    inner = emit.fma(cubic, emit.splat_constant(F32, 0.044715), x)
    return _gelu(emit, x, _tanh(emit, emit.mul(inner, emit.splat_constant(F32, 0.7978845608028654))))


def _gelu_erf(emit: Emitter, x: Value) -> Value:
    return _gelu(emit, x, _error_function(emit, emit.mul(x, emit.splat_constant(F32, 0.7071067811865476))))


def _gelu_quick(emit: Emitter, x: Value) -> Value:
    return emit.mul(x, _sigmoid(emit, emit.mul(x, emit.splat_constant(F32, 1.702))))


def _relu(emit: Emitter, x: Value) -> Value:
    zero = emit.zeros(F32)
    return emit.builder.select(emit.builder.fcmp_ordered(">", x, zero), x, zero)


def _relu_squared(emit: Emitter, x: Value) -> Value:
    positive = _relu(emit, x)
    return emit.mul(positive, positive)


def _swiglu_clamped(emit: Emitter, gate: Value, up: Value) -> Value:
    seven = emit.splat_constant(F32, 7.0)
    gate = emit.builder.select(emit.builder.fcmp_ordered(">", gate, seven), seven, gate)
    up = emit.add(_clamp(emit, up, -7.0, 7.0), emit.splat_constant(F32, 1.0))
    return emit.mul(_gelu_quick(emit, gate), up)


def _limited_gate(emit: Emitter, gate: Value, up: Value, limit: Value) -> Value:
    """min(silu(gate), limit) * clamp(up, -limit, limit)."""
    gate = _at_most(emit, emit.mul(gate, _sigmoid(emit, gate)), limit)
    return emit.mul(gate, _clamped(emit, up, limit))


def _at_most(emit: Emitter, x: Value, limit: Value) -> Value:
    """The lower of x and limit; NaN stays."""
    return emit.builder.select(emit.builder.fcmp_ordered(">", x, limit), limit, x)


def _at_least(emit: Emitter, x: Value, limit: Value) -> Value:
    """The higher of x and limit; NaN stays."""
    return emit.builder.select(emit.builder.fcmp_ordered("<", x, limit), limit, x)


def _clamped(emit: Emitter, x: Value, limit: Value) -> Value:
    """x within -limit and limit; NaN stays."""
    b, lowest = emit.builder, emit.builder.fneg(limit)
    return _at_most(emit, b.select(b.fcmp_ordered("<", x, lowest), lowest, x), limit)


def _softplus(emit: Emitter, x: Value) -> Value:
    """max(x, 0) + log1p(exp(-|x|)); the logarithm by the series of artanh, relative error below 3e-7."""
    b = emit.builder
    magnitude = emit.call("llvm.fabs.v16f32", vector(F32), [x])
    decay = emit.exp(b.fneg(magnitude))
    # log1p(t) = 2 artanh(z), z = t / (2 + t), at most 1 / 3.
    z = b.fdiv(decay, emit.add(decay, emit.splat_constant(F32, 2.0)))
    square = emit.mul(z, z)
    series = emit.splat_constant(F32, 1.0 / 15)
    for divisor in (13, 11, 9, 7, 5, 3, 1):
        series = emit.fma(series, square, emit.splat_constant(F32, 1.0 / divisor))
    logarithm = emit.mul(emit.mul(z, emit.splat_constant(F32, 2.0)), series)
    positive = _relu(emit, x)
    is_large = b.fcmp_ordered(">", x, emit.splat_constant(F32, 20.0))
    return b.select(is_large, x, emit.add(positive, logarithm))


_ACTIVATIONS: dict[Activation, Callable[[Emitter, Value], Value]] = {
    Activation.SILU: lambda emit, x: emit.mul(x, _sigmoid(emit, x)),
    Activation.GELU_TANH: _gelu_tanh,
    Activation.GELU_ERF: _gelu_erf,
    Activation.GELU_QUICK: _gelu_quick,
    Activation.RELU: _relu,
    Activation.RELU_SQUARED: _relu_squared,
    Activation.SOFTPLUS: _softplus,
    Activation.SIGMOID: _sigmoid,
    Activation.TANH: _tanh,
}


def _gated(activation: Callable[[Emitter, Value], Value]) -> Formula:
    return lambda emit, a, b, s: emit.mul(activation(emit, a), b)


def _ungated(activation: Callable[[Emitter, Value], Value]) -> Formula:
    return lambda emit, a, b, s: activation(emit, a)


FORMULAS: dict[str, Formula] = {
    # Two roundings, as `matmul`'s residual.
    "add": lambda emit, a, b, s: emit.add(a, emit.mul(b, s)),
    "multiply": lambda emit, a, b, s: emit.mul(a, b),
    "multiply_sigmoid": lambda emit, a, b, s: emit.mul(a, _sigmoid(emit, b)),
    "scale": lambda emit, a, b, s: emit.mul(a, s),
    "clamp": lambda emit, a, b, s: _clamped(emit, a, s),
    "clamp_above": lambda emit, a, b, s: _at_most(emit, a, s),
    "softcap": lambda emit, a, b, s: emit.mul(s, _tanh(emit, emit.builder.fdiv(a, s))),
    **{kind.value: _ungated(activation) for kind, activation in _ACTIVATIONS.items()},
    **{f"gated_{kind.value}": _gated(activation) for kind, activation in _ACTIVATIONS.items()},
    "gated_swiglu_clamped": lambda emit, a, b, s: _swiglu_clamped(emit, a, b),
    "gated_silu_limited": _limited_gate,
    "bound": lambda emit, a, b, s: _at_most(emit, _at_least(emit, a, s), b),
}
"""Formulas of the elementwise ops, of two inputs and a scalar."""


def _write_row(emit: Emitter, formula: Formula, out: Value, a: Value, b: Value, scalar: Value, count: Value) -> None:
    builder, lanes = emit.builder, emit.splat(scalar)

    def body(offset: Value) -> None:
        left, right = emit.load_floats(builder.add(a, offset)), emit.load_floats(builder.add(b, offset))
        emit.store(formula(emit, left, right, lanes), builder.add(out, offset), align=4)

    each_vector(emit, count, body)


@emitted(VOID, LITERAL, *[ADDRESS] * 3, FLOAT, types.int64)
def elementwise_row(emit: Emitter, code: int, out: Value, a: Value, b: Value, scalar: Value, count: Value) -> None:
    """out = formula(a, b, scalar) over a stretch of columns; code: the formula's index in FORMULAS."""
    _write_row(emit, list(FORMULAS.values())[code], out, a, b, scalar, count)


@emitted(VOID, *[ADDRESS] * 3, FLOAT, types.int64)
def add_scaled_row(emit: Emitter, out: Value, a: Value, b: Value, scalar: Value, count: Value) -> None:
    """out = a + scalar * b."""
    _write_row(emit, FORMULAS["add"], out, a, b, scalar, count)


@emitted(VOID, *[ADDRESS] * 2, FLOAT, types.int64)
def scale_row(emit: Emitter, out: Value, a: Value, scalar: Value, count: Value) -> None:
    """out = a * scalar."""
    _write_row(emit, FORMULAS["scale"], out, a, a, scalar, count)


@emitted(VOID, *[ADDRESS] * 2, FLOAT, types.int64)
def scale_part(emit: Emitter, out: Value, a: Value, scalar: Value, count: Value) -> None:
    """out = a * scalar over `count` columns, which need not be whole vectors: nothing after them is written."""
    factor = emit.splat(scalar)
    _normalised(emit, out, a, emit.i64(0), count, lambda v: emit.mul(v, factor), None)


_EXPM1_TERMS = tuple(1.0 / math.factorial(power) for power in range(10, 1, -1))
"""Taylor's series of (expm1(x) - x) / x^2, whose next term is below 2e-8 of it where |x| <= 0.5."""


def _expm1_less_x(emit: Emitter, x: Value) -> Value:
    """expm1(x) - x of x <= 0, without the cancellation near 0."""
    b = emit.builder
    series = emit.splat_constant(F32, _EXPM1_TERMS[0])
    for term in _EXPM1_TERMS[1:]:
        series = emit.fma(series, x, emit.splat_constant(F32, term))
    near = emit.mul(emit.mul(x, x), series)
    far = emit.sub(emit.sub(emit.exp(x), emit.splat_constant(F32, 1.0)), x)
    return b.select(b.fcmp_ordered(">", x, emit.splat_constant(F32, -0.5)), near, far)


@emitted(VOID, *[ADDRESS] * 2, types.int64, *[FLOAT] * 4)
def xielu_row(
    emit: Emitter, out: Value, x: Value, count: Value, positive: Value, negative: Value, beta: Value, epsilon: Value
) -> None:
    """out = xIELU(x); see `ops.elementwise.Xielu`."""
    b = emit.builder
    factors = [emit.splat(value) for value in (positive, negative, beta, epsilon)]

    def body(offset: Value) -> None:
        value = emit.load_floats(b.add(x, offset))
        above, below, linear, highest = factors
        low = b.select(b.fcmp_ordered("<", value, highest), value, highest)
        bent = emit.add(_expm1_less_x(emit, low), emit.sub(low, value))
        branch = b.select(
            b.fcmp_ordered(">", value, emit.zeros(F32)),
            emit.mul(above, emit.mul(value, value)),
            emit.mul(bent, below),
        )
        emit.store(emit.add(branch, emit.mul(linear, value)), b.add(out, offset), align=4)

    each_vector(emit, count, body)


@emitted(FLOAT, ADDRESS, types.int64)
def magnitude_of(emit: Emitter, x: Value, count: Value) -> Value:
    """sqrt(mean(x * x)) of a row."""
    b = emit.builder
    return _square_root(emit, b.fdiv(_row_sum(emit, x, count, lambda v: emit.mul(v, v)), b.sitofp(count, F32)))


@emitted(VOID, *[ADDRESS] * 2, FLOAT, types.int64)
def gaussian_top_k_row(emit: Emitter, out: Value, x: Value, deviations: Value, count: Value) -> None:
    """out = max(0, x - (mean(x) + deviations * std(x))), the variance over count - 1."""
    b = emit.builder
    size = b.sitofp(count, F32)
    mean = b.fdiv(_row_sum(emit, x, count, lambda v: v), size)
    lanes = emit.splat(mean)

    def squared(v: Value) -> Value:
        difference = emit.sub(v, lanes)
        return emit.mul(difference, difference)

    variance = b.fdiv(_row_sum(emit, x, count, squared), b.fsub(size, ir.Constant(F32, 1.0)))
    least = emit.splat(b.fadd(mean, b.fmul(deviations, _square_root(emit, variance))))

    def body(offset: Value) -> None:
        emit.store(_relu(emit, emit.sub(emit.load_floats(b.add(x, offset)), least)), b.add(out, offset), align=4)

    each_vector(emit, count, body)


@emitted(VOID, *[ADDRESS] * 2, types.int64)
def softmax_row(emit: Emitter, out: Value, x: Value, count: Value) -> None:
    """out = exp(x - max(x)) / sum(exp(x - max(x)))."""
    b = emit.builder
    whole = b.and_(count, emit.i64(-LANES))
    lowest = emit.splat_constant(F32, -math.inf)

    def lanes(column: Value, carried: list[Value]) -> list[Value]:
        return [emit.maximum(carried[0], emit.load_floats(b.add(x, b.mul(column, emit.i64(4)))))]

    def tail(column: Value, carried: list[Value]) -> list[Value]:
        value = emit.load(b.add(x, b.mul(column, emit.i64(4))), F32, align=4)
        return [emit.maximum(carried[0], value)]

    largest = emit.reduce_max(emit.loop(emit.i64(0), whole, LANES, [lowest], lanes)[0])
    largest = emit.splat(emit.loop(whole, count, 1, [largest], tail)[0])

    def exponential(offset: Value) -> None:
        value = emit.sub(emit.load_floats(b.add(x, offset)), largest)
        emit.store(emit.exp(value, highest=0.0), b.add(out, offset), align=4)

    each_vector(emit, count, exponential)
    total = emit.splat(_row_sum(emit, out, count, lambda v: v))

    def share(offset: Value) -> None:
        emit.store(b.fdiv(emit.load_floats(b.add(out, offset)), total), b.add(out, offset), align=4)

    each_vector(emit, count, share)


@emitted(FLOAT, FLOAT)
def sigmoid_of(emit: Emitter, x: Value) -> Value:
    """1 / (1 + exp(-x)) of one float32, with the lanes' own exponential."""
    return emit.builder.extract_element(_sigmoid(emit, emit.splat(x)), emit.i32(0))


@emitted(FLOAT, FLOAT)
def exp_of(emit: Emitter, x: Value) -> Value:
    """exp(x) of one float32, with the lanes' own exponential."""
    return emit.builder.extract_element(emit.exp(emit.splat(x)), emit.i32(0))


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
    """The excess over the mean and so many standard deviations, and 0 elsewhere."""
    gaussian_top_k_row(p.out + row * p.out_stride, p.a + row * p.a_stride, p.scalar, p.columns)


@row_op(ELEMENTWISE)
def softmax(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """Shares of a row's exponentials."""
    softmax_row(p.out + row * p.out_stride, p.a + row * p.a_stride, p.columns)


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


@row_op(ROPE_ANGLES_BY_AXIS, in_runs=True)
def rope_angles_by_axis(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """Cosines, then sines, of every row's angles, each by the row's position on the axis of its pair."""
    magnitude = np.float64(p.magnitude)
    position = load_i64(BATCH.positions(batch) + 8 * row)
    positions = BATCH.axes(batch)
    target = p.out + row * p.out_stride
    for i in range(p.count):
        if positions != 0:
            position = load_i64(positions + 8 * NUM_AXES * row + 8 * load_i64(p.axes + 8 * i))
        angle = np.float64(position) * load_f64(p.frequencies + 8 * i)
        store_f32(target + 4 * i, np.float32(math.cos(angle) * magnitude))
        store_f32(target + 4 * (p.count + i), np.float32(math.sin(angle) * magnitude))


@row_op(EMBED_MEDIA)
def embed_media(p: Any, batch: int, thread: int, row: int, part: int) -> None:
    """Put a part of the row's embedding in place of what a token's looked up, or add it."""
    media = BATCH.media(batch)
    if media == 0:
        return
    index = load_i64(BATCH.output_rows(batch) + 8 * row) if p.is_output != 0 else row
    source, target = load_i64(media + 8 * index), p.x + row * p.x_stride
    if source == 0:
        return
    source += p.offset
    for column in range(p.columns):
        value = load_f32(source + 4 * column)
        if p.adds != 0:
            value += load_f32(target + 4 * column)
        store_f32(target + 4 * column, value)


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
