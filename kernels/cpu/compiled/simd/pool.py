"""The loops of the thread pool: walking a tape, waiting for work, and starting a run."""

from localinfer.kernels.cpu.compiled.simd.memory import (
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_store,
    call_op,
    load_i64,
    spin_hint,
    store_i64,
    yield_processor,
)
from localinfer.kernels.cpu.kernel_abi import (
    ARRIVED,
    BATCH,
    CURRENT_OP,
    GENERATION,
    IDLE_SPINS,
    LAST_RUNS,
    MAX_THREADS,
    NEXT_UNIT,
    NUM_OPS,
    NUM_RUNS,
    NUM_THREADS,
    OPS,
    RELEASED,
    RUNS,
    SLEEPING,
    STOPPING,
    YIELD_SPINS,
)
from localinfer.kernels.cpu.parameters import BATCH as HEADER
from localinfer.kernels.cpu.parameters import RUN
from localinfer.kernels.jit.numba import entry, inline


@inline
def take_units(control: int, count: int) -> int:
    """Claim the next `count` units of the current op; returns the first, which may lie past the end."""
    return atomic_add(control + NEXT_UNIT, count)


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
def _barrier(control: int, num_threads: int) -> None:
    """Wait until every thread has finished the op; the last one resets the unit counter."""
    if num_threads == 1:
        store_i64(control + NEXT_UNIT, 0)
        return
    released = atomic_load(control + RELEASED)
    if atomic_add(control + ARRIVED, 1) == num_threads - 1:
        store_i64(control + ARRIVED, 0)
        store_i64(control + NEXT_UNIT, 0)
        atomic_store(control + RELEASED, released + 1)
        return
    spins_before_yield = load_i64(control + YIELD_SPINS)
    spins = 0
    while atomic_load(control + RELEASED) == released:
        spins += 1
        if spins == spins_before_yield:
            spins = 0
            yield_processor()
        spin_hint()


@inline
def _walk(control: int, thread: int) -> None:
    ops = load_i64(control + OPS)
    batch = load_i64(control + BATCH)
    num_threads = load_i64(control + NUM_THREADS)
    # Where a crash happened, which is read by the handler of the signal alone.
    current = control + SLEEPING + 64 * thread + CURRENT_OP
    for index in range(load_i64(control + NUM_OPS)):
        store_i64(current, ops + 16 * index)
        call_op(load_i64(ops + 16 * index), load_i64(ops + 16 * index + 8), batch, thread, num_threads)
        _barrier(control, num_threads)
    store_i64(current, 0)


@inline
def _remember_run(control: int) -> None:
    """Note what is about to run; thread 0 does."""
    count = load_i64(control + NUM_RUNS)
    store_i64(control + NUM_RUNS, count + 1)
    run = control + RUNS + 64 * (count % LAST_RUNS)
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
    """Publish a run of `num_threads` threads; returns a bit per sleeping worker that must be woken.

    The count travels in the generation's low bits: a worker that takes no part must never read the rest of the control
    block, which may be about the next run by then.
    """
    runs = atomic_load(control + GENERATION) // MAX_THREADS
    atomic_exchange(control + GENERATION, (runs + 1) * MAX_THREADS + num_threads)
    to_wake = 0
    for worker in range(1, num_threads):
        if atomic_exchange(control + SLEEPING + 64 * worker, 0) == 1:
            to_wake |= 1 << worker
    return to_wake


@entry("q", "q")
def finish_run(control: int) -> int:
    """Do thread 0's share; returns when every thread has passed the last op."""
    _remember_run(control)
    _walk(control, 0)
    return 0


@entry("q", "qqq")
def work(control: int, thread: int, seen: int) -> int:
    """Do runs until idle for a while; returns the last generation seen, or -1 to end the thread."""
    spins_before_sleep = load_i64(control + IDLE_SPINS)
    spins = 0
    while spins < spins_before_sleep:
        generation = atomic_load(control + GENERATION)
        if generation == seen:
            spins += 1
            spin_hint()
            continue
        seen = generation
        if load_i64(control + STOPPING) != 0:
            return -1
        if thread >= generation % MAX_THREADS:
            continue
        spins = 0
        _walk(control, thread)
    atomic_exchange(control + SLEEPING + 64 * thread, 1)
    # A run published just before the flag was up did not see it: take the flag back and go on. If it is down already,
    # the publisher has seen it and releases the lock, so the caller must consume that.
    if atomic_load(control + GENERATION) != seen and atomic_exchange(control + SLEEPING + 64 * thread, 0) == 1:
        return -2 - seen
    return seen
