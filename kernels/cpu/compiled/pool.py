"""The loops of the thread pool: walking a tape, waiting for work, and starting a run.

Threads enter the op that the control block's STATE names, claim units of it until none are left, and leave it; the last
one that leaves names the next op. So an op waits only for threads that have begun a part of it. One that lost its
processor between two ops, or sleeps, is not missed: others take its units, and it enters the op that they are at by
then, which may be one of a later run. Between entering and leaving nothing of the run can go away.

A thread that finds nothing to do looks again for a while and then sleeps, where the system lets compiled code do so: a
thread that yields would be given the less of its processor for it, one that sleeps is owed the time.
"""

from collections.abc import Callable
from typing import Any

from localinfer.kernels.cpu.compiled.memory import (
    CAN_SLEEP,
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_or,
    atomic_replace,
    atomic_store,
    call_op,
    clock,
    is_waiting,
    load_i64,
    sleep_while,
    spin_hint,
    store_i64,
    wake_sleeper,
    yield_processor,
)
from localinfer.kernels.cpu.kernel_abi import (
    ACTIVE,
    BARRIER_NANOSECONDS,
    BARRIER_SPINS,
    BATCH,
    CLAIM_SHIFT,
    CLOSED,
    CURRENT_OP,
    FIRST_SEQUENCE,
    FIRST_TAKEN,
    IDLE_NANOSECONDS,
    IDLE_SPINS,
    LAST_FIRST_SEQUENCE,
    LAST_RUNS,
    LINE_BYTES,
    MUST_WAKE,
    NEXT_UNIT,
    NUM_OPS,
    NUM_RUNS,
    NUM_THREADS,
    OPS,
    RUN_BYTES,
    RUNS,
    SCRATCH_BYTES,
    SEQUENCE_SHIFT,
    SLEEPERS,
    SLEEPING,
    STATE,
    STOPPING,
    THREADS_SHIFT,
)
from localinfer.kernels.cpu.parameters import BATCH as HEADER, RUN, Block
from localinfer.kernels.jit.numba import Source, compose, entry, inline, op

_THREADS = (1 << SEQUENCE_SHIFT - THREADS_SHIFT) - 1


@inline
def take_units(control: int, count: int) -> int:
    """Claim the next `count` units of the current op; returns the first, which may lie past the end."""
    return atomic_add(control + NEXT_UNIT, count)


@inline
def _claim_word(control: int, thread: int) -> int:
    return control + FIRST_TAKEN + 8 * (thread >> CLAIM_SHIFT)


@inline
def _claim_bit(thread: int) -> int:
    return thread & (1 << CLAIM_SHIFT) - 1


@inline
def take_first(control: int, thread: int) -> bool:
    """Claim the first stretch of a thread, the caller or another; returns whether it was free."""
    bit = _claim_bit(thread)
    return atomic_or(_claim_word(control, thread), 1 << bit) >> bit & 1 == 0


@inline
def take_absent(control: int, num_threads: int) -> int:
    """Claim the first stretch of a thread that has not come; returns the thread, or `num_threads` if all have."""
    # A word is read again for every bit: a CPU then guesses that a bit is free, and claims it before the word is there.
    for thread in range(num_threads):
        is_free = atomic_load(_claim_word(control, thread)) >> _claim_bit(thread) & 1 == 0
        if is_free and take_first(control, thread):
            return thread
    return num_threads


@inline
def stretch(index: int, units: int, num_threads: int) -> tuple[int, int]:
    """First unit and end of stretch `index`: half of all units in one stretch per thread, then half of the rest, ...

    Long stretches first, so that memory is read in long lines; short ones last, so that no thread waits long for
    another. A first unit of `units` says that nothing is left.
    """
    start, size = 0, max(1, units // (2 * num_threads))
    for _ in range(index // num_threads):
        start += num_threads * size
        size = max(1, (units - start) // (2 * num_threads))
    first = min(start + (index % num_threads) * size, units)
    return first, min(first + size, units)


@inline
def _clear_claims(control: int, num_threads: int) -> None:
    store_i64(control + NEXT_UNIT, 0)
    store_i64(control + FIRST_TAKEN, 0)
    word = 1
    while word << CLAIM_SHIFT < num_threads:
        store_i64(control + FIRST_TAKEN + 8 * word, 0)
        word += 1


@inline
def _call(control: int, thread: int, index: int, num_threads: int) -> None:
    op = load_i64(control + OPS) + 16 * index
    # Where a crash happened, which is read by the handler of the signal alone.
    store_i64(control + SLEEPING + LINE_BYTES * thread + CURRENT_OP, op)
    call_op(load_i64(op), load_i64(op + 8), load_i64(control + BATCH), thread, num_threads)


@inline
def _walk_alone(control: int) -> None:
    _clear_claims(control, 1)
    for index in range(load_i64(control + NUM_OPS)):
        _call(control, 0, index, 1)
        _clear_claims(control, 1)
    store_i64(control + SLEEPING + CURRENT_OP, 0)


@inline
def _wake_sleepers(control: int, first: int, num_threads: int) -> int:
    """Take down the marks of sleeping threads and wake them; returns how many were marked that Python must wake."""
    marked = 0
    if atomic_load(control + SLEEPERS) != 0:
        for thread in range(first, num_threads):
            line = control + SLEEPING + LINE_BYTES * thread
            if load_i64(line) != 0 and atomic_exchange(line, 0) == 1:
                atomic_add(control + SLEEPERS, -1)
                if CAN_SLEEP:
                    wake_sleeper(line)
                else:
                    store_i64(line + MUST_WAKE, 1)
                    marked += 1
    return marked


@inline
def _leave(control: int, num_threads: int) -> bool:
    """Leave the op; returns whether this thread was the last and has entered the next."""
    while True:
        state = atomic_load(control + STATE)
        if state & ACTIVE > 1:
            if atomic_replace(control + STATE, state, state - 1) == 1:
                return False
        elif atomic_replace(control + STATE, state, (state - 1) | CLOSED) == 1:
            break
    # No thread enters until the next op is named.
    following = ((state >> SEQUENCE_SHIFT) + 1 << SEQUENCE_SHIFT) | num_threads << THREADS_SHIFT
    has_more = (following >> SEQUENCE_SHIFT) - load_i64(control + FIRST_SEQUENCE) < load_i64(control + NUM_OPS)
    _clear_claims(control, num_threads)
    # At the end of the run only its first thread waits for that.
    atomic_store(control + STATE, following + 1 if has_more else following | CLOSED)
    if CAN_SLEEP:
        _wake_sleepers(control, 0, num_threads if has_more else 1)
    return has_more


@inline
def _sleep(control: int, thread: int, state: int) -> int:
    """Sleep while the state stays as it is; returns 1 where Python must let the thread sleep, which is marked then."""
    line = control + SLEEPING + LINE_BYTES * thread
    # The count first, so that a thread that sees the mark decrements a counted one.
    atomic_add(control + SLEEPERS, 1)
    atomic_exchange(line, 1)
    # A state that changed just before the mark was up may have been set by a thread that did not see it.
    if atomic_load(control + STATE) == state:
        if CAN_SLEEP == 0:
            return 1
        sleep_while(line, 1)
    if atomic_exchange(line, 0) == 1:
        atomic_add(control + SLEEPERS, -1)
        return 0
    # The mark is down already: where Python wakes, it has released what the thread would sleep on.
    return 0 if CAN_SLEEP else 1


@inline
def _take_part(control: int, thread: int, end: int) -> int:
    """Enter ops as they come. Thread 0 returns at op `end` of all, others when they are to end (-1) or to sleep (1)."""
    left = -1
    spins, began = 0, 0
    while True:
        state = atomic_load(control + STATE)
        sequence = state >> SEQUENCE_SHIFT
        if thread == 0 and sequence >= end:
            return 0
        num_threads = state >> THREADS_SHIFT & _THREADS
        if state & CLOSED == 0 and sequence != left and thread < num_threads:
            if atomic_replace(control + STATE, state, state + 1) == 0:
                continue
            first = load_i64(control + FIRST_SEQUENCE)
            _call(control, thread, sequence - first, num_threads)
            while _leave(control, num_threads):
                sequence += 1
                _call(control, thread, sequence - first, num_threads)
            store_i64(control + SLEEPING + LINE_BYTES * thread + CURRENT_OP, 0)
            left = sequence
            spins = 0
            continue
        is_idle = thread != 0 and (state & CLOSED != 0 or thread >= num_threads)
        if is_idle and load_i64(control + STOPPING) != 0:
            return -1
        if spins == 0:
            began = clock()
        spins += 1
        looks = load_i64(control + (IDLE_SPINS if is_idle else BARRIER_SPINS))
        nanoseconds = load_i64(control + (IDLE_NANOSECONDS if is_idle else BARRIER_NANOSECONDS))
        if is_waiting(spins, looks, began, nanoseconds) != 0:
            spin_hint()
            continue
        spins = 0
        if is_idle or CAN_SLEEP:
            if _sleep(control, thread, state) == 1:
                return 1
        else:
            yield_processor()


@inline
def _remember_run(control: int) -> None:
    """Note what is about to run; thread 0 does."""
    count = load_i64(control + NUM_RUNS)
    store_i64(control + NUM_RUNS, count + 1)
    run = control + RUNS + RUN_BYTES * (count % LAST_RUNS)
    RUN.set_ops(run, load_i64(control + OPS))
    RUN.set_num_ops(run, load_i64(control + NUM_OPS))
    RUN.set_num_threads(run, load_i64(control + NUM_THREADS))
    header = load_i64(control + BATCH)
    has_rows = header != 0
    RUN.set_num_rows(run, HEADER.num_rows(header) if has_rows else 0)
    RUN.set_num_output_rows(run, HEADER.num_output_rows(header) if has_rows else 0)
    RUN.set_num_segments(run, HEADER.num_segments(header) if has_rows else 0)


@entry("q", "qq")
def start_run(control: int, num_threads: int) -> int:
    """Name the first op of a run of `num_threads` threads; returns how many workers are marked to be woken."""
    _remember_run(control)
    _clear_claims(control, num_threads)
    # No thread is in an op of a number that comes again: one that left such an op does not enter this one, at worst.
    sequence = atomic_load(control + STATE) >> SEQUENCE_SHIFT & LAST_FIRST_SEQUENCE
    store_i64(control + FIRST_SEQUENCE, sequence)
    is_empty = load_i64(control + NUM_OPS) == 0
    atomic_store(
        control + STATE, sequence << SEQUENCE_SHIFT | num_threads << THREADS_SHIFT | (CLOSED if is_empty else 0)
    )
    return _wake_sleepers(control, 1, num_threads)


@entry("q", "q")
def finish_run(control: int) -> int:
    """Do thread 0's share; returns when the last op is over, at once where it is already."""
    if load_i64(control + NUM_THREADS) == 1:
        _remember_run(control)
        _walk_alone(control)
        return 0
    return _take_part(control, 0, load_i64(control + FIRST_SEQUENCE) + load_i64(control + NUM_OPS))


@entry("q", "qq")
def stop_work(control: int, num_threads: int) -> int:
    """Let all threads but the first of `num_threads` end, between two runs; returns as `start_run` does."""
    store_i64(control + STOPPING, 1)
    atomic_store(control + STATE, ((atomic_load(control + STATE) >> SEQUENCE_SHIFT) + 1 << SEQUENCE_SHIFT) | CLOSED)
    return _wake_sleepers(control, 1, num_threads)


@entry("q", "qq")
def work(control: int, thread: int) -> int:
    """Do runs until idle for a while: returns 1 when the thread is to sleep in Python, or -1 to end it."""
    return _take_part(control, thread, 0)


@inline
def num_rows(batch: int, is_output: int) -> int:
    """Rows of the batch, or of its output."""
    return HEADER.num_output_rows(batch) if is_output != 0 else HEADER.num_rows(batch)


@inline
def scratch(batch: int, thread: int) -> int:
    """Address of this thread's own scratch memory, 64-byte aligned."""
    return HEADER.scratch(batch) + thread * SCRATCH_BYTES


@inline
def rows_at_once(left: int) -> int:
    """Rows, of `left`, that the next call of an innermost product takes: 8, 4, 2 or 1, as registers hold."""
    if left >= 8:
        return 8
    if left >= 4:
        return 4
    return 2 if left >= 2 else 1


def row_op(
    block: Block, parts: Callable[[Any], int] = lambda p: 1, *, of_output: bool = False, in_runs: bool = False
) -> Callable[[Callable[..., None]], Source]:
    """Make a tape op of a function of (p, batch, thread, row, part), called once for every part of every row.

    p: the words of the block. parts: how many a row has, a function of p. The rows are those of the batch, or where the
    block has a word `is_output` or with of_output, those with logits. Threads claim parts as they get free: one at a
    time, or several in a run where one is little work.
    """
    has_word = "is_output" in block.fields
    parts_of = inline(parts)

    def decorate(function: Callable[..., None]) -> Source:
        body = compose(function)

        @op
        def kernel(parameters: int, batch: int, thread: int, num_threads: int) -> None:
            p = block.load(parameters)
            control = HEADER.control(batch)
            count = parts_of(p)
            rows = num_rows(batch, p.is_output) if has_word else num_rows(batch, of_output)
            units, claim = rows * count, 1
            if in_runs:
                claim = max(1, units // (4 * num_threads))
            while True:
                start = take_units(control, claim)
                if start >= units:
                    return
                for unit in range(start, min(start + claim, units)):
                    body(p, batch, thread, unit // count, unit % count)

        return kernel

    return decorate
