"""Raw memory for jitted code: typed loads and stores at addresses, atomics, and calls through an address.

Kernels receive addresses (int64), not arrays: an array argument costs a Numba call seven values and a type check.
Nothing here checks bounds; the tape proves every shape before it writes an op.
"""

import sys
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from localinfer.kernels.cpu.compiled.simd.emit import F32, F64, I8, I16, I32, I64, Emitter

_VOID = ir.VoidType()


def _loader(kind: Any, result: Any, alignment: int = 0) -> Callable[..., Any]:
    def typed(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return Emitter(context, builder).load(arguments[0], kind, align=alignment or _alignment(kind))

        return result(types.int64), generate

    return typed


def _storer(kind: Any, value_type: Any) -> Callable[..., Any]:
    def typed(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            Emitter(context, builder).store(arguments[1], arguments[0], align=_alignment(kind))
            return context.get_dummy_value()

        return types.void(types.int64, value_type), generate

    return typed


def _alignment(kind: Any) -> int:
    return {str(I8): 1, str(I16): 2, str(I32): 4, str(F32): 4}.get(str(kind), 8)


load_i64 = intrinsic(_loader(I64, types.int64))
load_u32_anywhere = intrinsic(_loader(I32, types.uint32, 1))
load_u16_anywhere = intrinsic(_loader(I16, types.uint16, 1))
load_f32 = intrinsic(_loader(F32, types.float32))
load_f64 = intrinsic(_loader(F64, types.float64))
load_u8 = intrinsic(_loader(I8, types.uint8))
store_i64 = intrinsic(_storer(I64, types.int64))
store_f32 = intrinsic(_storer(F32, types.float32))
store_u32 = intrinsic(_storer(I32, types.uint32))
store_u16 = intrinsic(_storer(I16, types.uint16))
store_u8 = intrinsic(_storer(I8, types.uint8))


@intrinsic
def load_half(typing_context: Any, address: Any) -> Any:
    """Read a float16 at any address as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        return emit.half_to_float(emit.load(arguments[0], I16, align=1))

    return types.float32(types.int64), generate


@intrinsic
def store_half(typing_context: Any, address: Any, value: Any) -> Any:
    """Write a float32 as float16, rounded to nearest even."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emit = Emitter(context, builder)
        emit.store(emit.float_to_half(arguments[1]), arguments[0], align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), generate


@intrinsic
def float_bits(typing_context: Any, bits: Any) -> Any:
    """The float32 whose bits are the low 32 of an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(builder.trunc(arguments[0], I32), F32)

    return types.float32(types.int64), generate


@intrinsic
def atomic_load(typing_context: Any, address: Any) -> Any:
    """Read an int64 that another thread writes; later reads see at least what that thread wrote before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        return builder.load_atomic(pointer, "acquire", 8, typ=I64)

    return types.int64(types.int64), generate


@intrinsic
def atomic_store(typing_context: Any, address: Any, value: Any) -> Any:
    """Write an int64 in one order that all threads agree on."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], I64.as_pointer())
        builder.store_atomic(arguments[1], pointer, "seq_cst", 8)
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def atomic_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to an int64 and return what it was before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def atomic_exchange(typing_context: Any, address: Any, value: Any) -> Any:
    """Replace an int64 and return what it was before; later loads come after it on every CPU."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType())
        before = builder.atomic_rmw("xchg", pointer, arguments[1], "seq_cst")
        builder.fence("seq_cst")
        return before

    return types.int64(types.int64, types.int64), generate


@intrinsic
def spin_hint(typing_context: Any) -> Any:
    """Tell the CPU that this is a waiting loop."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        emitter = Emitter(context, builder)
        triple = context.codegen().magic_tuple()[0]
        if triple.startswith(("x86_64", "i686")):
            emitter.call("llvm.x86.sse2.pause", _VOID, [])
        elif triple.startswith(("aarch64", "arm64")):
            emitter.call("llvm.aarch64.hint", _VOID, [emitter.i32(1)])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def yield_processor(typing_context: Any) -> Any:
    """Let another thread run, so that waiting costs little on a machine with fewer free cores than threads."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if sys.platform != "win32":
            Emitter(context, builder).call("sched_yield", I32, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def call_op(typing_context: Any, function: Any, parameters: Any, batch: Any, thread: Any, num_threads: Any) -> Any:
    """Call a tape op through its address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_VOID, [I64, I64, I64, I64])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), list(arguments[1:]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), generate


def _pointer(element: Any) -> Callable[..., Any]:
    def typed(typing_context: Any, address: Any) -> Any:
        result = types.CPointer(element)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.inttoptr(arguments[0], context.get_value_type(result))

        return result(types.int64), generate

    return typed


float32_pointer = intrinsic(_pointer(types.float32))
float64_pointer = intrinsic(_pointer(types.float64))
int32_pointer = intrinsic(_pointer(types.int32))
int64_pointer = intrinsic(_pointer(types.int64))
