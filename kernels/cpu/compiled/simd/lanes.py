"""Sixteen numbers as one value of jitted code: lanes of float32, int32 or booleans, with Python's own operators.

Kernels that do the same to sixteen rows at once read like the scalar code for one of them, with `where(mask, a, b)` in
place of a branch. Every operation is the plain IEEE one on each lane alone, so a row gets the bits it would get alone,
on every instruction set.
"""

import operator
from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic, models, overload, register_model

from localinfer.kernels.cpu.compiled.simd.emit import F16, F32, I1, I8, I16, I32, I64, LANES, Emitter, Value, vector

LANE_BYTES = 4 * LANES
"""What `store` writes."""


class LaneType(types.Type):  # type: ignore[misc]
    """The type of sixteen lanes of one kind of element."""

    def __init__(self, name: str, element: Any) -> None:
        super().__init__(name=f"lanes({name})")
        self.element = element


@register_model(LaneType)
class _LaneModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, lane_type: LaneType) -> None:
        super().__init__(manager, lane_type, vector(lane_type.element))


FLOATS, INTEGERS, MASK = LaneType("float32", F32), LaneType("int32", I32), LaneType("bool", I1)

Emit = Callable[..., Value]
"""From an Emitter and the operands' IR values to the result's."""


def _generator(emit: Emit) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        result = emit(Emitter(context, builder), *arguments)
        return context.get_dummy_value() if result is None else result

    return generate


def _unary(operand: LaneType, result: Any, emit: Emit) -> Any:
    """An intrinsic of one operand."""

    @intrinsic
    def function(typing_context: Any, a: Any) -> Any:
        return result(operand), _generator(emit)

    return function


def _operator(symbol: Any, operand: LaneType, result: LaneType, emit: Emit) -> None:
    """Give one of Python's operators a meaning between two values of a lane type."""

    @intrinsic
    def function(typing_context: Any, a: Any, b: Any) -> Any:
        return result(operand, operand), _generator(emit)

    # Numba wants both functions to have one signature, down to the annotations, so they are lambdas.
    overload(symbol)(lambda a, b: (lambda a, b: function(a, b)) if (a, b) == (operand, operand) else None)


for _symbol, _method in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _operator(_symbol, FLOATS, FLOATS, lambda emit, a, b, method=_method: getattr(emit.builder, method)(a, b))

for _symbol, _sign in ((operator.lt, "<"), (operator.le, "<="), (operator.gt, ">"), (operator.ge, ">=")):
    _operator(_symbol, FLOATS, MASK, lambda emit, a, b, sign=_sign: emit.builder.fcmp_ordered(sign, a, b))

_operator(operator.ne, FLOATS, MASK, lambda emit, a, b: emit.builder.fcmp_unordered("!=", a, b))

for _symbol, _method in ((operator.and_, "and_"), (operator.or_, "or_")):
    for _operand in (INTEGERS, MASK):
        _operator(_symbol, _operand, _operand, lambda emit, a, b, method=_method: getattr(emit.builder, method)(a, b))


def _math(name: str) -> Any:
    return _unary(FLOATS, FLOATS, lambda emit, a: emit.call(f"llvm.{name}.v16f32", vector(F32), [a]))


round_even = _math("rint")
truncate = _math("trunc")
square_root = _math("sqrt")
absolute = _math("fabs")

to_integers = _unary(FLOATS, INTEGERS, lambda emit, a: emit.builder.fptosi(a, vector(I32)))
"""Whole numbers within int32; others have no meaning."""

any_lane = _unary(MASK, types.boolean, lambda emit, a: emit.call("llvm.vector.reduce.or.v16i1", I1, [a]))

half_bits = _unary(FLOATS, INTEGERS, lambda emit, a: emit.builder.zext(emit.float_to_half(a), vector(I32)))
"""Float16 bits, rounded to nearest even."""

half_values = _unary(INTEGERS, FLOATS, lambda emit, a: emit.half_to_float(emit.builder.trunc(a, vector(I16))))
"""What float16 bits mean."""


@intrinsic
def splat(typing_context: Any, value: Any) -> Any:
    """A float as float32 in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        single = context.cast(builder, arguments[0], signature.args[0], types.float32)
        return emit.splat(single)

    return FLOATS(value), generate


@intrinsic
def shifted_left(typing_context: Any, value: Any, count: Any) -> Any:
    """Every lane of integers, shifted by the same number of bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        return builder.shl(arguments[0], emit.splat(builder.trunc(arguments[1], I32)))

    return INTEGERS(INTEGERS, types.int64), generate


@intrinsic
def bits_from(typing_context: Any, value: Any, first: Any, mask: Any) -> Any:
    """(value >> first) & mask of every lane of integers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        value, first, mask = arguments
        moved = builder.lshr(value, emit.splat(builder.trunc(first, I32)))
        return builder.and_(moved, emit.splat(builder.trunc(mask, I32)))

    return INTEGERS(INTEGERS, types.int64, types.int64), generate


def _where(kind: LaneType) -> Any:
    @intrinsic
    def function(typing_context: Any, mask: Any, a: Any, b: Any) -> Any:
        return kind(MASK, kind, kind), _generator(lambda emit, mask, a, b: emit.builder.select(mask, a, b))

    return function


where = _where(FLOATS)
"""a where the mask is set, else b."""


@intrinsic
def load(typing_context: Any, address: Any) -> Any:
    """Sixteen float32 at an address that is a multiple of 64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return Emitter(context, builder).load(arguments[0], vector(F32), align=64)

    return FLOATS(types.int64), generate


@intrinsic
def store(typing_context: Any, address: Any, value: Any) -> Any:
    """Write what `load` reads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Emitter(context, builder).store(arguments[1], arguments[0], align=64)
        return context.get_dummy_value()

    return types.void(types.int64, FLOATS), generate


def _scatter(element: Any) -> Any:
    @intrinsic
    def function(typing_context: Any, address: Any, stride: Any, last: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit = Emitter(context, builder)
            start, stride, last, value = arguments
            for lane, row in enumerate(_row_addresses(emit, start, stride, last)):
                item = builder.extract_element(value, emit.i32(lane))
                emit.store(item if element is I32 else builder.trunc(item, element), row)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64, types.int64, INTEGERS), generate

    return function


def _row_addresses(emit: Emitter, start: Value, stride: Value, last: Value) -> list[Value]:
    """Addresses of rows 0 to 15, where every row past `last` is `last`."""
    builder = emit.builder
    rows = []
    for lane in range(LANES):
        is_there = builder.icmp_signed("<", emit.i64(lane), last)
        rows.append(builder.add(start, builder.mul(builder.select(is_there, emit.i64(lane), last), stride)))
    return rows


scatter_bytes = _scatter(I8)
"""scatter(address, stride, last, integers): the low bytes of lane i to row i. Lanes past `last` must equal it."""
scatter_shorts = _scatter(I16)
scatter_words = _scatter(I32)


def _column_loader(element: Any) -> Any:
    @intrinsic
    def function(typing_context: Any, source: Any, stride: Any, last: Any, target: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit = Emitter(context, builder)
            start, stride, last, target = arguments
            rows = [emit.load_floats(row, 0, element) for row in _row_addresses(emit, start, stride, last)]
            infinity = emit.splat_constant(F32, float("inf"))
            is_wrong = emit.zeros(I1)
            for row in rows:
                magnitude = emit.call("llvm.fabs.v16f32", vector(F32), [row])
                is_wrong = builder.or_(is_wrong, builder.fcmp_unordered(">=", magnitude, infinity))
            for column, value in enumerate(emit.transpose(rows)):
                emit.store(value, target, LANE_BYTES * column, align=64)
            return builder.zext(emit.call("llvm.vector.reduce.or.v16i1", I1, [is_wrong]), I64)

        return types.int64(*[types.int64] * 4), generate

    return function


load_float_columns = _column_loader(F32)
"""load(source, stride, last, target): sixteen columns of sixteen rows as lanes, one column after the other.

Rows past `last` repeat it. Returns 1 if any number is infinite or NaN, else 0.
"""
load_half_columns = _column_loader(F16)
load_bfloat_columns = _column_loader(I16)
