"""The handler of signals that end a process: it writes the op that every thread was recorded to be in.

It calls nothing but system calls and takes no lock, as a handler must: it copies text that was prepared, and digits,
and leaves the rest to the handler that was there before.
"""

import numpy as np
from llvmlite import ir
from numba import types

from localinfer.kernels.cpu import crash_reports
from localinfer.kernels.cpu.compiled.emit import ADDRESS, I64, Emitter, Value, emitted
from localinfer.kernels.cpu.compiled.memory import (
    atomic_exchange,
    load_i64,
    load_u8,
    load_u32_anywhere,
    spin_hint,
    store_i64,
    store_u8,
)
from localinfer.kernels.cpu.crash_reports import (
    CRASH_AREA,
    KERNEL,
    KERNEL_BYTES,
    PIECE,
    PIECE_BYTES,
    POOL,
    POOL_BYTES,
    SIGNAL,
    SIGNAL_BYTES,
    TAPE,
    TAPE_BYTES,
)
from localinfer.kernels.cpu.kernel_abi import (
    BATCH,
    CURRENT_OP,
    LAST_RUNS,
    LINE_BYTES,
    NUM_RUNS,
    NUM_THREADS,
    RUN_BYTES,
    RUNS,
    SLEEPING,
    THREAD_ID,
)
from localinfer.kernels.cpu.parameters import BATCH as HEADER, RUN
from localinfer.kernels.jit.numba import entry, inline

_SPINS = 100_000_000
"""Wait of a second thread that crashes for the first one's report."""


@emitted(types.int64)
def _area_cell(emit: Emitter) -> Value:
    """Address of the word that holds the address of the CRASH_AREA: a handler gets no argument of its own."""
    module = emit.builder.module
    cell = module.globals.get("localinfer.crash_area")
    if cell is None:
        cell = ir.GlobalVariable(module, I64, "localinfer.crash_area")
        cell.linkage, cell.initializer = "internal", I64(0)
    return emit.builder.ptrtoint(cell, I64)


@emitted(types.int64, ADDRESS, *[types.int64] * 3)
def _call(emit: Emitter, function: Value, first: Value, second: Value, third: Value) -> Value:
    """Call a function of the C library with at most three numbers or addresses."""
    kind = ir.FunctionType(I64, [I64] * 3)
    return emit.builder.call(emit.builder.inttoptr(function, kind.as_pointer()), [first, second, third])


@inline
def _append(area: int, at: int, source: int, size: int) -> int:
    """Copy a piece behind the text of `at` bytes; returns how long it is then."""
    text = CRASH_AREA.text(area)
    for index in range(min(size, CRASH_AREA.room(area) - at)):
        store_u8(text + at, load_u8(source + index))
        at += 1
    return at


@inline
def _say(area: int, at: int, phrase: int) -> int:
    piece = CRASH_AREA.phrases(area) + PIECE_BYTES * phrase
    return _append(area, at, PIECE.address(piece), PIECE.size(piece))


@inline
def _append_digits(area: int, at: int, value: int, base: int) -> int:
    """A number that is not negative, or an address, whose bits are those of one."""
    text, room = CRASH_AREA.text(area), CRASH_AREA.room(area)
    divisor = 1
    while value // divisor >= base:
        divisor *= base
    while divisor > 0 and at < room:
        digit = value // divisor % base
        store_u8(text + at, np.uint8(digit + 48 if digit < 10 else digit + 87))
        at += 1
        divisor //= base
    return at


@inline
def _count(area: int, at: int, phrase: int, value: int) -> int:
    return _append_digits(area, _say(area, at, phrase), max(value, 0), 10)


@inline
def _find_thread(area: int) -> tuple[int, int]:
    """The control block of the pool that the calling thread runs ops of, and its number there; 0 if it runs none."""
    own = _call(CRASH_AREA.thread_id(area), 0, 0, 0)
    for index in range(CRASH_AREA.num_pools(area)):
        pool = CRASH_AREA.pools(area) + POOL_BYTES * index
        for thread in range(POOL.lines(pool)):
            line = POOL.control(pool) + SLEEPING + LINE_BYTES * thread
            if load_i64(line + CURRENT_OP) != 0 and load_i64(line + THREAD_ID) == own:
                return POOL.control(pool), thread
    return 0, 0


@inline
def _append_kernel(area: int, at: int, phrase: int, place: int) -> int:
    """The phrase and the kernel whose code is at an address; nothing if it is none's."""
    for index in range(CRASH_AREA.num_kernels(area)):
        kernel = CRASH_AREA.kernels(area) + KERNEL_BYTES * index
        if KERNEL.first(kernel) <= place < KERNEL.end(kernel):
            return _append(area, _say(area, at, phrase), KERNEL.name(kernel), KERNEL.size(kernel))
    return at


@inline
def _append_op(area: int, at: int, op: int) -> int:
    """Description of an entry of a tape, or else of the kernel it calls."""
    for index in range(CRASH_AREA.num_tapes(area)):
        tape = CRASH_AREA.tapes(area) + TAPE_BYTES * index
        first, end = TAPE.first(tape), TAPE.end(tape)
        if first <= op < end:
            number = (op - first) // 16
            at = _count(area, at, crash_reports.IN_OP, number + 1)
            at = _count(area, at, crash_reports.OF, (end - first) // 16)
            piece = TAPE.pieces(tape) + PIECE_BYTES * number
            return _append(area, _say(area, at, crash_reports.COLON), PIECE.address(piece), PIECE.size(piece))
    return _append_kernel(area, at, crash_reports.IN_KERNEL, load_i64(op))


@inline
def _append_runs(area: int, at: int, control: int) -> int:
    count = load_i64(control + NUM_RUNS)
    at = _say(area, at, crash_reports.LAST_RUNS_ARE)
    for back in range(min(count, LAST_RUNS)):
        run = control + RUNS + RUN_BYTES * ((count - 1 - back) % LAST_RUNS)
        at = _count(area, at, crash_reports.OPS_ARE, RUN.num_ops(run))
        at = _count(area, at, crash_reports.ROWS, RUN.num_rows(run))
        at = _count(area, at, crash_reports.OUTPUT_ROWS, RUN.num_output_rows(run))
        at = _count(area, at, crash_reports.SEQUENCES, RUN.num_segments(run))
        at = _count(area, at, crash_reports.THREADS_ARE, RUN.num_threads(run))
    return at


@inline
def _is_fault(info: int) -> bool:
    """True if an instruction caused the signal, not a program that sent it."""
    code = load_u32_anywhere(info + crash_reports.CODE_OFFSET)
    return code != 0 and code < crash_reports.SENT_BY_PROGRAM


@inline
def _compose(area: int, entry_of_signal: int, info: int, context: int) -> int:
    """Write the report; returns its size."""
    at = _say(area, 0, crash_reports.CRASHED)
    at = _append(area, at, SIGNAL.name(entry_of_signal), SIGNAL.size(entry_of_signal))
    has_address = load_u32_anywhere(info + crash_reports.CODE_OFFSET) - 1 < crash_reports.WITHOUT_ADDRESS
    if has_address and _is_fault(info) and CRASH_AREA.fault_offset(area) >= 0:
        at = _say(area, at, crash_reports.AT_ADDRESS)
        at = _append_digits(area, at, load_i64(info + CRASH_AREA.fault_offset(area)) & 0x7FFFFFFFFFFFFFFF, 16)
    place = 0
    if CRASH_AREA.instruction_offset(area) >= 0:
        place = load_i64(context + CRASH_AREA.instruction_offset(area))
    control, thread = _find_thread(area)
    before = at
    if control != 0:
        at = _append_op(area, at, load_i64(control + SLEEPING + LINE_BYTES * thread + CURRENT_OP))
        at = _count(area, at, crash_reports.THREAD, thread + 1)
        at = _count(area, at, crash_reports.OF, load_i64(control + NUM_THREADS))
        header = load_i64(control + BATCH)
        if header != 0:
            at = _count(area, at, crash_reports.ROWS, HEADER.num_rows(header))
            at = _count(area, at, crash_reports.OUTPUT_ROWS, HEADER.num_output_rows(header))
            at = _count(area, at, crash_reports.SEQUENCES, HEADER.num_segments(header))
    at = _append_kernel(area, at, crash_reports.INSTRUCTION_IN, place)
    if at == before:
        at = _say(area, at, crash_reports.OUTSIDE)
    at = _say(area, at, crash_reports.SYSTEM)
    if control != 0:
        at = _append_runs(area, at, control)
    return _say(area, at, crash_reports.LINE_END)


@inline
def _write_all(area: int, descriptor: int, size: int) -> None:
    done = 0
    while done < size:
        count = _call(CRASH_AREA.put(area), descriptor, CRASH_AREA.text(area) + done, size - done)
        if count <= 0 or count > size - done:
            return
        done += count


@entry("q", "qqq")
def handle(signal: int, info: int, context: int) -> int:
    """Handle a signal: report, and put back what was done about it before, which answers when the fault recurs."""
    cell = _area_cell()
    if signal == crash_reports.INSTALL:
        store_i64(cell, info)
        return 0
    area = load_i64(cell)
    number = signal & 0xFFFFFFFF
    for index in range(CRASH_AREA.num_signals(area)):
        found = CRASH_AREA.signals(area) + SIGNAL_BYTES * index
        if SIGNAL.number(found) != number:
            continue
        if atomic_exchange(area, 1) == 0:
            size = _compose(area, found, info, context)
            _write_all(area, crash_reports.ERROR_DESCRIPTOR, size)
            if CRASH_AREA.path(area) != 0:
                file = _call(CRASH_AREA.create(area), CRASH_AREA.path(area), crash_reports.FILE_MODE, 0) & 0xFFFFFFFF
                if file < 0x80000000:
                    _write_all(area, file, size)
                    _call(CRASH_AREA.close(area), file, 0, 0)
        else:
            for _ in range(_SPINS):
                spin_hint()
        _call(CRASH_AREA.restore(area), number, SIGNAL.former(found), 0)
        if not _is_fault(info):
            # Sent by a program, so that it will not recur by itself.
            _call(CRASH_AREA.raise_signal(area), number, 0, 0)
    return 0
