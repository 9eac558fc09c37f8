"""Row-wise arithmetic in sixteen lanes: norms, activations and sums, each an intrinsic over one stretch of one row.

Stretches are whole vectors: buffers are padded to sixteen columns, and lanes beyond a row's width are never read by
anything that reduces. Reductions take whole vectors in order, one fixed tree over the lanes, then the remaining columns
one by one.
"""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from localinfer.kernels.cpu.compiled.simd.emit import F32, LANES, Emitter, Value, vector
from localinfer.kernels.cpu.compiled.simd.intrinsics import ADDRESS, FLOAT, LITERAL, VOID, emitted
from localinfer.kernels.ops import Activation

Formula = Callable[[Emitter, Value, Value, Value], Value]
"""From lanes of two inputs and a scalar in every lane to lanes of the result."""


def _each_vector(emit: Emitter, count: Value, body: Callable[[Value], None]) -> None:
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

    _each_vector(emit, count, body)


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
}
"""Formulas of the elementwise ops, of two inputs and a scalar."""


def _write_row(emit: Emitter, formula: Formula, out: Value, a: Value, b: Value, scalar: Value, count: Value) -> None:
    builder, lanes = emit.builder, emit.splat(scalar)

    def body(offset: Value) -> None:
        left, right = emit.load_floats(builder.add(a, offset)), emit.load_floats(builder.add(b, offset))
        emit.store(formula(emit, left, right, lanes), builder.add(out, offset), align=4)

    _each_vector(emit, count, body)


@emitted(VOID, LITERAL, *[ADDRESS] * 3, FLOAT, types.int64)
def elementwise_row(emit: Emitter, code: int, out: Value, a: Value, b: Value, scalar: Value, count: Value) -> None:
    """out = formula(a, b, scalar) over a stretch of columns; code: the formula's place in FORMULAS."""
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

    _each_vector(emit, count, body)


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

    _each_vector(emit, count, body)


@emitted(FLOAT, FLOAT)
def sigmoid_of(emit: Emitter, x: Value) -> Value:
    """1 / (1 + exp(-x)) of one float32, with the lanes' own exponential."""
    return emit.builder.extract_element(_sigmoid(emit, emit.splat(x)), emit.i32(0))


@emitted(FLOAT, FLOAT)
def exp_of(emit: Emitter, x: Value) -> Value:
    """exp(x) of one float32, with the lanes' own exponential."""
    return emit.builder.extract_element(emit.exp(emit.splat(x)), emit.i32(0))
