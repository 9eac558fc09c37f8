"""Sixteen numbers as one value of jitted code: lanes of float32, int32 or booleans, with Python's own operators.

Kernels that do the same to sixteen rows at once read like the scalar code for one of them, with `where(mask, a, b)` for
a branch. Every operation is the plain IEEE one on each lane alone, so a row gets the bits it would get alone,
on every instruction set.
"""

import operator
from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import models, overload, register_model

from localinfer.kernels.cpu.compiled.emit import (
    ADDRESS,
    F16,
    F32,
    FLOAT,
    I1,
    I8,
    I16,
    I32,
    I64,
    LANES,
    VOID,
    Emitter,
    Value,
    emitted,
    vector,
)

LANE_BYTES = 4 * LANES
"""Bytes that `store` writes."""


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


def _operator(symbol: Any, operand: LaneType, result: LaneType, emit: Callable[..., Value]) -> None:
    """Give one of Python's operators a meaning between two values of a lane type."""
    function = emitted(result, operand, operand)(emit)
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
    return emitted(FLOATS, FLOATS)(lambda emit, a: emit.call(f"llvm.{name}.v16f32", vector(F32), [a]))


round_even = _math("rint")
truncate = _math("trunc")
square_root = _math("sqrt")
absolute = _math("fabs")


@emitted(INTEGERS, FLOATS)
def to_integers(emit: Emitter, a: Value) -> Value:
    """Whole numbers within int32; others have no meaning."""
    return emit.builder.fptosi(a, vector(I32))


@emitted(types.boolean, MASK)
def any_lane(emit: Emitter, a: Value) -> Value:
    """True if the mask is set anywhere."""
    return emit.call("llvm.vector.reduce.or.v16i1", I1, [a])


@emitted(INTEGERS, FLOATS)
def half_bits(emit: Emitter, a: Value) -> Value:
    """Float16 bits, rounded to nearest even."""
    return emit.builder.zext(emit.float_to_half(a), vector(I32))


@emitted(FLOATS, INTEGERS)
def half_values(emit: Emitter, a: Value) -> Value:
    """Numbers of float16 bits."""
    return emit.half_to_float(emit.builder.trunc(a, vector(I16)))


@emitted(FLOATS, FLOAT)
def splat(emit: Emitter, value: Value) -> Value:
    """A float as float32 in every lane."""
    return emit.splat(value)


@emitted(INTEGERS, INTEGERS, types.int64)
def shifted_left(emit: Emitter, value: Value, count: Value) -> Value:
    """Every lane of integers, shifted by the same number of bits."""
    return emit.builder.shl(value, emit.splat(emit.builder.trunc(count, I32)))


@emitted(INTEGERS, INTEGERS, types.int64, types.int64)
def bits_from(emit: Emitter, value: Value, first: Value, mask: Value) -> Value:
    """(value >> first) & mask of every lane of integers."""
    builder = emit.builder
    moved = builder.lshr(value, emit.splat(builder.trunc(first, I32)))
    return builder.and_(moved, emit.splat(builder.trunc(mask, I32)))


@emitted(FLOATS, MASK, FLOATS, FLOATS)
def where(emit: Emitter, mask: Value, a: Value, b: Value) -> Value:
    """a where the mask is set, else b."""
    return emit.builder.select(mask, a, b)


@emitted(FLOATS, ADDRESS)
def load(emit: Emitter, address: Value) -> Value:
    """Sixteen float32 at an address that is a multiple of 64."""
    return emit.load(address, vector(F32), align=64)


@emitted(VOID, ADDRESS, FLOATS)
def store(emit: Emitter, address: Value, value: Value) -> None:
    """Write what `load` reads."""
    emit.store(value, address, align=64)


@emitted(FLOATS, ADDRESS, types.int64)
def load_first(emit: Emitter, address: Value, count: Value) -> Value:
    """The first `count` of sixteen float32 at any address, and zeros; reads nothing after them."""
    return emit.load_first(address, count)


@emitted(VOID, ADDRESS, FLOATS, types.int64)
def store_first(emit: Emitter, address: Value, value: Value, count: Value) -> None:
    """Write the first `count` lanes to any address."""
    emit.store_first(value, address, count)


def _scatter(element: Any) -> Any:
    @emitted(VOID, types.int64, types.int64, types.int64, INTEGERS)
    def function(emit: Emitter, start: Value, stride: Value, last: Value, value: Value) -> None:
        builder = emit.builder
        for lane, row in enumerate(_row_addresses(emit, start, stride, last)):
            item = builder.extract_element(value, emit.i32(lane))
            emit.store(item if element is I32 else builder.trunc(item, element), row)

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
    @emitted(types.int64, *[types.int64] * 4)
    def function(emit: Emitter, start: Value, stride: Value, last: Value, target: Value) -> Value:
        builder = emit.builder
        rows = [emit.load_floats(row, 0, element) for row in _row_addresses(emit, start, stride, last)]
        infinity = emit.splat_constant(F32, float("inf"))
        is_wrong = emit.zeros(I1)
        for row in rows:
            magnitude = emit.call("llvm.fabs.v16f32", vector(F32), [row])
            is_wrong = builder.or_(is_wrong, builder.fcmp_unordered(">=", magnitude, infinity))
        for column, value in enumerate(emit.transpose(rows)):
            emit.store(value, target, LANE_BYTES * column, align=64)
        return builder.zext(emit.call("llvm.vector.reduce.or.v16i1", I1, [is_wrong]), I64)

    return function


load_float_columns = _column_loader(F32)
"""load(source, stride, last, target): sixteen columns of sixteen rows as lanes, one column after the other.

Rows past `last` repeat it. Returns 1 if any number is infinite or NaN, else 0.
"""
load_half_columns = _column_loader(F16)
load_bfloat_columns = _column_loader(I16)
