"""Raw memory for jitted code: typed loads and stores at addresses, atomics, and calls through an address.

Kernels receive addresses (int64), not arrays: an array argument costs a Numba call seven values and a type check.
Nothing here checks bounds; the tape proves every shape before it writes an op.
"""

import functools
import platform
import sys
from collections import namedtuple
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.imputils import lower_constant, lower_getattr_generic
from numba.core.typing.templates import AttributeTemplate, infer_getattr, make_intrinsic_template
from numba.extending import intrinsic, models, register_model, typeof_impl

from localinfer.kernels.cpu.compiled.emit import (
    ADDRESS,
    F32,
    F64,
    FLOAT,
    I8,
    I16,
    I32,
    I64,
    LANES,
    LITERAL,
    VOID,
    Emitter,
    Value,
    emitted,
)
from localinfer.kernels.cpu.parameters import Block

_ALIGNMENT = {I8: 1, I16: 2, I32: 4, F32: 4, I64: 8, F64: 8}


def _loader(kind: Any, result: Any, alignment: int = 0) -> Any:
    @emitted(result, ADDRESS)
    def load(emit: Emitter, address: Value) -> Value:
        return emit.load(address, kind, align=alignment or _ALIGNMENT[kind])

    return load


def _storer(kind: Any, value_type: Any) -> Any:
    @emitted(VOID, ADDRESS, value_type)
    def store(emit: Emitter, address: Value, value: Value) -> None:
        emit.store(value, address, align=_ALIGNMENT[kind])

    return store


load_i64 = _loader(I64, types.int64)
load_u32_anywhere = _loader(I32, types.uint32, 1)
load_u16_anywhere = _loader(I16, types.uint16, 1)
load_f32 = _loader(F32, FLOAT)
load_f64 = _loader(F64, types.float64)
load_u8 = _loader(I8, types.uint8)
store_i64 = _storer(I64, types.int64)
store_f32 = _storer(F32, FLOAT)
store_u32 = _storer(I32, types.uint32)
store_u16 = _storer(I16, types.uint16)
store_u8 = _storer(I8, types.uint8)


@emitted(FLOAT, ADDRESS)
def load_half(emit: Emitter, address: Value) -> Value:
    """Read a float16 at any address as float32."""
    return emit.half_to_float(emit.load(address, I16, align=1))


@emitted(VOID, ADDRESS, FLOAT)
def store_half(emit: Emitter, address: Value, value: Value) -> None:
    """Write a float32 as float16, rounded to nearest even."""
    emit.store(emit.float_to_half(value), address, align=2)


@emitted(VOID, ADDRESS, ADDRESS, LITERAL)
def store_halves(emit: Emitter, address: Value, source: Value, stride: int) -> None:
    """Write sixteen float32 as float16, `stride` (literal) elements apart, each rounded as `store_half` does."""
    halves = emit.float_to_half(emit.load_floats(source))
    if stride == 1:
        emit.store(halves, address, align=2)
        return
    for lane in range(LANES):
        emit.store(emit.builder.extract_element(halves, emit.i32(lane)), address, 2 * stride * lane, align=2)


@emitted(FLOAT, types.int64)
def float_bits(emit: Emitter, bits: Value) -> Value:
    """The float32 whose bits are the low 32 of an int64."""
    return emit.bitcast(emit.builder.trunc(bits, I32), F32)


@emitted(types.int64, ADDRESS)
def atomic_load(emit: Emitter, address: Value) -> Value:
    """Read an int64 that another thread writes; later reads see at least what that thread wrote before."""
    return emit.builder.load_atomic(emit.pointer(address), "acquire", 8, typ=I64)


@emitted(VOID, ADDRESS, types.int64)
def atomic_store(emit: Emitter, address: Value, value: Value) -> None:
    """Write an int64 in one order that all threads agree on."""
    emit.builder.store_atomic(value, emit.builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)
    emit.builder.fence("seq_cst")


@emitted(types.int64, ADDRESS, types.int64)
def atomic_add(emit: Emitter, address: Value, value: Value) -> Value:
    """Add to an int64 and return what it was before."""
    return emit.builder.atomic_rmw("add", emit.pointer(address), value, "seq_cst")


@emitted(types.int64, ADDRESS, types.int64)
def atomic_exchange(emit: Emitter, address: Value, value: Value) -> Value:
    """Replace an int64 and return what it was before; later loads come after it on every CPU."""
    before = emit.builder.atomic_rmw("xchg", emit.pointer(address), value, "seq_cst")
    emit.builder.fence("seq_cst")
    return before


@emitted(types.int64, ADDRESS, types.int64)
def atomic_or(emit: Emitter, address: Value, value: Value) -> Value:
    """Set bits of an int64 and return what it was before."""
    return emit.builder.atomic_rmw("or", emit.pointer(address), value, "seq_cst")


@emitted(types.int64, ADDRESS, types.int64, types.int64)
def atomic_replace(emit: Emitter, address: Value, expected: Value, value: Value) -> Value:
    """Replace an int64 if it is the expected one; return 1 if it was."""
    found = emit.builder.cmpxchg(emit.pointer(address), expected, value, "seq_cst", "seq_cst")
    return emit.builder.zext(emit.builder.extract_value(found, 1), I64)


_WHOLE_SYSTEM = 15
"""Of an instruction barrier: its only domain."""


@emitted(VOID)
def spin_hint(emit: Emitter) -> None:
    """Tell the CPU that this is a waiting loop: on arm64 by a barrier, since most CPUs make nothing of its hint."""
    if emit.triple.startswith(("x86_64", "i686")):
        emit.call("llvm.x86.sse2.pause", ir.VoidType(), [])
    elif emit.is_arm64:
        emit.call("llvm.aarch64.isb", ir.VoidType(), [emit.i32(_WHOLE_SYSTEM)])


def _register(emit: Emitter, name: str) -> Value:
    """A register of the system that programs may read, by its name."""
    kind = ir.FunctionType(I64, [ir.MetaDataType()])
    return emit.builder.call(
        emit.declare("llvm.read_volatile_register.i64", kind), [emit.builder.module.add_metadata([name])]
    )


@emitted(types.int64)
def clock(emit: Emitter) -> Value:
    """Ticks of the counter that arm64 CPUs have for time; 0 elsewhere, where `is_waiting` counts looks."""
    return _register(emit, "cntvct_el0") if emit.is_arm64 else emit.i64(0)


@emitted(types.int64, *[types.int64] * 4)
def is_waiting(emit: Emitter, spins: Value, looks: Value, began: Value, nanoseconds: Value) -> Value:
    """1 while a loop that has looked so often is to look on: less than so many times, or on arm64 so long."""
    builder = emit.builder
    if emit.is_arm64:
        ticks = builder.udiv(builder.mul(nanoseconds, _register(emit, "cntfrq_el0")), emit.i64(10**9))
        spins, looks = builder.sub(_register(emit, "cntvct_el0"), began), ticks
    return builder.zext(builder.icmp_signed("<", spins, looks), I64)


@emitted(VOID)
def yield_processor(emit: Emitter) -> None:
    """Let another thread run, so that waiting costs little on a machine with fewer free cores than threads."""
    emit.call("SwitchToThread" if "windows" in emit.triple else "sched_yield", I32, [])


_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 128, 129
"""FUTEX_WAIT and FUTEX_WAKE, each with FUTEX_PRIVATE_FLAG."""
CAN_SLEEP = int(sys.platform.startswith("linux") and platform.machine() in _FUTEX)
"""1 if `sleep_while` and `wake_sleeper` do anything."""


def _futex(emit: Emitter, address: Value, action: int, value: Value) -> None:
    if CAN_SLEEP:
        zero = emit.i64(0)
        number, action_word = emit.i64(_FUTEX[platform.machine()]), emit.i64(action)
        emit.call("syscall", I64, [number, address, action_word, value, zero, zero, zero])


@emitted(VOID, ADDRESS, types.int64)
def sleep_while(emit: Emitter, address: Value, value: Value) -> None:
    """Sleep until woken if the int32 at the address is this one; may end without a reason. Does nothing elsewhere."""
    _futex(emit, address, _WAIT, value)


@emitted(VOID, ADDRESS)
def wake_sleeper(emit: Emitter, address: Value) -> None:
    """Wake the thread that sleeps at the address."""
    _futex(emit, address, _WAKE, emit.i64(1))


@emitted(VOID, *[types.int64] * 5)
def call_op(emit: Emitter, function: Value, parameters: Value, batch: Value, thread: Value, num_threads: Value) -> None:
    """Call a tape op through its address."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * 4)
    emit.builder.call(emit.builder.inttoptr(function, kind.as_pointer()), [parameters, batch, thread, num_threads])


def _pointer(element: Any, kind: Any) -> Any:
    @emitted(types.CPointer(element), ADDRESS)
    def pointer(emit: Emitter, address: Value) -> Value:
        return emit.builder.inttoptr(address, kind.as_pointer())

    return pointer


float32_pointer = _pointer(types.float32, F32)
float64_pointer = _pointer(types.float64, F64)
int32_pointer = _pointer(types.int32, I32)
int64_pointer = _pointer(types.int64, I64)

# Parameter blocks: to a kernel a `Block` is a constant whose attributes are functions that load.


class _BlockType(types.Opaque):  # type: ignore[misc]
    def __init__(self, block: Block) -> None:
        super().__init__(f"block({' '.join(block.fields)})")
        self.block = block


register_model(_BlockType)(models.OpaqueModel)


@functools.cache
def _block_function(block: Block, name: str) -> Any:
    """Numba's type of a function of an address: "load" gives all of a block, NAME one word, set_NAME writes one."""
    if name == "load":
        function = _block_loader(block)
    elif name.startswith("set_"):
        function = _word_storer(block.offset(name.removeprefix("set_")))
    else:
        function = _word_loader(block.offset(name), name in block.floats)
    return types.Function(make_intrinsic_template(function, function._defn, name))


def _word(emit: Emitter, address: Value, offset: int, is_float: bool) -> Value:
    word = emit.load(address, I64, offset, align=8)
    return emit.bitcast(emit.builder.trunc(word, I32), F32) if is_float else word


def words_of(emit: Emitter, block: Block, address: Value, names: str) -> list[Value]:
    """Words of the block at an address, for intrinsics that take the address."""
    return [_word(emit, address, block.offset(name), name in block.floats) for name in names.split()]


def _word_loader(offset: int, is_float: bool) -> Any:
    @emitted(FLOAT if is_float else types.int64, ADDRESS)
    def load(emit: Emitter, address: Value) -> Value:
        return _word(emit, address, offset, is_float)

    return load


def _word_storer(offset: int) -> Any:
    @emitted(VOID, ADDRESS, types.int64)
    def store(emit: Emitter, address: Value, value: Value) -> None:
        emit.store(value, address, offset, align=8)

    return store


def _block_loader(block: Block) -> Any:
    """An intrinsic that loads all words of a block into a named tuple."""
    kinds = [FLOAT if word in block.floats else types.int64 for word in block.fields]
    record = types.NamedTuple(kinds, namedtuple("Parameters", block.fields))

    @intrinsic
    def load(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            emit = Emitter(context, builder)
            words = [_word(emit, arguments[0], 8 * index, kind is FLOAT) for index, kind in enumerate(kinds)]
            return context.make_tuple(builder, record, words)

        return record(types.int64), generate

    return load


@typeof_impl.register(Block)
def _typeof_block(block: Block, context: Any) -> _BlockType:
    return _BlockType(block)


@infer_getattr
class _BlockAttributes(AttributeTemplate):  # type: ignore[misc]
    key = _BlockType

    def generic_resolve(self, kind: Any, name: str) -> Any:
        return _block_function(kind.block, name)


@lower_constant(_BlockType)
def _constant_block(context: Any, builder: Any, kind: Any, block: Any) -> Any:
    return context.get_dummy_value()


@lower_getattr_generic(_BlockType)
def _block_attribute(context: Any, builder: Any, kind: Any, block: Any, name: str) -> Any:
    return context.get_dummy_value()
