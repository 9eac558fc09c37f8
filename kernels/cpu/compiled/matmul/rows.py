"""Row-wise arithmetic in sixteen lanes: norms, activations and sums, each an intrinsic over one stretch of one row.

Stretches are whole vectors: buffers are padded to sixteen columns, and lanes beyond a row's width are never read by
anything that reduces. Reductions take whole vectors in order, one fixed tree over the lanes, then the remaining columns
one by one.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.errors import RequireLiteralValue
from numba.extending import intrinsic

from localinfer.kernels.cpu.compiled.simd.emit import F32, LANES, Emitter, Value, vector
from localinfer.kernels.ops import Activation

_ADDRESS = types.int64
ACTIVATION_CODES = {kind: code for code, kind in enumerate(Activation)}


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


@intrinsic
def rms_norm_row(typing_context: Any, out: Any, x: Any, weight: Any, count: Any, epsilon: Any) -> Any:
    """out = x / sqrt(mean(x * x) + epsilon) * weight; weight 0 means 1."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, b = Emitter(context, builder), builder
        out_row, x_row, weight_row, columns, epsilon_value = arguments
        squares = _row_sum(emit, x_row, columns, lambda v: emit.mul(v, v))
        mean = b.fdiv(squares, b.sitofp(columns, F32))
        scale = emit.splat(b.fdiv(ir.Constant(F32, 1.0), _square_root(emit, b.fadd(mean, epsilon_value))))
        _normalised(emit, out_row, x_row, weight_row, columns, lambda v: emit.mul(v, scale), None)
        return context.get_dummy_value()

    return types.void(*[_ADDRESS] * 4, types.float32), generate


@intrinsic
def layer_norm_row(typing_context: Any, out: Any, x: Any, weight: Any, bias: Any, count: Any, epsilon: Any) -> Any:
    """out = (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias; address 0 means 1 or 0."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit, b = Emitter(context, builder), builder
        out_row, x_row, weight_row, bias_row, columns, epsilon_value = arguments
        size = b.sitofp(columns, F32)
        mean = emit.splat(b.fdiv(_row_sum(emit, x_row, columns, lambda v: v), size))

        def squared(v: Value) -> Value:
            difference = emit.sub(v, mean)
            return emit.mul(difference, difference)

        variance = b.fdiv(_row_sum(emit, x_row, columns, squared), size)
        scale = emit.splat(b.fdiv(ir.Constant(F32, 1.0), _square_root(emit, b.fadd(variance, epsilon_value))))
        _normalised(emit, out_row, x_row, weight_row, columns, lambda v: emit.mul(emit.sub(v, mean), scale), bias_row)
        return context.get_dummy_value()

    return types.void(*[_ADDRESS] * 5, types.float32), generate


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


def _activated(emit: Emitter, kind: Activation, x: Value) -> Value:
    zero = emit.zeros(F32)
    if kind is Activation.SILU:
        return emit.mul(x, _sigmoid(emit, x))
    if kind is Activation.GELU_QUICK:
        return emit.mul(x, _sigmoid(emit, emit.mul(x, emit.splat_constant(F32, 1.702))))
    if kind is Activation.GELU_TANH:
        cubic = emit.mul(emit.mul(x, x), x)
        inner = emit.fma(cubic, emit.splat_constant(F32, 0.044715), x)
        weight = emit.add(
            _tanh(emit, emit.mul(inner, emit.splat_constant(F32, 0.7978845608028654))), emit.splat_constant(F32, 1.0)
        )
        return emit.mul(emit.mul(x, emit.splat_constant(F32, 0.5)), weight)
    if kind is Activation.GELU_ERF:
        scaled = emit.mul(x, emit.splat_constant(F32, 0.7071067811865476))
        weight = emit.add(_error_function(emit, scaled), emit.splat_constant(F32, 1.0))
        return emit.mul(emit.mul(x, emit.splat_constant(F32, 0.5)), weight)
    positive = emit.builder.select(emit.builder.fcmp_ordered(">", x, zero), x, zero)
    return positive if kind is Activation.RELU else emit.mul(positive, positive)


@intrinsic
def activate_row(typing_context: Any, kind: Any, out: Any, x: Any, count: Any) -> Any:
    """out = kind(x); kind is a literal code."""
    if not isinstance(kind, types.IntegerLiteral):
        raise RequireLiteralValue("the activation chooses the code that is emitted, so it must be a literal")
    activation = list(Activation)[kind.literal_value]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        _, out_row, x_row, columns = arguments

        def body(offset: Value) -> None:
            value = _activated(emit, activation, emit.load_floats(builder.add(x_row, offset)))
            emit.store(value, builder.add(out_row, offset), align=4)

        _each_vector(emit, columns, body)
        return context.get_dummy_value()

    return types.void(kind, *[_ADDRESS] * 3), generate


@intrinsic
def gate_row(typing_context: Any, kind: Any, out: Any, gate: Any, up: Any, count: Any) -> Any:
    """out = kind(gate) * up; kind is a literal code."""
    if not isinstance(kind, types.IntegerLiteral):
        raise RequireLiteralValue("the activation chooses the code that is emitted, so it must be a literal")
    activation = list(Activation)[kind.literal_value]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        _, out_row, gate_row_, up_row, columns = arguments

        def body(offset: Value) -> None:
            g = emit.load_floats(builder.add(gate_row_, offset))
            u = emit.load_floats(builder.add(up_row, offset))
            if activation is Activation.SWIGLU_CLAMPED:
                seven = emit.splat_constant(F32, 7.0)
                g = builder.select(builder.fcmp_ordered(">", g, seven), seven, g)
                u = emit.add(_clamp(emit, u, -7.0, 7.0), emit.splat_constant(F32, 1.0))
                value = emit.mul(_activated(emit, Activation.GELU_QUICK, g), u)
            else:
                value = emit.mul(_activated(emit, activation, g), u)
            emit.store(value, builder.add(out_row, offset), align=4)

        _each_vector(emit, columns, body)
        return context.get_dummy_value()

    return types.void(kind, *[_ADDRESS] * 4), generate


def _binary(combine: Callable[[Emitter, Value, Value, Value], Value]) -> Callable[..., Any]:
    """An intrinsic out = combine(a, b, scalar) over a stretch of columns."""

    def typed(typing_context: Any, out: Any, a: Any, b: Any, scalar: Any, count: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit = Emitter(context, builder)
            out_row, a_row, b_row, value, columns = arguments
            lanes = emit.splat(value)

            def body(offset: Value) -> None:
                x = emit.load_floats(builder.add(a_row, offset))
                y = emit.load_floats(builder.add(b_row, offset))
                emit.store(combine(emit, x, y, lanes), builder.add(out_row, offset), align=4)

            _each_vector(emit, columns, body)
            return context.get_dummy_value()

        return types.void(_ADDRESS, _ADDRESS, _ADDRESS, types.float32, _ADDRESS), generate

    return typed


add_scaled_row = intrinsic(_binary(lambda emit, x, y, s: emit.add(x, emit.mul(y, s))))
"""out = a + scalar * b, two roundings, as `matmul`'s residual."""

multiply_sigmoid_row = intrinsic(_binary(lambda emit, x, y, s: emit.mul(x, _sigmoid(emit, y))))
"""out = a * sigmoid(b)."""

scale_row = intrinsic(_binary(lambda emit, x, y, s: emit.mul(x, s)))
"""out = a * scalar; b is ignored."""

softcap_row = intrinsic(_binary(lambda emit, x, y, s: emit.mul(s, _tanh(emit, emit.builder.fdiv(x, s)))))
"""out = scalar * tanh(a / scalar); b is ignored."""


@intrinsic
def sigmoid_of(typing_context: Any, x: Any) -> Any:
    """1 / (1 + exp(-x)) of one float32, with the lanes' own exponential."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        return builder.extract_element(_sigmoid(emit, emit.splat(arguments[0])), emit.i32(0))

    return types.float32(types.float32), generate


@intrinsic
def exp_of(typing_context: Any, x: Any) -> Any:
    """exp(x) of one float32, with the lanes' own exponential."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        return builder.extract_element(emit.exp(emit.splat(arguments[0])), emit.i32(0))

    return types.float32(types.float32), generate
