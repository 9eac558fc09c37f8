"""The machine's two ceilings, measured with the kernels' own means: bytes read and integer products per second."""

from collections.abc import Sequence

from numba import types

from localinfer.kernels.cpu.compiled.emit import I8, I32, I64, Emitter, Value, emitted, vector
from localinfer.kernels.cpu.compiled.memory import store_i64
from localinfer.kernels.cpu.compiled.pool import take_units
from localinfer.kernels.cpu.kernel_abi import MULTIPLICATIONS_PER_ROUND
from localinfer.kernels.cpu.parameters import BATCH, MULTIPLY, READ_MEMORY
from localinfer.kernels.jit.numba import op

_PREFETCH_BYTES = 4096
_LINES = 4
_CHAINS = MULTIPLICATIONS_PER_ROUND // 64


@emitted(types.int64, types.int64, types.int64)
def _read(emit: Emitter, start: Value, length: Value) -> Value:
    """Combine all bytes (a multiple of 256) into one word, so that every line must arrive."""
    b = emit.builder

    def step(offset: Value, carried: list[Value]) -> Sequence[Value]:
        place = b.add(start, offset)
        for line in range(_LINES):
            emit.prefetch(place, _PREFETCH_BYTES + 64 * line)
        loaded = [emit.load(place, vector(I32), 64 * line, align=64) for line in range(_LINES)]
        return [b.xor(value, new) for value, new in zip(carried, loaded, strict=True)]

    values = emit.loop(emit.i64(0), length, 64 * _LINES, [emit.zeros(I32)] * _LINES, step)
    total = values[0]
    for value in values[1:]:
        total = b.xor(total, value)
    return b.zext(b.extract_element(total, emit.i32(0)), I64)


@emitted(types.int64, types.int64, types.int64)
def _multiply(emit: Emitter, seed_value: Value, count: Value) -> Value:
    """`rounds` rounds of _CHAINS independent dot products of 64 byte pairs, all in registers."""
    b = emit.builder
    word = emit.splat(b.and_(b.trunc(seed_value, I32), emit.i32(0x0F0F0F0F)))
    codes = emit.bitcast(word, vector(I8, 64))

    def step(index: Value, carried: list[Value]) -> Sequence[Value]:
        # By its own sum, so that no part of a product is the same in the next round and computed only once.
        return [emit.dot_codes(value, codes, emit.bitcast(value, vector(I8, 64))) for value in carried]

    # Different starts keep the chains from being one and the same.
    starts = [emit.splat(b.add(b.trunc(seed_value, I32), emit.i32(i))) for i in range(_CHAINS)]
    values = emit.loop(emit.i64(0), count, 1, starts, step)
    total = values[0]
    for value in values[1:]:
        total = b.xor(total, value)
    return b.zext(b.extract_element(total, emit.i32(0)), I64)


@op
def read_memory(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """Read a stretch once: address, bytes per unit (a multiple of 256), units, address of an int64 sink."""
    p = READ_MEMORY.load(parameters)
    control = BATCH.control(batch)
    total = 0
    while True:
        unit = take_units(control, 1)
        if unit >= p.units:
            break
        total ^= _read(p.start + unit * p.unit_bytes, p.unit_bytes)
    store_i64(READ_MEMORY.sink(parameters) + 64 * thread, total)


@op
def multiply_bytes(parameters: int, batch: int, thread: int, num_threads: int) -> None:
    """One unit per thread: rounds, address of an int64 sink."""
    p = MULTIPLY.load(parameters)
    while True:
        unit = take_units(BATCH.control(batch), 1)
        if unit >= num_threads:
            return
        store_i64(p.sink + 64 * unit, _multiply(unit + 1, p.rounds))
